"""What a flake job reports of its evaluation: phases, the source, figures, the end. Layer: graph.

Source: seed "Jobs", Flake Jobs, Reports.
"""

from __future__ import annotations

import json
from typing import Final

import attrs

from gradient.graph.assignments import close_assignment, open_assignment
from gradient.graph.evaluation_end import (
    COUNT_DISPATCHES,
    abort_evaluation,
    check_evaluation_done,
    fail_evaluation,
)
from gradient.graph.evaluations import is_live, requeue_evaluation, set_status
from gradient.graph.repair import RepairScope, repair_build_graph
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction
from gradient.model import (
    EVALUATION_EVALUATING,
    EVALUATION_RUNNING,
    CachedSource,
    DispatchOutcome,
    EvaluationStatus,
    FailureKind,
    Span,
)
from gradient.nix.derivation import drv_path

# A named derivation whose subtree is not recorded to its leaves, though the walk has ended.
WALK_GAP: Final = Statement(
    "walk_gap",
    """
    SELECT gap.hash, gap.name, gap.walked FROM build_job j, LATERAL (
        SELECT d.id, d.hash, d.name, d.walked FROM derivation d
        WHERE d.id = j.derivation AND (NOT d.walked OR d.unwalked_inputs > 0) OFFSET 0) gap
    WHERE j.evaluation = %(evaluation)s ORDER BY gap.walked, gap.id LIMIT 1
    """,
)
# Whether something it walked was un-walked meanwhile; asked once.
TAKE_WALK_LOST: Final = Statement(
    "take_walk_lost",
    "UPDATE evaluation SET walk_lost = false WHERE id = %(evaluation)s AND walk_lost RETURNING id",
)
SET_FLAKE_SOURCE: Final = Statement(
    "set_flake_source",
    "UPDATE evaluation SET flake_source = %(source)s::jsonb, commit = coalesce(%(rev)s, commit)"
    " WHERE id = %(evaluation)s",
)
SET_STATS: Final = Statement(
    "set_evaluation_stats",
    """
    INSERT INTO evaluation_metric (evaluation, attributes, derivations, failed_attributes, fetch_ms, eval_ms,
                                   walk_ms, peak_rss_mb)
    VALUES (%(evaluation)s, %(attributes)s, %(derivations)s, %(failed_attributes)s, %(fetch_ms)s, %(eval_ms)s,
            %(walk_ms)s, %(peak_rss_mb)s)
    ON CONFLICT (evaluation) DO UPDATE
    SET attributes = excluded.attributes, derivations = excluded.derivations,
        failed_attributes = excluded.failed_attributes, fetch_ms = excluded.fetch_ms,
        eval_ms = excluded.eval_ms, walk_ms = excluded.walk_ms, peak_rss_mb = excluded.peak_rss_mb
    """,
)
# The statuses a phase report may come from: a cached follow-up skips Fetching.
_BEFORE: Final = {
    EvaluationStatus.FETCHING: {EvaluationStatus.QUEUED},
    EvaluationStatus.EVALUATING_FLAKE: {EvaluationStatus.QUEUED, EvaluationStatus.FETCHING},
    EvaluationStatus.EVALUATING_DERIVATION: {EvaluationStatus.QUEUED} | EVALUATION_RUNNING,
}


@attrs.frozen
class EvaluationPhase:
    """A worker's Fetching, EvaluatingFlake or EvaluatingDerivations (writer message)."""

    assignment: int
    status: EvaluationStatus

    async def apply(self, tx: Transaction) -> bool:
        """Move the evaluation on; False when the assignment is closed or the evaluation over: the job must
        stop."""
        job = await open_assignment(tx, self.assignment)
        if job is None or job.evaluation is None:
            return False
        await set_status(tx, job.evaluation, self.status, _BEFORE[self.status])
        return await is_live(tx, job.evaluation)


