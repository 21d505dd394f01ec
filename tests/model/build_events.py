"""Builds are handed out, reported, lost and tried again.

Source: seed "Jobs" (Build Jobs, Reports, Failures, Lost Workers).
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Final
from uuid import UUID

from gradient.model import (
    AttemptOutcome,
    AttemptReason,
    BuildStatus,
    DispatchOutcome,
    EvaluationStatus,
    FailureKind,
    JobKind,
)
from tests.model import rules
from tests.model.collection_events import CollectionEvents
from tests.model.facts import Assignment, Attempt, Build
from tests.model.settling import RUNNING

S = BuildStatus
V = EvaluationStatus
MAX_ATTEMPTS: Final = 3
MISS_THRESHOLD: Final = 2
MAX_LOOPS: Final = 3
BACKOFF: Final = timedelta(seconds=30)
MAX_LOST: Final = 10


class BuildEvents(CollectionEvents):
    """What happens to builds, and what a lost worker does to everything it had."""

    def may_claim(self, name: str, cache_available: bool) -> bool:
        """Only while it is still Queued with the expected cache_available, and nobody has it."""
        build = self.facts.builds[name]
        expected = build.cache_available is cache_available
        return build.status is S.QUEUED and expected and not rules.is_assigned(self.facts, name)

    def claim_build(self, name: str, assignment: int, worker: UUID) -> None:
        """An open assignment for the oldest live evaluation that names it, and a running attempt."""
        live = [e for e, named in self.facts.names if named == name and rules.is_live(self.facts, e)]
        evaluation = min(live, default=None)
        self.facts.assignments[assignment] = Assignment(JobKind.BUILD, worker, evaluation, name, self.now)
        self.facts.attempts.append(Attempt(name, assignment, evaluation))

    def start_build(self, assignment: int) -> bool:
        """A worker's Building; False tells it to stop."""
        job = self.facts.assignments[assignment]
        if job.outcome is not None or job.derivation is None:
            return False
        if self.facts.builds[job.derivation].status is S.QUEUED:
            self.status(job.derivation, S.BUILDING)
        return self.facts.builds[job.derivation].status is S.BUILDING

    def build_output(self, assignment: int, *, substituted: bool) -> None:
        """BuildOutput: of what it says only the flag concerns the graph."""
        job = self.facts.assignments[assignment]
        if job.outcome is None and job.derivation is not None:
            self.facts.builds[job.derivation].substituted = substituted

    def complete_build(self, assignment: int) -> bool:
        """JobCompleted of a build; False when an output is missing all the same."""
        job = self.facts.assignments[assignment]
        if job.outcome is not None or job.derivation is None:
            return False
        if not rules.present(self.facts, job.derivation):
            self.fail_build(assignment, FailureKind.TRANSIENT)
            return False
        build = self.facts.builds[job.derivation]
        self.close(assignment, DispatchOutcome.COMPLETED)
        outcome = AttemptOutcome.SUBSTITUTED if build.substituted else AttemptOutcome.BUILT
        self.close_attempt(assignment, outcome)
        if build.status in {S.QUEUED, S.BUILDING}:
            self.status(job.derivation, S.SUBSTITUTED if build.substituted else S.COMPLETED)
        self.settle()
        return True

    def fail_build(
        self, assignment: int, kind: FailureKind, *, oom: bool = False, missing: Collection[str] = ()
    ) -> None:
        """JobFailed of a build, by its kind (seed "Jobs", Failures)."""
        stopped = kind in {FailureKind.CANCELED, FailureKind.ABORTED}
        job = self.close(assignment, DispatchOutcome.ABANDONED if stopped else DispatchOutcome.FAILED)
        if job is None or job.derivation is None:
            return
        name, build = job.derivation, self.facts.builds[job.derivation]
        kind = FailureKind.TRANSIENT if oom else kind
        loops = self._loops(name)
        status, outcome, reason, attempt = self._decide(job, build, kind, oom, loops)
        self.close_attempt(assignment, outcome, reason)
        if build.status in {S.QUEUED, S.BUILDING}:
            if status is S.CREATED:
                build.cache_available = False
            build.attempt, build.updated_at = attempt, self.now
            self.status(name, status)
            if status in {S.FAILED_PERMANENT, S.FAILED_TIMEOUT}:
                self._cascade({name}, self.facts.builds)
        self.settle()
        if missing and reason is AttemptReason.INPUTS_UNAVAILABLE and loops < MAX_LOOPS:
            self.heal_missing_inputs(name, missing, job.dispatched_at)

    def _loops(self, name: str) -> int:
        reasons = [a.reason for a in self.facts.attempts if a.derivation == name]
        return reasons.count(AttemptReason.INPUTS_UNAVAILABLE)

    def _decide(
        self, job: Assignment, build: Build, kind: FailureKind, oom: bool, loops: int
    ) -> tuple[BuildStatus, AttemptOutcome, AttemptReason | None, int]:
        """Status, outcome and reason of the attempt, attempts used."""
        before = [
            a
            for a in self.facts.attempts
            if a.derivation == job.derivation and a.outcome is AttemptOutcome.FAILED
        ]
        missed = AttemptReason.SUBSTITUTE_UNAVAILABLE
        misses = 1 + sum(a.reason is missed and a.evaluation == job.evaluation for a in before)
        failed, used = AttemptOutcome.FAILED, build.attempt + 1
        if kind is FailureKind.ABORTED:
            return S.ABORTED, AttemptOutcome.ABORTED, None, build.attempt
        if kind is FailureKind.CANCELED:
            return S.QUEUED, AttemptOutcome.ABORTED, None, build.attempt
        if kind is FailureKind.TIMEOUT:
            return S.FAILED_TIMEOUT, failed, AttemptReason.WALL_CLOCK_TIMEOUT, used
        if kind in {FailureKind.PERMANENT, FailureKind.CORRUPT_EVAL_CACHE}:
            return S.FAILED_PERMANENT, failed, AttemptReason.BUILDER_NONZERO, used
        reason = AttemptReason.OOM if oom else None
        looped = False
        if kind is FailureKind.INPUTS_UNAVAILABLE:
            reason, looped = AttemptReason.INPUTS_UNAVAILABLE, loops >= MAX_LOOPS
        substitute_missed = kind is FailureKind.SUBSTITUTE_UNAVAILABLE and build.cache_available
        if not substitute_missed and not looped and used < MAX_ATTEMPTS:
            return S.FAILED_TRANSIENT, failed, reason, used
        if build.cache_available and not looped:
            if misses < MISS_THRESHOLD:
                return S.QUEUED, failed, missed, build.attempt
            return S.CREATED, failed, missed, 0
        return S.FAILED_PERMANENT, failed, reason, used

    def return_assignment(self, assignment: int) -> None:
        """A worker declined: the job goes back for others."""
        job = self.close(assignment, DispatchOutcome.ABANDONED)
        if job is None:
            return
        self.close_attempt(assignment, AttemptOutcome.ABORTED)
        if job.derivation is None:
            assert job.evaluation is not None
            self._requeue_evaluation(job.evaluation)
        else:
            self._requeue_building({job.derivation})
        self.settle()

    def _requeue_building(self, names: set[str]) -> None:
        self._move(names & self._in(S.BUILDING), S.QUEUED)

    def lose_worker(self, worker: UUID) -> None:
        """Open assignments close as abandoned; ten lost workers in a row end a build, ten dispatches an
        evaluation."""
        lost = [i for i, a in self.facts.assignments.items() if a.worker == worker and a.outcome is None]
        for assignment in lost:
            self.close(assignment, DispatchOutcome.ABANDONED)
            self.close_attempt(assignment, AttemptOutcome.ABORTED, AttemptReason.WORKER_LOST)
        jobs = [self.facts.assignments[i] for i in lost]
        builds = {job.derivation for job in jobs if job.derivation is not None}
        self._requeue_building(builds)
        self.settle()
        given_up = {n for n in builds & self._in(S.CREATED, S.QUEUED) if self._always_lost(n)}
        self._move(given_up, S.FAILED_PERMANENT)
        self._cascade(given_up, self.facts.builds)
        self.settle()
        for job in jobs:
            if job.kind is JobKind.EVAL and job.evaluation is not None:
                self._lose_evaluation(job.evaluation)

    def _always_lost(self, name: str) -> bool:
        newest = [a.reason for a in self.facts.attempts if a.derivation == name][-MAX_LOST:]
        return newest == [AttemptReason.WORKER_LOST] * MAX_LOST

    def _lose_evaluation(self, evaluation: int) -> None:
        jobs = [a for a in self.facts.assignments.values() if a.kind is JobKind.EVAL]
        if sum(a.evaluation == evaluation for a in jobs) >= MAX_LOST:
            self.fail_evaluation(evaluation)
        elif self.facts.evaluations[evaluation].status in RUNNING:
            self.facts.evaluations[evaluation].turn(V.WAITING)

    def retry_transient(self) -> int:
        """Queued again once the backoff, which doubles, is over; out of the queue where that is due."""
        waiting = {name: self.facts.builds[name] for name in self._in(S.FAILED_TRANSIENT)}
        due = {n for n, b in waiting.items() if b.updated_at + BACKOFF * 2 ** (b.attempt - 1) <= self.now}
        self._move(due, S.QUEUED)
        self.settle()
        return len(due)

    def restart(self) -> None:
        """A killed server starts again: nothing is on a worker."""
        for assignment, job in self.facts.assignments.items():
            if job.outcome is None:
                job.outcome = DispatchOutcome.ABANDONED
                self.close_attempt(assignment, AttemptOutcome.ABORTED)
        self._requeue_building(self._in(S.BUILDING))
        for row in self.facts.evaluations.values():
            if row.status in RUNNING:
                row.turn(V.QUEUED)
        self.settle()
