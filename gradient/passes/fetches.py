"""Fetches of NARs, noted as they are answered and recorded once a minute. Layer: passes.

An answer never waits for the database to be told. A minute's notes are lost when the server stops: a path
looks then as if it had been fetched a little longer ago.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import attrs

from gradient.graph.fetches import RecordFetches
from gradient.graph.transaction import Submit

# NARs one message stamps.
RECORDED_AT_ONCE: Final = 1000
# NARs that wait to be recorded: who reads a whole cache in a minute is noted for these.
MOST_NOTED: Final = 100_000


@attrs.define(eq=False)
class Fetches:
    """What was fetched from one cache since it was last recorded."""

    submit: Submit
    cache: int
    _noted: Counter[str] = attrs.field(factory=Counter, init=False)

    def note(self, file_hash: str) -> None:
        """Somebody fetches the NAR with this file hash. Never blocks."""
        if file_hash in self._noted or len(self._noted) < MOST_NOTED:
            self._noted[file_hash] += 1

    async def record(self) -> None:
        """Have what was noted until now recorded. Raises as `submit` does: a later run records the rest."""
        noted = list(self._noted)
        for start in range(0, len(noted), RECORDED_AT_ONCE):
            chunk = noted[start : start + RECORDED_AT_ONCE]
            times = tuple((file_hash, self._noted.pop(file_hash)) for file_hash in chunk)
            try:
                await self.submit(RecordFetches(self.cache, times))
            except BaseException:
                self._noted.update(dict(times))
                raise
