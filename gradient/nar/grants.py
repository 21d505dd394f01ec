"""Short-lived tokens for uploads and downloads. Layer: nar, pure; the time is an argument.

A token is a signed note "`subject` may do `scope` until `expires`", which the server reads back without
a database. It is not revocable: keep it short-lived.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from typing import Final

import attrs

from gradient.nar.errors import InvalidGrant

# Tokens travel in URLs and headers.
MAX_TOKEN: Final = 4096  # characters
_MAC_SIZE: Final = 32  # bytes of HMAC-SHA256
_MIN_SECRET: Final = 32  # bytes


@attrs.frozen
class Grants:
    """Issues and checks tokens with one secret, which only the server knows."""

    _secret: bytes = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        if len(self._secret) < _MIN_SECRET:
            raise ValueError(f"a grant secret needs {_MIN_SECRET} bytes")

    def issue(self, scope: str, subject: str, expires: int) -> str:
        """A token for `scope` (what may be done, such as `upload`) on behalf of `subject` (such as a job),
        valid before `expires` (epoch seconds). URL-safe text."""
        note = json.dumps([scope, subject, expires], separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._mac(note) + note).rstrip(b"=").decode()

    def check(self, token: str, scope: str, now: int) -> str:
        """The subject of a token for `scope`. Raises InvalidGrant when it is forged, expired, or for
        something else; the forged ones learn nothing from the time it takes."""
        data = _decode(token)
        mac, note = data[:_MAC_SIZE], data[_MAC_SIZE:]
        if not hmac.compare_digest(mac, self._mac(note)):
            raise InvalidGrant("the token was not issued by this server")
        granted, subject, expires = json.loads(note)
        if granted != scope:
            raise InvalidGrant(f"the token is for {granted!r}, not for {scope!r}")
        if now >= expires:
            raise InvalidGrant("the token has expired: ask for a new one")
        return str(subject)

    def _mac(self, note: bytes) -> bytes:
        return hmac.digest(self._secret, note, hashlib.sha256)


def _decode(token: str) -> bytes:
    if len(token) > MAX_TOKEN or not token.isascii():
        return b""
    try:
        return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except (binascii.Error, ValueError):
        return b""