@attrs.frozen
class StoreFetchResult:
    """The fetched source of an evaluation (writer message)."""

    evaluation: int
    source: CachedSource

    async def apply(self, tx: Transaction) -> None:
        """Store it."""
        source = json.dumps(attrs.asdict(self.source))
        await tx.run(SET_FLAKE_SOURCE, evaluation=self.evaluation, source=source, rev=self.source.rev)


@attrs.frozen
class StoreEvalStats:
    """Evaluation metrics (writer message)."""

    evaluation: int
    attributes: int
    derivations: int
    failed_attributes: int
    fetch_ms: int | None = None
    eval_ms: int | None = None
    walk_ms: int | None = None
    peak_rss_mb: int | None = None

    async def apply(self, tx: Transaction) -> None:
        """Store them."""
        await tx.run(SET_STATS, **attrs.asdict(self))


@attrs.frozen
class EvalStreamCompleted:
    """JobCompleted of a flake job (writer message): every batch is recorded.

    A fetch-only job leaves its evaluation in Fetching for the follow-up and answers True. Otherwise the
    evaluation turns Building, and ends at once when nothing blocks it.
    """

    assignment: int
    timeline: tuple[Span, ...] = ()

    async def apply(self, tx: Transaction) -> bool:
        """Close the assignment and move on; answers whether a follow-up job is due."""
        job = await close_assignment(tx, self.assignment, DispatchOutcome.COMPLETED, self.timeline)
        if job is None or job.evaluation is None:
            return False
        if job.fetch_only:
            return True
        gap = await tx.rows(WALK_GAP, evaluation=job.evaluation)
        if gap and await tx.ids(TAKE_WALK_LOST, evaluation=job.evaluation):
            await requeue_evaluation(tx, job.evaluation)
        elif gap:
            await fail_evaluation(tx, job.evaluation, "evaluation", _gap_in_words(*gap[0]))
        elif await set_status(tx, job.evaluation, EvaluationStatus.BUILDING, EVALUATION_EVALUATING):
            await repair_build_graph(tx, job.evaluation, RepairScope.EVAL)
            await check_evaluation_done(tx, job.evaluation)
        else:
            early = {EvaluationStatus.QUEUED, EvaluationStatus.FETCHING}
            why = "the worker ended its job without evaluating anything"
            await fail_evaluation(tx, job.evaluation, "evaluation", why, early)
        return False


def _gap_in_words(hash_part: str, name: str, walked: bool) -> str:
    path = drv_path(hash_part, name)
    if walked:
        return f"something that {path} needs has no record: it was taken out of the graph meanwhile"
    return f"the worker ended its job without the record of {path}, which others need"


@attrs.frozen
class EvalFailed:
    """JobFailed of a flake job (writer message). `missing_paths` are hash parts that the cache lists and
    could not give."""

    assignment: int
    kind: FailureKind
    error: str
    max_attempts: int
    timeline: tuple[Span, ...] = ()
    missing_paths: tuple[str, ...] = ()

    async def apply(self, tx: Transaction) -> None:
        """Requeue or end the evaluation, by the kind of failure (seed "Jobs", Failures)."""
        tx.moves.suspected.update(self.missing_paths)
        abandoned = self.kind in {FailureKind.CANCELED, FailureKind.ABORTED}
        outcome = DispatchOutcome.ABANDONED if abandoned else DispatchOutcome.FAILED
        job = await close_assignment(tx, self.assignment, outcome, self.timeline)
        if job is None or job.evaluation is None:
            return
        if self.kind is FailureKind.ABORTED:
            await abort_evaluation(tx, job.evaluation, self.error)
        elif self.kind is FailureKind.CANCELED or await self._may_retry(tx, job.evaluation):
            await requeue_evaluation(tx, job.evaluation)
        else:
            await fail_evaluation(tx, job.evaluation, "evaluation", self.error)

    async def _may_retry(self, tx: Transaction, evaluation: int) -> bool:
        if self.kind is not FailureKind.TRANSIENT:
            return False
        _, counted = (await tx.rows(COUNT_DISPATCHES, evaluation=evaluation))[0]
        return bool(counted < self.max_attempts)
