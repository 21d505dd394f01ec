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

from gradient.graph.requeue import LoseWorker
from gradient.graph.writer import UNRECORDED, GraphWriter, WriterStopped
from gradient.model import JobKind
from gradient.passes.pool import Worker, fault_of
from gradient.passes.scheduler import Scheduler
from gradient.sessions.imports import ImportWaits
from gradient.sessions.log_lane import FLUSH_SECS, LogLane
from gradient.sessions.offers import OFFER_WINDOW, as_offer, pages
from gradient.sessions.queries import Queries
from gradient.sessions.report_messages import fits
from gradient.sessions.reports import REPORT_QUEUE, Received, ReportApplier
from gradient.wire import messages as wire
from gradient.wire.codec import Message
from gradient.wire.errors import LinkClosed, LocalProtocolError
from gradient.wire.transport import FLOODING, PROTOCOL_VIOLATION, Link

# Questions of one worker in flight; a well-behaved one has four.
MAX_QUESTIONS: Final = 16
# Imports of one worker that wait for builds: one for each of its evaluators at most.
MAX_IMPORTS: Final = 64
# Seconds to write the rest of its logs, also when the server itself is being cancelled.
FLUSH_LIMIT: Final = 5.0

log = structlog.get_logger()


@attrs.define
class _Asked:
    """Questions of one kind that wait for their answer, and how many may."""

    what: str
    limit: int
    now: int = 0


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
    _questions: _Asked = attrs.field(factory=lambda: _Asked("questions", MAX_QUESTIONS), init=False)
    _imports: _Asked = attrs.field(factory=lambda: _Asked("imports", MAX_IMPORTS), init=False)

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
            self._reports.close()
            self._lose_the_rest()
            with trio.move_on_after(FLUSH_LIMIT, shield=True):
                await self.logs.flush()

    def _lose_the_rest(self) -> None:
        """What the worker still holds goes back, a claim on its way included. Nobody waits for that: the
        writer applies it before whatever the worker does when it comes again."""
        self.worker.jobs.clear()
        try:
            self.writer.post(LoseWorker(self.worker.id))
        except WriterStopped:
            log.warning("a lost worker's jobs stay open until the next start", worker=self.worker.name)

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
                if await self._may_ask(self._questions):
                    answers.start_soon(self._answer, message)
            case wire.ImportRequest():
                # Through the report queue: what it names was published just before it.
                if await self._may_ask(self._imports) and not await self._report(message):
                    self._imports.now -= 1
            case wire.WorkerCapabilities() if fault := fault_of(message):
                await self.link.close(PROTOCOL_VIOLATION, fault)
            case _:
                if not self._learn(message):
                    await self._unexpected(message)

    async def _unexpected(self, message: Message) -> None:
        await self.link.close(PROTOCOL_VIOLATION, f"{type(message).__name__} is not expected here")

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
        """Take a report of a job this session runs under this very assignment; drop any other."""
        job = self.worker.jobs.get(report.job_id)
        if job is None or job.assignment != report.assignment_id:
            log.debug("stale report dropped", worker=self.worker.name, report=type(report).__name__)
            return False
        if not fits(report, job.kind):
            await self._unexpected(report)
            return False
        if isinstance(report, wire.Stage):
            # In memory alone: a slot that is free need not wait for what the database still takes in.
            self.worker.entered(job, report.stage)
        else:
            await self._reports.send(Received(job, report))
        return True

    async def _answered(self, response: wire.AssignJobResponse) -> None:
        job = self.worker.jobs.get(response.job_id)
        if not response.accepted and job is not None and job.assignment == response.assignment_id:
            log.info("job declined", worker=self.worker.name, job=job.job_id, why=response.reason)
            self.worker.scores.pop(job.job_id, None)
            # It asks again when it means it; else the same job would go back and forth.
            self.worker.hungry.discard(job.kind)
            await self._reports.send(Received(job, response))

    # --- questions ---------------------------------------------------------------------------------

    async def _may_ask(self, asked: _Asked) -> bool:
        """Count a question; a peer with too many of them is flooding."""
        if asked.now >= asked.limit:
            await self.link.close(FLOODING, f"more than {asked.limit} {asked.what} at once")
            return False
        asked.now += 1
        return True

    async def _answer(self, question: wire.CacheQuery | wire.QueryKnownDerivations) -> None:
        try:
            if isinstance(question, wire.CacheQuery):
                await self._send_answer(await self.queries.cache(question), question.query_id)
            else:
                await self._send_answer(await self.queries.known(question), question.query_id)
        finally:
            self._questions.now -= 1

    def _ask_import(self, answers: trio.Nursery, request: wire.ImportRequest) -> None:
        answers.start_soon(self._answer_import, request)

    async def _answer_import(self, request: wire.ImportRequest) -> None:
        try:
            await self._send_answer(await self.imports.wait(request), request.request_id)
        finally:
            self._imports.now -= 1

    async def _send_answer(self, answer: Message, number: int) -> None:
        try:
            await self.link.send(answer)
        except LocalProtocolError as error:
            # A page of paths that refer to very many others.
            log.warning("answer too large", worker=self.worker.name, error=str(error))
            await self.link.send(wire.CacheError(number, "the answer is too large: ask for fewer paths"))
        except LinkClosed:
            log.debug("answer not sent: the worker is gone", worker=self.worker.name)

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
