"""The job slots: who gets one, how a job ends, and what is reported then. Layer: worker.

`place` decides without waiting, so that the reader can call it; `run` is the life of one job, in a cancel
scope of its own. Whatever ends the work, exactly one outcome is reported, and a stop or an abort has
the last word over errors that it caused itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeAlias

import attrs
import structlog
import trio

from gradient.model import BuildStage, FailureKind, JobKind, free_build_slots
from gradient.nix.build_failure import failure_reason
from gradient.nix.evaluator.messages import headline
from gradient.nursery.stop_window import StopWindow
from gradient.wire.codec import Message
from gradient.wire.errors import LinkClosed
from gradient.wire.messages import AssignJob, AssignJobResponse, JobCompleted, JobFailed
from gradient.worker.errors import Failure, failure_of
from gradient.worker.job import Job
from gradient.worker.queries import Queries, Send

log = structlog.get_logger(__name__)

# The work of a job; returns when all of it is done and committed, raises otherwise.
Work: TypeAlias = Callable[[Job, AssignJob], Awaitable[None]]


@attrs.frozen
class Renewed:
    """The job runs already; it goes on under the new assignment."""


@attrs.frozen
class Declined:
    """The job is handed back."""

    reason: str


class Slots:
    """The jobs of one session. `limits` is how many of each kind may run at once; `freed` is called when one
    has left its slot, ended or not."""

    def __init__(
        self,
        limits: Mapping[JobKind, int],
        window: StopWindow,
        send: Send,
        queries: Queries,
        freed: Callable[[JobKind], Awaitable[None]],
    ) -> None:
        self._limits = limits
        self._freed = freed
        self._window = window
        self._send = send
        self._queries = queries
        # Until their outcome is handed to the link.
        self._jobs: dict[str, Job] = {}

    def running(self, kind: JobKind) -> int:
        """How many jobs of a kind hold a slot."""
        return self._count(kind, uploading=False)

    def has_room(self, kind: JobKind) -> bool:
        """Whether another job of this kind would be taken."""
        if self._window.closing:
            return False
        uploading = self._count(kind, uploading=True)
        return free_build_slots(self._limits[kind], self.running(kind), uploading) > 0

    def _count(self, kind: JobKind, *, uploading: bool) -> int:
        return sum(
            job.kind is kind and (job.stage is BuildStage.UPLOAD) == uploading for job in self._jobs.values()
        )

    def place(self, assign: AssignJob) -> Job | Renewed | Declined:
        """Decide about an assignment; a `Job` has its slot and must be `run`."""
        if (job := self._jobs.get(assign.job_id)) is not None:
            job.assignment_id = assign.assignment_id
            return Renewed()
        if self._window.closing:
            return Declined("worker draining")
        if (assign.flake is None) == (assign.build is None):
            return Declined("neither a flake job nor a build job")
        kind = JobKind.BUILD if assign.flake is None else JobKind.EVAL
        if not self.has_room(kind):
            return Declined("at capacity")
        left = partial(self._freed, kind)
        job = Job(assign.job_id, assign.assignment_id, kind, self._send, self._queries, left=left)
        self._jobs[job.job_id] = job
        return job

    def abort(self, job_id: str, reason: str) -> None:
        """Stop a job; it answers with JobFailed. One that does not run has reported already."""
        if (job := self._jobs.get(job_id)) is not None:
            job.abort_reason = reason
            self._window.abort(job_id)

    async def run(self, job: Job, assign: AssignJob, work: Work) -> None:
        """Accept the job, work, report. Raises LinkClosed, alone or in a group."""
        try:
            with self._window.job(job.job_id) as scope:
                if job.abort_reason is not None:
                    scope.cancel()
                await job.send(AssignJobResponse(*job.key, accepted=True))
                await job.send(await self._outcome(job, assign, work, scope))
        finally:
            del self._jobs[job.job_id]
        await job.left()

    async def _outcome(self, job: Job, assign: AssignJob, work: Work, scope: trio.CancelScope) -> Message:
        failure: Failure | None = None
        try:
            with scope:
                await work(job, assign)
        except* LinkClosed:
            raise
        except* Exception as group:
            failure = failure_of(group)
            log_failure(job, failure, group)
        if scope.cancelled_caught or (failure is not None and scope.cancel_called):
            failure = self._stopped(job)
        if failure is None:
            return JobCompleted(*job.key, spans=job.timeline.spans, elapsed_ms=job.timeline.elapsed_ms)
        if self._window.closing:
            failure = attrs.evolve(failure, kind=FailureKind.CANCELED)
        return JobFailed(
            *job.key,
            error=failure.text,
            kind=failure.kind,
            missing_paths=failure.missing_paths,
            spans=job.timeline.spans,
            elapsed_ms=job.timeline.elapsed_ms,
        )

    def _stopped(self, job: Job) -> Failure:
        if self._window.closing:
            return Failure(FailureKind.CANCELED, "the worker stops")
        return Failure(FailureKind.ABORTED, f"aborted by server: {job.abort_reason}")


def log_failure(job: Job, failure: Failure, error: BaseException) -> None:
    """One line for what can happen, everything for what should not."""
    if failure.is_bug:
        log.error("job failed by a bug", job=job.job_id, error=failure.text, exc_info=error)
    else:
        text = failure_reason(failure.text) if job.kind is JobKind.BUILD else failure.text
        reason = headline(text)
        log.info("job failed", job=job.job_id, kind=failure.kind.name, error=reason)
