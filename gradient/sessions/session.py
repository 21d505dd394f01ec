"""One worker's session: reader, report applier, offers and assignments, answers. Layer: sessions.

    reader ── reports ──> queue (64) ──> applier ──> graph writer
       ├──── questions ──> one task each
       └──── offers' scores, requests ──> Worker ── wake ──> dispatcher ──> offers, AssignJob, AbortJob

The reader waits for nothing but room in the report queue. When the link ends, what was received is still
applied; the jobs that are left then are those of a lost worker.
Source: seeds "Jobs" and "Waiting and Recovery" (Re-Offering Returned Jobs).
"""

from __future__ import annotations

from functools import partial
from typing import Final

import attrs
import structlog
import trio

from gradient.graph.builds import LoseAssignments
from gradient.graph.writer import UNRECORDED, GraphWriter
from gradient.model import JobKind
from gradient.passes.pool import Worker
from gradient.passes.scheduler import Scheduler
from gradient.sessions.imports import ImportWaits
from gradient.sessions.log_lane import FLUSH_SECS, LogLane
from gradient.sessions.offers import OFFER_WINDOW, as_offer, pages
from gradient.sessions.queries import Queries
from gradient.sessions.reports import REPORT_QUEUE, Received, ReportApplier
from gradient.wire import messages as wire
from gradient.wire.codec import Message
from gradient.wire.errors import LinkClosed
from gradient.wire.transport import FLOODING, Link

# Questions of one worker in flight; a well-behaved one has four.
MAX_QUESTIONS: Final = 16
# Seconds to record a lost worker when the server itself is being cancelled; the next start does it else.
LOSE_LIMIT: Final = 5.0

log = structlog.get_logger()


