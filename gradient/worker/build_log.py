"""The live log of a build: joined into chunks, limited, and sent while it grows. Layer: worker.

A builder may print gigabytes. Two budgets, one for a minute and one for an hour, bound what one build
sends; once one is used up the log ends with a notice, and the build goes on without one.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio

from gradient.settings.tables import WorkerLog
from gradient.wire.messages import LogChunk
from gradient.worker.job import Job

# A chunk is sent at this size, or so long after its first line: what a person cannot tell from at once.
CHUNK_SIZE: Final = 64 * 2**10  # bytes
CHUNK_AGE: Final = 0.1  # seconds
MINUTE: Final = 60.0
HOUR: Final = 3600.0


@attrs.define
class TokenBucket:
    """A budget of `size` bytes that fills up again in `period` seconds. Pure: the time is an argument."""

    size: int
    period: float
    _level: float = attrs.field(init=False)
    _at: float | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._level = self.size

    def take(self, amount: int, now: float) -> bool:
        """Whether there is enough for `amount` bytes; they are taken then."""
        if self._at is not None:
            self._level = min(self.size, self._level + (now - self._at) * self.size / self.period)
        self._at = now
        if amount > self._level:
            return False
        self._level -= amount
        return True


class BuildLog:
    """The log of one build. One task adds lines, `run` sends what is due."""

    def __init__(self, job: Job, settings: WorkerLog) -> None:
        self._job = job
        self._buckets = (
            (TokenBucket(settings.burst_bytes_per_min, MINUTE), "more than {} bytes in a minute"),
            (TokenBucket(settings.sustained_bytes_per_hour, HOUR), "more than {} bytes in an hour"),
        )
        self._pending = bytearray()
        self._begun = trio.Event()
        # Held while a chunk is sent, so that chunks keep their order.
        self._sending = trio.Lock()
        self._cut = False

    async def add(self, line: str) -> None:
        """Add a line without its newline; waits when more is pending than the server takes."""
        if self._cut:
            return
        data = line.encode("utf-8", "surrogateescape") + b"\n"
        for bucket, excess in self._buckets:
            if not bucket.take(len(data), trio.current_time()):
                self._cut = True
                data = f"(log cut off: {excess.format(bucket.size)})\n".encode()
                break
        self._pending += data
        self._begun.set()
        if len(self._pending) >= CHUNK_SIZE:
            await self.flush()

    async def run(self) -> None:
        """Send lines a moment after they came, until cancelled."""
        while True:
            await self._begun.wait()
            await trio.sleep(CHUNK_AGE)
            await self.flush()

    async def flush(self) -> None:
        """Send everything that is pending, in chunks. Cancelled, what was not sent stays pending."""
        async with self._sending:
            self._begun = trio.Event()
            while self._pending:
                chunk = bytes(self._pending[:CHUNK_SIZE])
                await self._job.send(LogChunk(*self._job.key, chunk))
                del self._pending[: len(chunk)]
