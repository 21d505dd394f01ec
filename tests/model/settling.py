"""What happens by itself: rules that apply again and again until none does.

Sources: seed "Queueing and Counters" (Queue Conditions, Skipped and Thaw, Evaluation Verdict).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Final

import attrs

from gradient.model import (
    AttemptOutcome,
    AttemptReason,
    BuildStatus,
    DispatchOutcome,
    EdgeKind,
    EvaluationStatus,
)
from tests.model import rules
from tests.model.facts import Assignment, Facts

S = BuildStatus
V = EvaluationStatus
EVALUATING: Final = {V.EVALUATING_FLAKE, V.EVALUATING_DERIVATION}
RUNNING: Final = EVALUATING | {V.FETCHING}
# What becomes DependencyFailed when something below it fails: never what runs, never a success.
CASCADE: Final = {S.CREATED, S.QUEUED, S.FAILED_TRANSIENT}


@attrs.define
class Settling:
    """The facts, the time of the message that is applied, and what follows from every message."""

    now: datetime
    # An upstream cache is configured: it is asked for every shared build.
    upstream: bool = False
    facts: Facts = attrs.field(factory=Facts)

    def status(self, name: str, status: BuildStatus) -> None:
        """Move a shared build."""
        build = self.facts.builds[name]
        if build.status is not status:
            build.status, build.updated_at = status, self.now

    # --- what happens by itself -------------------------------------------------------------------

    def settle(self, *, spare: Collection[str] = ()) -> None:
        """One rule at a time, each over everything, until none applies. Of `spare` nothing is substituted."""
        while (
            self.substitute_held(spare)
            or self.thaw_wanted()
            or self.unpromote_ungated()
            or self.skip_unwanted()
            or self.promote()
        ):
            pass

    def _move(self, names: Iterable[str], status: BuildStatus) -> bool:
        moved = sorted(names)
        for name in moved:
            self.status(name, status)
        return bool(moved)

    def _in(self, *statuses: BuildStatus) -> set[str]:
        return {name for name, build in self.facts.builds.items() if build.status in statuses}

    def substitute_held(self, spare: Collection[str] = ()) -> bool:
        """What the cache holds with its closure is not built again; a job that is out ends undisturbed."""
        held = self._in(*CASCADE, S.SKIPPED) & rules.complete(self.facts)
        held = {name for name in held - set(spare) if not rules.is_assigned(self.facts, name)}
        for name in held:
            self.facts.builds[name].substituted = True
        return self._move(held, S.SUBSTITUTED)

    def thaw_wanted(self) -> bool:
        """Skipped/Aborted -> Created, attempt = 0, but for what an abort holds."""
        frozen = self._in(S.SKIPPED, S.ABORTED) & rules.wanted(self.facts)
        frozen = {name for name in frozen if not rules.is_held(self.facts, name)}
        for name in frozen:
            self.facts.builds[name].attempt = 0
        return self._move(frozen, S.CREATED)

    def unpromote_ungated(self) -> bool:
        """Only Queued rows without an open assignment."""
        regressed = self._in(S.QUEUED) - rules.gated(self.facts)
        return self._move((n for n in regressed if not rules.is_assigned(self.facts, n)), S.CREATED)

    def skip_unwanted(self) -> bool:
        """Created, not needed, no entry point -> Skipped."""
        unwanted = self._in(S.CREATED) - rules.wanted(self.facts) - rules.wanting_entry_points(self.facts)
        return self._move(unwanted, S.SKIPPED)

    def promote(self) -> bool:
        """Created with every queue condition -> Queued."""
        return self._move(self._in(S.CREATED) & rules.gated(self.facts), S.QUEUED)

    def finish(self) -> None:
        """A verdict for each evaluation past its stream that no named build blocks any more."""
        for evaluation in list(self.facts.evaluations):
            self.check_evaluation_done(evaluation)

    def check_evaluation_done(self, evaluation: int) -> bool:
        """Failed when any named shared build is Requeueable or an error message is present."""
        row = self.facts.evaluations[evaluation]
        counted = rules.counters(self.facts, evaluation)
        if not row.evaluated or row.status not in {V.BUILDING, V.WAITING} or counted.active:
            return False
        row.turn(V.FAILED if counted.failed or row.has_error else V.COMPLETED)
        return True

    def _requeue_evaluation(self, evaluation: int) -> None:
        row = self.facts.evaluations[evaluation]
        if row.status in RUNNING:
            row.turn(V.QUEUED)

    def fail_evaluation(self, evaluation: int) -> None:
        """End it with an error. Its entry points still want what is below them."""
        if rules.is_live(self.facts, evaluation):
            row = self.facts.evaluations[evaluation]
            row.turn(V.FAILED)
            row.has_error = True

    def close(self, assignment: int, outcome: DispatchOutcome) -> Assignment | None:
        """None when it was closed before: the report is stale."""
        job = self.facts.assignments[assignment]
        if job.outcome is not None:
            return None
        job.outcome = outcome
        return job

    def close_attempt(
        self, assignment: int, outcome: AttemptOutcome, reason: AttemptReason | None = None
    ) -> None:
        """End the running attempt of an assignment."""
        for attempt in self.facts.attempts:
            if attempt.assignment == assignment and attempt.outcome is AttemptOutcome.RUNNING:
                attempt.outcome, attempt.reason = outcome, reason

    def _edge(self, high: str, low: str, kind: EdgeKind) -> None:
        known = self.facts.edges.get((high, low), kind)
        self.facts.edges[high, low] = kind if known is kind else EdgeKind.BOTH

    def adopt_references(self) -> None:
        """An edge from each derivation that makes a path in the cache to each that makes what the path
        refers to; but none between two derivations that make one path (ADR 10)."""
        paths = {name: set(d.outputs.values()) for name, d in self.facts.derivations.items()}
        for high, own in paths.items():
            referred = {ref for path in own & set(self.facts.cached) for ref in self.facts.cached[path]}
            for low, made in paths.items():
                if made & referred and not made & own:
                    self._edge(high, low, EdgeKind.RUNTIME)
