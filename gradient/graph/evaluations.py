"""Evaluations begin, move from phase to phase, and wait. Layer: graph.

How they end is in `evaluation_end`, what their flake job reports in `evaluation_reports`.
Source: seeds "Jobs", "Waiting and Recovery".
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

import attrs

from gradient.graph.predicates import any_of, live_evaluation
from gradient.graph.statements import Statement
from gradient.graph.transaction import Rejected, Transaction
from gradient.model import (
    EVALUATION_ACTIVE,
    EVALUATION_RUNNING,
    CachedSource,
    EvaluationKind,
    EvaluationStatus,
    Repository,
    WalkMode,
)

INSERT_EVALUATION: Final = Statement(
    "insert_evaluation",
    """
    INSERT INTO evaluation (project, task, kind, walk_mode, repository, commit, flake_source, wildcards,
                            started_by, source_comment, concurrent, created_at, updated_at)
    SELECT p.id, %(task)s, %(kind)s, %(walk_mode)s, %(repository)s, %(commit)s, %(flake_source)s::jsonb,
           %(wildcards)s, %(started_by)s, %(comment)s, %(task)s::bigint IS NULL, %(now)s, %(now)s
    FROM project p WHERE p.name = %(project)s
    RETURNING id
    """,
)
# One writer of the status: stamps and history go with it, and a parked reason goes away.
SET_STATUS: Final = Statement(
    "set_evaluation_status",
    f"""
    WITH moved AS (
        UPDATE evaluation v
        SET status = %(status)s, updated_at = %(now)s, waiting_reason = %(reason)s::jsonb,
            waiting_since = CASE WHEN %(reason)s::jsonb IS NULL THEN NULL ELSE %(now)s::timestamptz END,
            fetch_started_at = CASE WHEN %(status)s = {int(EvaluationStatus.FETCHING)}
                               THEN coalesce(fetch_started_at, %(now)s) ELSE fetch_started_at END,
            eval_flake_started_at = CASE WHEN %(status)s = {int(EvaluationStatus.EVALUATING_FLAKE)}
                               THEN coalesce(eval_flake_started_at, %(now)s) ELSE eval_flake_started_at END,
            eval_drv_started_at = CASE WHEN %(status)s = {int(EvaluationStatus.EVALUATING_DERIVATION)}
                               THEN coalesce(eval_drv_started_at, %(now)s) ELSE eval_drv_started_at END,
            building_started_at = CASE WHEN %(status)s = {int(EvaluationStatus.BUILDING)}
                               THEN coalesce(building_started_at, %(now)s) ELSE building_started_at END,
            finished_at = CASE WHEN {any_of("%(status)s", EVALUATION_ACTIVE)}
                          THEN NULL ELSE %(now)s::timestamptz END
        WHERE v.id = %(evaluation)s AND v.status = ANY(%(allowed)s) AND v.status <> %(status)s
        RETURNING v.id
    )
    INSERT INTO phase_event (evaluation, status, at) SELECT id, %(status)s, %(now)s FROM moved
    RETURNING evaluation
    """,
)
SET_WAITING_REASON: Final = Statement(
    "set_waiting_reason",
    f"""
    UPDATE evaluation SET waiting_reason = %(reason)s::jsonb, updated_at = %(now)s,
           waiting_since = CASE WHEN %(goes_on)s THEN waiting_since ELSE %(now)s::timestamptz END
    WHERE id = %(evaluation)s AND status = {int(EvaluationStatus.WAITING)}
      AND waiting_reason IS DISTINCT FROM %(reason)s::jsonb
    RETURNING id
    """,
)
IS_CLAIMED: Final = Statement(
    "evaluation_is_claimed",
    "SELECT EXISTS (SELECT FROM dispatched_job WHERE job_id = %(job)s AND finished_at IS NULL)",
)
IS_LIVE: Final = Statement(
    "evaluation_is_live", f"SELECT {live_evaluation('v')} FROM evaluation v WHERE v.id = %(evaluation)s"
)


async def is_live(tx: Transaction, evaluation: int) -> bool:
    """Whether an evaluation exists and has not ended."""
    return bool(await tx.value(IS_LIVE, evaluation=evaluation))


async def set_status(
    tx: Transaction,
    evaluation: int,
    status: EvaluationStatus,
    allowed: Collection[EvaluationStatus],
    reason: dict[str, Any] | None = None,
) -> bool:
    """Move an evaluation to `status` from one of `allowed`; False when it stands elsewhere."""
    moved = await tx.ids(
        SET_STATUS,
        evaluation=evaluation,
        status=status,
        allowed=sorted(allowed),
        reason=None if reason is None else json.dumps(reason),
        now=tx.now,
    )
    if moved:
        tx.moves.evaluations[evaluation] = status
    return bool(moved)


@attrs.frozen
class CreateEvaluation:
    """A new evaluation in Queued (writer message); exactly one of `repository` and `cached` is set.

    Answers its id. Raises Rejected for an unknown project and for no source or two. Not idempotent: the
    caller sends it once.
    """

    project: str
    repository: Repository | None = None
    cached: CachedSource | None = None
    wildcards: tuple[str, ...] = ()
    task: int | None = None
    kind: EvaluationKind = EvaluationKind.NORMAL
    walk_mode: WalkMode = WalkMode.PRUNED
    started_by: str | None = None
    comment: str | None = None

    async def apply(self, tx: Transaction) -> int:
        """Insert the row."""
        if (self.repository is None) == (self.cached is None):
            raise Rejected("an evaluation has one source: a repository or a store path")
        evaluation: int | None = await tx.value(
            INSERT_EVALUATION,
            project=self.project,
            task=self.task,
            kind=self.kind,
            walk_mode=self.walk_mode,
            repository=self.repository.url if self.repository else None,
            commit=self.repository.commit if self.repository else None,
            flake_source=json.dumps(attrs.asdict(self.cached)) if self.cached else None,
            wildcards=self.wildcards,
            started_by=self.started_by,
            comment=self.comment,
            now=tx.now,
        )
        if evaluation is None:
            raise Rejected(f"there is no project {self.project!r}")
        tx.moves.evaluations[evaluation] = EvaluationStatus.QUEUED
        return evaluation


@attrs.frozen
class ParkEvaluation:
    """Park an evaluation with a reason, or renew the reason of a parked one (writer message).

    `seen` is the status it was judged in: one that went on meanwhile stays as it is. `goes_on` keeps the
    time of the park: the reason changed only in its numbers.
    """

    evaluation: int
    seen: EvaluationStatus
    reason: dict[str, Any]
    goes_on: bool = False

    async def apply(self, tx: Transaction) -> None:
        """Turn it Waiting; written only when the reason's JSON changed."""
        if self.seen is not EvaluationStatus.WAITING:
            if not await self._claimed(tx):
                await set_status(tx, self.evaluation, EvaluationStatus.WAITING, {self.seen}, self.reason)
            return
        changed = await tx.ids(
            SET_WAITING_REASON,
            evaluation=self.evaluation,
            reason=json.dumps(self.reason),
            goes_on=self.goes_on,
            now=tx.now,
        )
        tx.moves.progressed.update(changed)

    async def _claimed(self, tx: Transaction) -> bool:
        """A claim leaves its evaluation Queued until the worker reports: it waits for nobody."""
        queued = self.seen is EvaluationStatus.QUEUED
        return queued and bool(await tx.value(IS_CLAIMED, job=f"eval:{self.evaluation}"))


@attrs.frozen
class UnparkEvaluation:
    """Back from Waiting to Queued or Building (writer message)."""

    evaluation: int
    status: EvaluationStatus

    async def apply(self, tx: Transaction) -> None:
        """Move it; a no-op when it is not parked any more."""
        if await set_status(tx, self.evaluation, self.status, {EvaluationStatus.WAITING}):
            tx.moves.returned.add(f"eval:{self.evaluation}")


async def requeue_evaluation(tx: Transaction, evaluation: int) -> None:
    """Its job came back undone: any worker may have it."""
    await set_status(tx, evaluation, EvaluationStatus.QUEUED, EVALUATION_RUNNING)
    tx.moves.returned.add(f"eval:{evaluation}")
