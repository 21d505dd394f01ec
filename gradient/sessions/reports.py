"""Applying a worker's reports in the order they came. Layer: sessions.

Reports wait in a queue of 64, off the session's reader. Those waiting together are posted to the graph
writer together, so that they share its transaction; consecutive EvalResult batches of a job merge.
Source: seed "Jobs", Reports and Failures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import attrs
import structlog
import trio

from gradient.graph.build_failures import BuildFailed
from gradient.graph.evaluation_end import FailEvaluation
from gradient.graph.failure import RetryLimits
from gradient.graph.pg_errors import is_content_error
from gradient.graph.record import MAX_BATCH, Recorded
from gradient.graph.writer import GraphWriter, Reply
from gradient.model import FailureKind, JobKind
from gradient.passes.pool import ActiveJob, Worker
from gradient.sessions.live import LiveHub, Progress
from gradient.sessions.log_lane import LogLane
from gradient.sessions.report_messages import PHASES, writer_message
from gradient.wire import messages as wire

# Reports of a session that wait for the graph writer (seed "Jobs"). A full queue pauses the reader, and
# TCP holds the worker back.
REPORT_QUEUE: Final = 64
# Of what waits, the derivations that are applied at once while others want the graph writer too: they wait
# for all of it. Alone, larger portions are cheaper.
BESIDE_OTHERS: Final = 800

log = structlog.get_logger()
Abort = Callable[[str, str], None]
AskImport = Callable[[wire.ImportRequest], None]


@attrs.frozen
class Received:
    """A report, with the job of the session it belongs to."""

    job: ActiveJob
    report: wire.Report | wire.AssignJobResponse | wire.ImportRequest


# What is left to do once the writer has answered.
Then = Callable[[], Awaitable[None]]


@attrs.define(eq=False)
class ReportApplier:
    """Applies the reports of one session."""

    worker: Worker
    writer: GraphWriter
    hub: LiveHub
    logs: LogLane
    limits: RetryLimits

    async def run(self, queue: trio.MemoryReceiveChannel[Received], abort: Abort, ask: AskImport) -> None:
        """Apply everything until the queue is closed and empty.

        `abort` stops a job on the worker; `ask` starts answering an import request, once everything
        the worker published before it is recorded.
        """
        async for first in queue:
            room = BESIDE_OTHERS if self.writer.busy else MAX_BATCH
            waiting = [first, *_drain(queue, room - _derivations(first))]
            pending: list[Then] = []
            for received in merged(waiting):
                then = await self._post(received, abort, ask)
                if then is not None:
                    pending.append(then)
            for then in pending:
                await then()

    async def _post(self, received: Received, abort: Abort, ask: AskImport) -> Then | None:
        """Start applying one report; what remains once it is committed, or None."""
        job, report = received.job, received.report
        if isinstance(report, wire.ImportRequest):
            return partial(_ask, ask, report)
        if self.worker.jobs.get(job.job_id) is not job:
            log.debug("report after the end of its job dropped", job=job.job_id)
            return None
        match report:
            case wire.LogChunk(data=data):
                await self.logs.write(job.assignment, job.subject, data)
                return None
            case wire.EvalProgress():
                progress = Progress(report.attributes_done, report.attributes_total, report.derivations)
                self.hub.publish_progress(job.subject, progress)
                return None
            case wire.JobCompleted() | wire.JobFailed():
                await self.logs.finish(job.assignment)
                self._end(job)
            case wire.AssignJobResponse():
                self._end(job)
        reply = self.writer.post(writer_message(report, job, self.limits))
        return partial(self._settle, received, reply, abort)

    def _end(self, job: ActiveJob) -> None:
        """The job is off the session: a report that follows is stale, and its slot is free. The worker's
        request for the next one may have come before its report was applied."""
        self.worker.jobs.pop(job.job_id, None)
        self.worker.wake.set()

    async def _settle(self, received: Received, reply: Reply[Any], abort: Abort) -> None:
        """What follows from the writer's answer."""
        job, report = received.job, received.report
        try:
            answer = await reply.result()
        except Exception as error:
            if not (is_content_error(error) or isinstance(error, TimeoutError)):
                raise
            log.warning("report refused", job=job.job_id, report=type(report).__name__, error=str(error))
            await self._refuse(job, f"the server could not record a report of it: {error}", abort)
            return
        started = isinstance(report, wire.Building) or type(report) in PHASES
        if started and not answer:
            abort(job.job_id, "it was aborted before it started")
        elif isinstance(answer, Recorded) and answer.dropped:
            abort(job.job_id, "its evaluation has ended")

    async def _refuse(self, job: ActiveJob, why: str, abort: Abort) -> None:
        """A report that cannot be recorded ends its job: what the server knows of it is not all there is.

        A build is tried again, within its attempts; an evaluation without one of its batches is worth
        nothing.
        """
        self._end(job)
        abort(job.job_id, why)
        failure = (
            FailEvaluation(job.subject, "db-insert", why)
            if job.kind is JobKind.EVAL
            else BuildFailed(job.assignment, FailureKind.TRANSIENT, why, self.limits)
        )
        try:
            await self.writer.submit(failure)
        except TimeoutError as error:
            log.error("job stays open until its worker goes", job=job.job_id, error=str(error))


async def _ask(ask: AskImport, request: wire.ImportRequest) -> None:
    ask(request)


def _drain(queue: trio.MemoryReceiveChannel[Received], room: int) -> list[Received]:
    """What waits, until there are as many derivations as there is room for."""
    found: list[Received] = []
    while room > 0:
        try:
            found.append(queue.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            break
        room -= _derivations(found[-1])
    return found


def _derivations(received: Received) -> int:
    report = received.report
    return len(report.derivations) if isinstance(report, wire.EvalResult) else 0


def merged(waiting: list[Received]) -> list[Received]:
    """Consecutive EvalResult batches of one job as one, up to MAX_BATCH derivations; the rest as it is."""
    out: list[Received] = []
    for received in waiting:
        joint = _joint(out[-1], received) if out else None
        if joint is None:
            out.append(received)
        else:
            out[-1] = joint
    return out


def _joint(first: Received, second: Received) -> Received | None:
    """Two batches as one, None when they must stay apart."""
    batch, next_batch = first.report, second.report
    if not (isinstance(batch, wire.EvalResult) and isinstance(next_batch, wire.EvalResult)):
        return None
    if first.job is not second.job or _size(batch) + _size(next_batch) > MAX_BATCH:
        return None
    return Received(first.job, _joined(batch, next_batch))


def _size(report: wire.EvalResult) -> int:
    """What a batch holds: mostly derivations, and whatever else a worker may fill it with."""
    return sum(map(len, (report.derivations, report.entry_points, report.warnings, report.errors)))


def _joined(first: wire.EvalResult, second: wire.EvalResult) -> wire.EvalResult:
    return attrs.evolve(
        first,
        derivations=first.derivations + second.derivations,
        entry_points=first.entry_points + second.entry_points,
        warnings=first.warnings + second.warnings,
        errors=first.errors + second.errors,
    )
