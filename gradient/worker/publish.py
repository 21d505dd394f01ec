"""Batches of an evaluation to the server: their files first, then their EvalResult. Layer: worker.

    walk ── batch ──> upload of its files ── its turn ──> EvalResult
                      (several at once)     (in the order of the walk)

A build may start as soon as its batch is recorded, so everything it reads is in the cache by then.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final

import attrs
import trio

from gradient.wire.messages import EvalResult
from gradient.worker.drv_files import drv_item
from gradient.worker.job import Job
from gradient.worker.uploads import Uploader
from gradient.worker.walk import Batch

# Batches whose files are on their way at once. The fourth hides the third's commit; more only hold files.
MAX_AT_ONCE: Final = 4


@attrs.frozen(eq=False)
class _Publication:
    batch: Batch
    before: trio.Event
    sent: trio.Event = attrs.field(factory=trio.Event)


class Publisher:
    """Publishes batches in order. `run` does it; leaving the `with` block says that no more will come."""

    def __init__(self, job: Job, uploader: Uploader) -> None:
        self._job = job
        self._uploader = uploader
        # No room: whoever has a batch waits with it, and it goes on growing elsewhere meanwhile.
        self._batches, self._taken = trio.open_memory_channel[_Publication](0)
        self._permits = trio.Semaphore(MAX_AT_ONCE)
        # Set when the last batch given to `publish` was sent.
        self._last = trio.Event()
        self._last.set()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._batches.close()

    async def run(self) -> None:
        """Publish until the `with` block is left. Raises, in a group, JobFault and LinkClosed."""
        async with trio.open_nursery() as nursery:
            async for publication in self._taken:
                await self._permits.acquire()
                nursery.start_soon(self._publish, publication)

    async def publish(self, batch: Batch) -> None:
        """Hand over a batch; waits while enough others are on their way."""
        publication = _Publication(batch, before=self._last)
        self._last = publication.sent
        await self._batches.send(publication)

    async def settled(self) -> None:
        """Wait until every batch handed over was sent."""
        await self._last.wait()

    async def _publish(self, publication: _Publication) -> None:
        batch = publication.batch
        files = {read.record.drv_path: drv_item(read) for read in batch.derivations}
        sources = (path for read in batch.derivations for path in read.record.input_sources)
        await self._uploader.upload((*files, *sources), files)
        await publication.before.wait()
        records = tuple(read.record for read in batch.derivations)
        await self._job.send(EvalResult(*self._job.key, derivations=records, entry_points=batch.entry_points))
        publication.sent.set()
        self._permits.release()
