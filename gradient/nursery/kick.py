"""Wakes a pass before its time, from synchronous code."""

from __future__ import annotations

import attrs
import trio


@attrs.define(eq=False)
class Kick:
    """A wish that one task wakes up. Wishes made while nobody waits become one.

    `set` never blocks, so callbacks may call it; one task waits.
    """

    _event: trio.Event = attrs.field(factory=trio.Event, init=False)

    def set(self) -> None:
        """Wake the waiting task, or let its next wait return at once."""
        self._event.set()

    async def wait(self) -> None:
        """Wait for a wish and take it. A cancelled wait takes nothing."""
        await self._event.wait()
        self._event = trio.Event()
