"""Reaching the server: its URL, and a byte stream to it. No WebSocket here."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

import attrs
import trio

from gradient.http import errors as http
from gradient.http.dial import open_stream
from gradient.wire.errors import ConnectFailed


@attrs.frozen
class Address:
    """A parsed WebSocket URL."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        parts = urlsplit(url)
        if parts.scheme not in {"ws", "wss"} or not parts.hostname or parts.username:
            raise ValueError(f"not a ws:// or wss:// URL: {parts.scheme}://{parts.hostname}")
        tls = parts.scheme == "wss"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, tls)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'wss' if self.tls else 'ws'}://{self.host_header}"


async def dial(address: Address, tls: ssl.SSLContext | None) -> trio.abc.Stream:
    """A stream to `address`, encrypted if it is wss; raises ConnectFailed."""
    context = (tls or ssl.create_default_context()) if address.tls else None
    try:
        return await open_stream(address.host, address.port, context)
    except http.ConnectFailed as error:
        raise ConnectFailed(f"{address} {error}") from error


def peer_name(stream: trio.abc.Stream) -> str:
    """The other end of `stream` for logs: `127.0.0.1:49152` for TCP."""
    if not isinstance(stream, trio.SocketStream):
        return "stream"
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return "gone"
    return f"{host}:{port}"
