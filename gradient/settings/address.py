"""HOST:PORT, with IPv6 addresses in brackets. Pure."""

from __future__ import annotations

import ipaddress

import attrs


@attrs.frozen
class Address:
    """Where to listen or connect: `host` without brackets, `port` 0 to 65535 (0: any free one)."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `127.0.0.1:3000`, `localhost:0` or `[::1]:3000`. Raises ValueError with a reason."""
        host, colon, port = text.rpartition(":")
        if not colon or not host:
            raise ValueError(f"expected HOST:PORT, got {text!r}")
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"expected a port from 0 to 65535, got {port!r}")
        return cls(_host(host), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def url(self, scheme: str = "http") -> str:
        """The address as a URL that a client on this machine can use: a wildcard becomes localhost."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{scheme}://{Address(host, self.port)}"


def _host(text: str) -> str:
    if text.startswith("[") and text.endswith("]"):
        return str(ipaddress.IPv6Address(text[1:-1]))
    if ":" in text:
        raise ValueError(f"an IPv6 address needs brackets: [{text}]:PORT")
    if not text.isascii() or any(mark.isspace() or mark in "/@[]" for mark in text):
        raise ValueError(f"not a host name: {text!r}")
    return text
