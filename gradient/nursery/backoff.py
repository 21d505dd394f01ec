"""Pauses that double, up to a cap. Pure: whoever waits also sleeps."""

from __future__ import annotations

from typing import Final

import attrs

# A server that restarts is back within seconds; one that is down for long must not be hammered.
FIRST_PAUSE: Final = 1.0  # seconds
LONGEST_PAUSE: Final = 60.0  # seconds


@attrs.define
class Backoff:
    """The pause before the next try, in seconds: `first`, then twice as long each time, at most `longest`."""

    first: float = FIRST_PAUSE
    longest: float = LONGEST_PAUSE
    _next: float | None = attrs.field(default=None, init=False)

    def next_pause(self) -> float:
        """How long to wait now; the following pause is twice that."""
        pause = self.first if self._next is None else self._next
        self._next = min(pause * 2, self.longest)
        return pause

    def reset(self) -> None:
        """Something worked: the next pause is `first` again."""
        self._next = None
