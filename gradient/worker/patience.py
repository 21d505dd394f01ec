"""Time limits that progress renews. Layer: worker, pure.

A transfer may take as long as it takes, as long as it moves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import attrs
import trio


@attrs.define(eq=False)
class Watched(AsyncIterator[bytes]):
    """Chunks, each of which, and their end, gives `scope` another `limit` seconds."""

    _chunks: AsyncIterator[bytes]
    _scope: trio.CancelScope
    _limit: float

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._chunks)
        finally:
            self._scope.deadline = trio.current_time() + self._limit
