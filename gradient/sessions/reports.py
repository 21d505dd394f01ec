"""Applying a worker's reports in the order they came. Layer: sessions.

Reports wait in a queue of 64, off the session's reader. Those waiting together are posted to the graph
writer together, so that they share its transaction; consecutive EvalResult batches of a job merge.
Source: seed "Jobs", Reports and Failures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs
import structlog
import trio

from gradient.graph.builds import BuildCompleted, BuildFailed, BuildStarted, ReturnAssignment, StoreBuildOutput
from gradient.graph.evaluations import (
    EvalFailed,
    EvalStreamCompleted,
    EvaluationPhase,
    FailEvaluation,
    StoreEvalStats,
    StoreFetchResult,
)
from gradient.graph.failure import RetryLimits
from gradient.graph.messages import AddMessage
from gradient.graph.pg import is_content_error
from gradient.graph.record import MAX_BATCH, Record
from gradient.graph.writer import GraphWriter, Reply
from gradient.model import EvaluationStatus, JobKind
from gradient.passes.pool import ActiveJob, Worker
from gradient.sessions.live import LiveHub
from gradient.sessions.log_lane import LogLane
from gradient.wire import messages as wire

# Reports of a session that wait for the graph writer (seed "Jobs"). A full queue pauses the reader, and
# TCP holds the worker back.
REPORT_QUEUE: Final = 64

log = structlog.get_logger()
Abort = Callable[[str, str], None]

_PHASES: Final = {
    wire.Fetching: EvaluationStatus.FETCHING,
    wire.EvaluatingFlake: EvaluationStatus.EVALUATING_FLAKE,
    wire.EvaluatingDerivations: EvaluationStatus.EVALUATING_DERIVATION,
}


@attrs.frozen
class Received:
    """A report, with the job of the session it belongs to."""

    job: ActiveJob
    report: wire.Report | wire.AssignJobResponse


# What is left to do once the writer has answered.
Then = Callable[[], Awaitable[None]]


@attrs.define(eq=False)
class ReportApplier:
    """Applies the reports of one session. `abort` asks the session to stop a job on its worker."""

    worker: Worker
    writer: GraphWriter
    hub: LiveHub
    logs: LogLane
    limits: RetryLimits
    abort: Abort

    async def run(self, queue: trio.MemoryReceiveChannel[Received]) -> None:
        """Apply everything until the queue is closed and empty."""
        async for first in queue:
            waiting = [first, *_drain(queue)]
            pending: list[Then] = []
            for received in merged(waiting):
                then = await self._post(received)
                if then is not None:
                    pending.append(then)
            for then in pending:
                await then()

    async def _post(self, received: Received) -> Then | None:
        """Start applying one report; what remains once it is committed, or None."""
        job, report = received.job, received.report
        match report:
            case wire.LogChunk(data=data):
                await self.logs.write(job.assignment, job.subject, data)
                return None
            case wire.EvalProgress():
                self.hub.progress(
                    job.subject, report.attributes_done, report.attributes_total, report.derivations
                )
                return None
            case wire.Stage():
                return None
            case wire.JobCompleted() | wire.JobFailed():
                await self.logs.finish(job.assignment)
                # Off the session from here on: a report that follows is stale.
                self.worker.jobs.pop(job.job_id, None)
            case wire.AssignJobResponse():
                self.worker.jobs.pop(job.job_id, None)
        reply = self.writer.post(self._message(job, report))
        return lambda: self._settle(received, reply)

    def _message(self, job: ActiveJob, report: wire.Report | wire.AssignJobResponse) -> Any:
        """The writer message of a report."""
        match report:
            case wire.Fetching() | wire.EvaluatingFlake() | wire.EvaluatingDerivations():
                return EvaluationPhase(job.assignment, _PHASES[type(report)])
            case wire.FetchResult(flake_source=source) if source is not None:
                return StoreFetchResult(job.subject, source)
            case wire.FetchResult():
                return FailEvaluation(job.subject, "fetch", "the worker fetched no source")
            case wire.EvalResult():
                return Record(
                    job.subject, report.derivations, report.entry_points, report.warnings, report.errors
                )
            case wire.EvalMessage():
                return AddMessage(job.subject, report.level, report.source, report.message)
            case wire.EvalStats():
                stats = attrs.asdict(report, filter=lambda a, _: a.name not in ("job_id", "assignment_id"))
                return StoreEvalStats(job.subject, **stats)
            case wire.Building():
                return BuildStarted(job.assignment)
            case wire.BuildOutput():
                return StoreBuildOutput(job.assignment, report.outputs, report.substituted, report.metrics)
            case wire.AssignJobResponse():
                return ReturnAssignment(job.assignment)
            case wire.JobCompleted() if job.kind is JobKind.EVAL:
                return EvalStreamCompleted(job.assignment, report.spans)
            case wire.JobCompleted():
                return BuildCompleted(job.assignment, self.limits, report.spans)
            case wire.JobFailed() if job.kind is JobKind.EVAL:
                attempts = self.limits.max_attempts
                return EvalFailed(job.assignment, report.kind, report.error, attempts, report.spans)
            case wire.JobFailed(metrics=metrics):
                killed = metrics is not None and metrics.oom_killed
                return BuildFailed(
                    job.assignment, report.kind, report.error, self.limits, killed, metrics, report.spans
                )
        raise TypeError(f"no report: {type(report).__name__}")

    async def _settle(self, received: Received, reply: Reply[Any]) -> None:
        """What follows from the writer's answer."""
        job, report = received.job, received.report
        try:
            answer = await reply.result()
        except Exception as error:
            if not (is_content_error(error) or isinstance(error, TimeoutError)):
                raise
            log.warning("report refused", job=job.job_id, report=type(report).__name__, error=str(error))
            if job.kind is JobKind.EVAL:
                await self.writer.submit(FailEvaluation(job.subject, "db-insert", str(error)))
            self.abort(job.job_id, str(error))
            return
        started = isinstance(report, wire.Building) or type(report) in _PHASES
        if started and not answer:
            self.abort(job.job_id, "it was aborted before it started")


def _drain(queue: trio.MemoryReceiveChannel[Received]) -> list[Received]:
    found = []
    while True:
        try:
            found.append(queue.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return found


def merged(waiting: list[Received]) -> list[Received]:
    """Consecutive EvalResult batches of one job as one, up to MAX_BATCH derivations; the rest as it is."""
    out: list[Received] = []
    for received in waiting:
        last = out[-1].report if out else None
        report = received.report
        if (
            isinstance(last, wire.EvalResult)
            and isinstance(report, wire.EvalResult)
            and last.assignment_id == report.assignment_id
            and len(last.derivations) + len(report.derivations) <= MAX_BATCH
        ):
            out[-1] = Received(out[-1].job, _joined(last, report))
        else:
            out.append(received)
    return out


def _joined(first: wire.EvalResult, second: wire.EvalResult) -> wire.EvalResult:
    return attrs.evolve(
        first,
        derivations=first.derivations + second.derivations,
        entry_points=first.entry_points + second.entry_points,
        warnings=first.warnings + second.warnings,
        errors=first.errors + second.errors,
    )