@attrs.define(eq=False)
class Session:
    """A session that stands: the handshake is done and the worker is in the pool."""

    link: Link
    worker: Worker
    scheduler: Scheduler
    writer: GraphWriter
    queries: Queries
    imports: ImportWaits
    applier: ReportApplier
    logs: LogLane
    _reports: trio.MemorySendChannel[Received] = attrs.field(init=False)
    _queue: trio.MemoryReceiveChannel[Received] = attrs.field(init=False)
    _outbox: list[Message] = attrs.field(factory=list, init=False)
    _questions: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._reports, self._queue = trio.open_memory_channel[Received](REPORT_QUEUE)

    # --- from outside, synchronous -----------------------------------------------------------------

    def abort(self, job_id: str, reason: str) -> None:
        """Stop a job on this worker. Never blocks."""
        self.tell(wire.AbortJob(job_id, reason))

    def tell(self, message: Message) -> None:
        """Send a control message soon. Never blocks."""
        self._outbox.append(message)
        self.worker.wake.set()

    # --- the session -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the link until it ends; then apply what was received, and give back what is left."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._dispatch)
                nursery.start_soon(self._flush_logs)
                async with trio.open_nursery() as applying:
                    applying.start_soon(
                        self.applier.run, self._queue, self.abort, partial(self._ask_import, nursery)
                    )
                    await self._read(nursery)
                nursery.cancel_scope.cancel()
        finally:
            with trio.move_on_after(LOSE_LIMIT, shield=True):
                await self._lose_the_rest()

    async def _lose_the_rest(self) -> None:
        self._reports.close()
        left = tuple(job.assignment for job in self.worker.jobs.values())
        self.worker.jobs.clear()
        try:
            await self.logs.flush()
            if left:
                await self.writer.submit(LoseAssignments(left))
        except UNRECORDED as error:
            log.warning("a lost worker's jobs stay open until the next start", error=str(error))

    async def _read(self, answers: trio.Nursery) -> None:
        with self._reports:
            try:
                async for message in self.link:
                    await self._receive(message, answers)
            except LinkClosed as end:
                log.info("worker gone", worker=self.worker.name, why=str(end))

    async def _receive(self, message: Message, answers: trio.Nursery) -> None:
        match message:
            case wire.Report():
                await self._report(message)
            case wire.AssignJobResponse():
                await self._answered(message)
            case wire.CacheQuery() | wire.QueryKnownDerivations():
                if await self._may_ask():
                    answers.start_soon(self._answer, message)
            case wire.ImportRequest():
                # Through the report queue: what it names was published just before it.
                if await self._may_ask() and not await self._report(message):
                    self._questions -= 1
            case _:
                if not self._learn(message):
                    await self.link.close(1002, f"{type(message).__name__} is not expected here")

    def _learn(self, message: Message) -> bool:
        """What a worker says of itself; False when this is nothing of the kind."""
        worker = self.worker
        match message:
            case wire.WorkerMetrics():
                worker.metrics = message
            case wire.RequestJob(kind=kind):
                worker.hungry.add(kind)
            case wire.RequestJobChunk(scores=scores):
                worker.scores |= {s.job_id: s for s in scores if s.job_id in self.scheduler.candidates}
            case wire.RequestJobList():
                worker.offered = 0
            case wire.WorkerCapabilities():
                worker.info = message
                self.scheduler.pool_changed()
            case wire.Draining():
                worker.draining = True
                self.scheduler.pool_changed()
            case _:
                return False
        worker.wake.set()
        return True

    async def _report(self, report: wire.Report | wire.ImportRequest) -> bool:
        """Queue a report of a job this session runs under this very assignment; drop any other."""
        job = self.worker.jobs.get(report.job_id)
        if job is None or job.assignment != report.assignment_id:
            log.debug("stale report dropped", worker=self.worker.name, report=type(report).__name__)
            return False
        await self._reports.send(Received(job, report))
        return True

    async def _answered(self, response: wire.AssignJobResponse) -> None:
        job = self.worker.jobs.get(response.job_id)
        if not response.accepted and job is not None and job.assignment == response.assignment_id:
            log.info("job declined", worker=self.worker.name, job=job.job_id, why=response.reason)
            self.worker.scores.pop(job.job_id, None)
            await self._reports.send(Received(job, response))

    # --- questions ---------------------------------------------------------------------------------

    async def _may_ask(self) -> bool:
        """Count a question; a peer with too many of them is flooding."""
        if self._questions >= MAX_QUESTIONS:
            await self.link.close(FLOODING, f"more than {MAX_QUESTIONS} questions at once")
            return False
        self._questions += 1
        return True

    def _ask_import(self, answers: trio.Nursery, request: wire.ImportRequest) -> None:
        answers.start_soon(self._answer, request)

    async def _answer(
        self, question: wire.CacheQuery | wire.QueryKnownDerivations | wire.ImportRequest
    ) -> None:
        answer: Message
        try:
            match question:
                case wire.CacheQuery():
                    answer = await self.queries.cache(question)
                case wire.QueryKnownDerivations():
                    answer = await self.queries.known(question)
                case wire.ImportRequest():
                    answer = await self.imports.wait(question)
            await self.link.send(answer)
        except LinkClosed:
            log.debug("answer not sent: the worker is gone", worker=self.worker.name)
        finally:
            self._questions -= 1

    # --- offers and assignments --------------------------------------------------------------------

    async def _dispatch(self) -> None:
        """Whenever something may have changed: send what is due, offer what is new, hand out jobs."""
        try:
            while True:
                await self.worker.wake.wait()
                while self._outbox:
                    await self.link.send(self._outbox.pop(0))
                await self._offer()
                for kind in JobKind:
                    await self._assign(kind)
        except LinkClosed:
            log.debug("dispatcher ends: the worker is gone", worker=self.worker.name)

    async def _offer(self) -> None:
        room = OFFER_WINDOW - len(self.worker.scores)
        if self.worker.draining or self.scheduler.draining or room <= 0:
            return
        offer, reached = self.scheduler.candidates.since(self.worker, room)
        self.worker.offered = reached
        for page in pages(offer):
            await self.link.send(wire.JobOffer(tuple(as_offer(candidate) for candidate in page)))

    async def _assign(self, kind: JobKind) -> None:
        while self.worker.assignable(kind):
            job = await self._claim(kind)
            if job is None:
                return
            await self.link.send(job)

    async def _claim(self, kind: JobKind) -> wire.AssignJob | None:
        try:
            return await self.scheduler.next_job(self.worker, kind)
        except UNRECORDED as error:
            log.warning("claim failed", worker=self.worker.name, error=str(error))
            return None

    async def _flush_logs(self) -> None:
        while True:
            await trio.sleep(FLUSH_SECS)
            await self.logs.flush()
