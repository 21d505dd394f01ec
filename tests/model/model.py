"""The naive model: what each message of the graph writer does, in the seed's words.

An event writes its facts and then lets `settle` do what the seed says happens by itself. The real graph
moves counters from row to row to come to the same end; here everything is looked at again after each event.
It is one class in a chain of modules: `settling`, `repair_events`, `cache_events`, `collection_events`,
`build_events`, and evaluations here.
Sources: seeds "Queueing and Counters" (Naming, Verdict), "Jobs" (Abort, Failures).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Final
from uuid import UUID

import attrs

from gradient.model import (
    BuildStatus,
    DispatchOutcome,
    EdgeKind,
    EvaluationStatus,
    FailureKind,
    JobKind,
)
from tests.model import rules
from tests.model.build_events import MAX_ATTEMPTS, BuildEvents
from tests.model.facts import Assignment, Build, Derivation, Evaluation
from tests.model.settling import EVALUATING, RUNNING

S = BuildStatus
V = EvaluationStatus
# How long one is stuck over a lost `.drv` before that is recovered.
RECOVER_AFTER: Final = timedelta(seconds=120)


@attrs.frozen
class Found:
    """One derivation as a worker's walk finds it."""

    name: str
    inputs: tuple[str, ...]
    outputs: Mapping[str, str]
    sources: tuple[str, ...] = ()


