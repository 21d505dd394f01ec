"""Who works on the object of a path: one at a time. Layer: nar.

An upload puts an object in its place before its row exists, and a removal takes one away after its row has
gone; both look at the row first. Between the look and the last step the path is theirs alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager

import attrs
import trio


@attrs.define(eq=False)
class PathClaims:
    """The paths in hand, by hash part. One for everything that touches a store."""

    # The event is set when they no longer are.
    _claimed: dict[str, trio.Event] = attrs.field(factory=dict, init=False)

    @property
    def claimed(self) -> frozenset[str]:
        """The hash parts somebody has now."""
        return frozenset(self._claimed)

    @asynccontextmanager
    async def claim(self, hash_parts: Collection[str]) -> AsyncGenerator[None]:
        """Wait until nobody has any of these, then have them: all at once, so never in a circle."""
        while busy := [self._claimed[part] for part in hash_parts if part in self._claimed]:
            await busy[0].wait()
        done = trio.Event()
        self._claimed.update(dict.fromkeys(hash_parts, done))
        try:
            yield
        finally:
            for part in set(hash_parts):
                del self._claimed[part]
            done.set()
