"""Who may write: bearer tokens. Layer: web.

A token is looked up by its hash. That leaks nothing by its timing: who does not know a token cannot steer
what its SHA-256 shares with the stored one. Grants are checked in constant time by `nar.grants`.
Tokens are never logged and never part of an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

import attrs

from gradient.graph.access import find_api_token, hash_token
from gradient.graph.pg_pool import Pool
from gradient.nar.errors import InvalidGrant
from gradient.nar.grants import MAX_TOKEN, Grants
from gradient.web.errors import Unauthorized

UPLOAD_SCOPE: Final = "upload"
# How long a token that was revoked may still work.
REMEMBER: Final = timedelta(seconds=10)
# Valid tokens remembered; a deployment has a handful.
MAX_REMEMBERED: Final = 256


@attrs.define(eq=False)
class Gate:
    """Checks the `Authorization` header of a request. Every method raises Unauthorized, in one line."""

    readers: Pool
    grants: Grants
    clock: Callable[[], datetime]
    # Hashes of valid tokens: the token's name, and until when it need not be looked up again.
    _remembered: OrderedDict[bytes, tuple[str, datetime]] = attrs.field(factory=OrderedDict, init=False)

    async def admit(self, authorization: str | None) -> str:
        """The name of the API token."""
        token = _bearer(authorization)
        name = await self._api_token(token)
        if name is None:
            raise Unauthorized("the token is wrong, or was revoked")
        return name

    async def admit_upload(self, authorization: str | None) -> str:
        """On whose behalf an upload comes: the subject of a grant, or the name of an API token."""
        token = _bearer(authorization)
        try:
            return self.grants.check(token, UPLOAD_SCOPE, int(self.clock().timestamp()))
        except InvalidGrant as error:
            refusal = str(error)
        name = await self._api_token(token)
        if name is None:
            raise Unauthorized(refusal)
        return name

    async def _api_token(self, token: str) -> str | None:
        token_hash, now = hash_token(token), self.clock()
        name, until = self._remembered.get(token_hash, ("", now))
        if now < until:
            return name
        async with self.readers.connection() as connection:
            found = await find_api_token(connection, token_hash)
        if found is None:
            self._remembered.pop(token_hash, None)
            return None
        self._remembered[token_hash] = found, now + REMEMBER
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return found


def _bearer(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN:
        raise Unauthorized("a token is needed: send the header `Authorization: Bearer TOKEN`")
    return token
