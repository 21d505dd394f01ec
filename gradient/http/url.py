"""URLs, as far as a client needs them. Pure."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, urljoin, urlsplit

import attrs

from gradient.http.errors import BadUrl

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# What may stand in a request target as it is; anything else is percent-encoded, "%" is kept.
_TARGET_SAFE: Final = "!#$%&'()*+,/:;=?@[]~"


@attrs.frozen
class Origin:
    """Where a connection goes: connections are shared and credentials kept within one."""

    scheme: str
    host: str
    port: int

    @property
    def tls(self) -> bool:
        """Whether bytes travel encrypted."""
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


@attrs.frozen
class Url:
    """An http or https URL. Its text in logs is the origin only: queries carry tokens."""

    origin: Origin
    # Path and query, percent-encoded, as they stand in the request line.
    target: str = attrs.field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Url:
        """Raises BadUrl, without the text: it may hold a secret."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise BadUrl(f"not a URL: {error}") from None
        if parts.scheme not in _DEFAULT_PORTS or not host:
            raise BadUrl(f"not an http:// or https:// URL (scheme {parts.scheme!r}, host {host!r})")
        if parts.username is not None:
            raise BadUrl("a URL with a user name or password; hand the token over instead")
        path = quote(parts.path or "/", safe=_TARGET_SAFE)
        query = f"?{quote(parts.query, safe=_TARGET_SAFE)}" if parts.query else ""
        return cls(Origin(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme]), path + query)

    def join(self, location: str) -> Url:
        """Where a redirect to `location` leads; raises BadUrl."""
        try:
            return Url.parse(urljoin(f"{self.origin}{self.target}", location))
        except ValueError as error:
            raise BadUrl(f"not a URL: {error}") from None

    def __str__(self) -> str:
        return str(self.origin)