class Model(BuildEvents):
    """What happens to evaluations, and with that everything."""

    def may_create(self, task: int | None) -> bool:
        """A task has one evaluation at a time, and recoveries beside it."""
        rows = self.facts.evaluations
        own = [v for v, row in rows.items() if row.task == task and not row.is_recovery]
        return task is None or not any(rules.is_live(self.facts, v) for v in own)

    def create_evaluation(self, evaluation: int, task: int | None) -> None:
        """A new one, Queued."""
        self.facts.evaluations[evaluation] = Evaluation(V.QUEUED, self.now, task)

    def claim_evaluation(self, evaluation: int, assignment: int, worker: UUID) -> None:
        """It stays Queued until its worker reports."""
        self.facts.assignments[assignment] = Assignment(JobKind.EVAL, worker, evaluation, None, self.now)

    def evaluation_phase(self, assignment: int, status: EvaluationStatus) -> bool:
        """A worker's report of its phase; False tells it to stop."""
        job = self.facts.assignments[assignment]
        if job.outcome is not None or job.evaluation is None:
            return False
        row = self.facts.evaluations[job.evaluation]
        order = [V.QUEUED, V.FETCHING, V.EVALUATING_FLAKE, V.EVALUATING_DERIVATION]
        if row.status in order and order.index(row.status) < order.index(status):
            row.turn(status)
        return rules.is_live(self.facts, job.evaluation)

    def record(
        self,
        evaluation: int,
        batch: Collection[Found] = (),
        entry_points: Mapping[str, str] | None = None,
        *,
        error: bool = False,
    ) -> bool:
        """A batch of walked derivations; False when it came too late and is dropped."""
        facts, row, entries = self.facts, self.facts.evaluations[evaluation], dict(entry_points or {})
        if row.status not in RUNNING:
            return False
        row.has_error = row.has_error or error
        for found in batch:
            for name in (found.name, *found.inputs):
                facts.derivations.setdefault(name, Derivation())
        for found in batch:
            derivation = facts.derivations[found.name]
            derivation.walked = True
            derivation.outputs = derivation.outputs or dict(found.outputs)
            derivation.sources |= set(found.sources)
            for low in found.inputs:
                self._edge(found.name, low, EdgeKind.BUILD)
        named = {name for found in batch for name in (found.name, *found.inputs)} | set(entries.values())
        newly_named = {name for name in named if (evaluation, name) not in facts.names}
        for name in named:
            facts.builds.setdefault(name, Build(S.CREATED, self.now, probed=not self.upstream))
            facts.names.setdefault((evaluation, name), False)
        for attr, name in entries.items():
            facts.entry_points.setdefault((evaluation, attr), name)
        self.adopt_references()
        self.settle()
        self._skip_aborted(newly_named)
        return True

    def end_stream(self, assignment: int) -> None:
        """JobCompleted of a flake job: Building, after the repair of its closure; or a gap in the walk."""
        job = self.close(assignment, DispatchOutcome.COMPLETED)
        if job is None or job.evaluation is None:
            return
        row = self.facts.evaluations[job.evaluation]
        names = rules.named_by(self.facts, job.evaluation)
        gap = not set(names) <= rules.recorded(self.facts)
        if gap and row.walk_lost:
            # The gap is ours: somebody un-walked what this walk had stopped at.
            row.walk_lost = False
            self._requeue_evaluation(job.evaluation)
        elif gap:
            self.fail_evaluation(job.evaluation)
        elif row.status in EVALUATING:
            row.turn(V.BUILDING)
            row.evaluated = True
            self.repair(job.evaluation, "eval")
            self.check_evaluation_done(job.evaluation)
        elif row.status in {V.QUEUED, V.FETCHING}:
            self.fail_evaluation(job.evaluation)

    def fail_stream(self, assignment: int, kind: FailureKind) -> set[str]:
        """JobFailed of a flake job. Answers the jobs that get an AbortJob."""
        stopped = kind in {FailureKind.CANCELED, FailureKind.ABORTED}
        job = self.close(assignment, DispatchOutcome.ABANDONED if stopped else DispatchOutcome.FAILED)
        if job is None or job.evaluation is None:
            return set()
        tries = sum(
            a.kind is JobKind.EVAL
            and a.evaluation == job.evaluation
            and a.outcome in {DispatchOutcome.COMPLETED, DispatchOutcome.FAILED}
            for a in self.facts.assignments.values()
        )
        if kind is FailureKind.ABORTED:
            return self.abort_evaluation(job.evaluation) or set()
        if kind is FailureKind.CANCELED or (kind is FailureKind.TRANSIENT and tries < MAX_ATTEMPTS):
            self._requeue_evaluation(job.evaluation)
        else:
            self.fail_evaluation(job.evaluation)
        return set()

    def park(self, evaluation: int, *, stuck: bool) -> None:
        """Nothing of it can be handed out: for want of workers, or it is stuck."""
        row = self.facts.evaluations[evaluation]
        if row.status is V.BUILDING:
            row.turn(V.WAITING)
            row.stuck_since = self.now if stuck else None

    def unpark(self, evaluation: int) -> None:
        """Something of it can be handed out again."""
        row = self.facts.evaluations[evaluation]
        if row.status is V.WAITING:
            row.turn(V.BUILDING if row.evaluated else V.QUEUED)

    def may_recover(self, evaluation: int) -> bool:
        """Another one is to bring a `.drv` that it has been stuck over; once, and not for one that does that
        itself."""
        is_recovery = self.facts.evaluations[evaluation].is_recovery
        return self._misses_drv(evaluation) and not is_recovery and not self._recoveries(evaluation)

    def recover_drv(self, evaluation: int, recovery: int | None) -> None:
        """It has its recovery from now on, with this number; or it fails, unless one is under way."""
        rows = self.facts.evaluations
        goes_on = any(rules.is_live(self.facts, v) for v in self._recoveries(evaluation))
        if recovery is not None:
            task = rows[evaluation].task
            rows[recovery] = Evaluation(V.QUEUED, self.now, task, is_recovery=True, recovers=evaluation)
        elif self._misses_drv(evaluation) and not goes_on:
            self.fail_evaluation(evaluation)

    def _misses_drv(self, evaluation: int) -> bool:
        since = self.facts.evaluations[evaluation].stuck_since
        overdue = since is not None and self.now - since >= RECOVER_AFTER
        return overdue and bool(rules.without_drv(self.facts, evaluation))

    def _recoveries(self, evaluation: int) -> list[int]:
        return [v for v, row in self.facts.evaluations.items() if row.recovers == evaluation]

    def abort_evaluation(self, evaluation: int) -> set[str] | None:
        """Abort it, and stop what no other live evaluation wants: of what it names, what only ended ones
        want, unless a live one names it; then what it named or wanted and nobody wants any more, except what
        has not begun and another live one names. Answers the jobs that get an AbortJob; None when it had
        ended."""
        facts = self.facts
        if not rules.is_live(facts, evaluation):
            return None
        before = rules.wanted(facts)
        facts.evaluations[evaluation].turn(V.ABORTED)
        held = self._wanted_by_ended_alone(evaluation)
        self._move(held, S.ABORTED)
        after = rules.wanted(facts)
        # What an ended evaluation wants all the same is held; what stands below that alone is not wanted.
        for name in held & after:
            facts.names[evaluation, name] = True
        doomed = (before - after) | (set(rules.named_by(facts, evaluation)) - after)
        doomed &= self._in(S.CREATED, S.QUEUED, S.BUILDING)
        live = {name for named_by, name in facts.names if rules.is_live(facts, named_by)}
        not_begun = {n for n in self._in(S.CREATED, S.QUEUED) if not rules.is_assigned(facts, n)}
        doomed -= live & not_begun
        self._move(doomed, S.ABORTED)
        self.settle()
        stopped = {f"eval:{evaluation}", *(f"build:{name}" for name in held | doomed)}
        return stopped & {a.job_id for a in facts.assignments.values() if a.outcome is None}

    def _wanted_by_ended_alone(self, evaluation: int) -> set[str]:
        facts = self.facts
        pending = set(rules.named_by(facts, evaluation)) & self._in(S.CREATED, S.QUEUED, S.BUILDING)
        live = [v for v in facts.evaluations if rules.is_live(facts, v)]
        by_live = rules.open_walk(facts, rules.wanting_entry_points(facts, live))
        asked = {name for (v, name), aborted in facts.names.items() if v in live and not aborted}
        return (pending & rules.wanted(facts)) - by_live - asked
