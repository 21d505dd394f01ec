"""The log lane of a session: chunks come in order, go to the live pages at once and to the database in
larger pieces. Layer: sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import structlog
import trio

from gradient.graph.logs import append_log
from gradient.graph.pg_errors import DATABASE_ERRORS
from gradient.graph.pg_pool import Pool

# Bytes buffered for an assignment before they are written: one row of a size PostgreSQL compresses well.
FLUSH_BYTES: Final = 64 * 1024
# Seconds a line may wait in memory; a killed server loses at most this much of a log.
FLUSH_SECS: Final = 1.0
# Bytes of one log kept while the database does not answer.
KEEP_BYTES: Final = 2**20

log = structlog.get_logger()


@attrs.define(eq=False)
class _Pending:
    """An assignment's unwritten bytes, and the number of its next chunk. Both change under `writing`: the
    flush of every second and a full buffer may meet."""

    data: bytearray = attrs.field(factory=bytearray)
    index: int = 0
    writing: trio.Lock = attrs.field(factory=trio.Lock)


@attrs.define(eq=False)
class LogLane:
    """Logs of one session's builds. `show` gets each piece as it comes: (derivation, bytes)."""

    readers: Pool
    show: Callable[[int, bytes], None]
    _pending: dict[int, _Pending] = attrs.field(factory=dict, init=False)

    async def write(self, assignment: int, derivation: int, data: bytes) -> None:
        """Take a chunk; writes to the database when enough is pending."""
        self.show(derivation, data)
        pending = self._pending.setdefault(assignment, _Pending())
        pending.data += data
        if len(pending.data) >= FLUSH_BYTES:
            await self._flush(assignment, pending)

    async def flush(self) -> None:
        """Write everything pending."""
        for assignment, pending in list(self._pending.items()):
            await self._flush(assignment, pending)

    async def finish(self, assignment: int) -> None:
        """Write what is left of a job's log, before its end is applied."""
        pending = self._pending.pop(assignment, None)
        if pending is not None:
            await self._flush(assignment, pending)

    async def _flush(self, assignment: int, pending: _Pending) -> None:
        """Write what is pending; while the database is away it stays, up to KEEP_BYTES."""
        async with pending.writing:
            data = bytes(pending.data)
            if not data:
                return
            try:
                async with self.readers.connection() as connection:
                    await append_log(connection, assignment, pending.index, data)
            except DATABASE_ERRORS as error:
                log.warning("log not written yet", assignment=assignment, error=str(error))
                del pending.data[KEEP_BYTES:]
                return
            del pending.data[: len(data)]
            pending.index += 1
