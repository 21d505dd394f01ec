"""A stream of JSON objects, one a line, out of the pieces of an answer's body."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final

from gradient.cli.faults import ServerUnreachable

# A snapshot of a thousand builds is half a MiB.
MAX_LINE: Final = 32 * 2**20  # bytes


class EventLines:
    """The objects of a stream, and an empty one for each blank line: a sign of life.

    `next` raises ServerUnreachable when the stream ends or is not what it should be, and what the pieces
    raise. Cancelled, the stream is of no more use.
    """

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = bytearray()
        # Where in `_rest` no line end was found so far.
        self._searched = 0

    async def next(self) -> dict[str, Any]:
        """The next object, {} for a blank line."""
        while (end := self._rest.find(b"\n", self._searched)) < 0:
            self._searched = len(self._rest)
            if self._searched > MAX_LINE:
                raise ServerUnreachable("the server sends a line that does not end")
            await self._more()
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        self._searched = 0
        return _object(line)

    async def _more(self) -> None:
        try:
            self._rest += await anext(self._pieces)
        except StopAsyncIteration:
            raise ServerUnreachable("the server ended the stream of events") from None


def _object(line: bytes) -> dict[str, Any]:
    if not line.strip():
        return {}
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ServerUnreachable("the server sends events that are not understood")
    return value
