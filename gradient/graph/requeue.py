"""Shared builds go back to the queue: handed back, lost with their worker, tried again. Layer: graph.

Whatever queues a build again settles it in the same step: the conditions may no longer hold.
Source: seed "Jobs", Abort and Lost Workers; seed "Queueing and Counters", Queued Invariant.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Final
from uuid import UUID

import attrs

from gradient.graph.assignments import (
    abandon_assignments,
    assignments_of_worker,
    close_assignment,
    close_attempt,
)
from gradient.graph.can_start import unpromote_ungated
from gradient.graph.dependency_failure import cascade_dependency_failed
from gradient.graph.evaluation_end import lose_evaluations
from gradient.graph.evaluations import requeue_evaluation
from gradient.graph.failure import MAX_DOUBLINGS, RetryLimits, backoff_secs
from gradient.graph.moves import BuildChange
from gradient.graph.need import need_after, settle_held, skip_unwanted
from gradient.graph.predicates import any_of
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import AttemptOutcome, AttemptReason, BuildStatus, DispatchOutcome, JobKind

# Workers lost in a row after which a build is given up (seed "Jobs", Lost Worker).
MAX_LOST_WORKERS: Final = 10

REQUEUE_BUILDING: Final = Statement(
    "requeue_building",
    f"""
    UPDATE derivation_build SET status = {int(BuildStatus.QUEUED)}, queued_at = %(now)s, updated_at = %(now)s
    WHERE derivation = ANY(%(ids)s) AND status = {int(BuildStatus.BUILDING)} RETURNING derivation
    """,
)
LOSE_ATTEMPTS: Final = Statement(
    "lose_attempts",
    f"""
    UPDATE build_attempt
    SET outcome = {int(AttemptOutcome.ABORTED)}, reason = {int(AttemptReason.WORKER_LOST)},
        build_finished_at = %(now)s
    WHERE dispatched_job = ANY(%(assignments)s) AND outcome = {int(AttemptOutcome.RUNNING)}
    """,
)
# The newest attempts of each, all of them lost workers: the streak that gives a build up.
LOST_STREAKS: Final = Statement(
    "lost_streaks",
    f"""
    SELECT own.derivation FROM unnest(%(ids)s::bigint[]) AS own (derivation), LATERAL (
        SELECT count(*) FILTER (WHERE newest.reason = {int(AttemptReason.WORKER_LOST)}) AS lost FROM (
            SELECT a.reason FROM build_attempt a WHERE a.derivation = own.derivation
            ORDER BY a.id DESC LIMIT %(limit)s
        ) newest
    ) streak
    WHERE streak.lost >= %(limit)s
    """,
)
GIVE_UP: Final = Statement(
    "give_up_builds",
    f"""
    UPDATE derivation_build b SET status = {int(BuildStatus.FAILED_PERMANENT)}, updated_at = %(now)s
    FROM (SELECT derivation, status FROM derivation_build
          WHERE derivation = ANY(%(ids)s) AND {any_of("status", {BuildStatus.CREATED, BuildStatus.QUEUED})}
          ORDER BY derivation FOR NO KEY UPDATE) before
    WHERE b.derivation = before.derivation RETURNING b.derivation, before.status
    """,
)
# One row per step of the backoff: `due[n]` is the latest `updated_at` that try n may start again from.
# Every try beyond the last step waits as long as that one.
RETRY_TRANSIENT: Final = Statement(
    "retry_transient",
    f"""
    UPDATE derivation_build b
    SET status = {int(BuildStatus.QUEUED)}, queued_at = %(now)s, updated_at = %(now)s
    FROM unnest(%(attempts)s::smallint[], %(due)s::timestamptz[]) AS step (attempt, due)
    WHERE b.status = {int(BuildStatus.FAILED_TRANSIENT)} AND step.attempt = least(b.attempt, %(last)s)
      AND b.updated_at <= step.due
    RETURNING b.derivation
    """,
)


@attrs.frozen
class ReturnAssignment:
    """A worker declined a job it was assigned (writer message): it goes back for others."""

    assignment: int

    async def apply(self, tx: Transaction) -> None:
        """Close the assignment as abandoned."""
        job = await close_assignment(tx, self.assignment, DispatchOutcome.ABANDONED)
        if job is None:
            return
        await close_attempt(tx, self.assignment, AttemptOutcome.ABORTED)
        if job.evaluation is not None and job.kind is JobKind.EVAL:
            await requeue_evaluation(tx, job.evaluation)
        elif job.derivation is not None:
            await requeue_builds(tx, [job.derivation])


@attrs.frozen
class LoseWorker:
    """A worker is gone (writer message), with every assignment it holds: also one whose claim was still
    on its way when the session ended."""

    worker: UUID

    async def apply(self, tx: Transaction) -> None:
        """Builds back to Queued, evaluations back to waiting; those lost too often fail."""
        closed = await abandon_assignments(tx, await assignments_of_worker(tx, self.worker))
        await tx.run(LOSE_ATTEMPTS, assignments=[i for i, *_ in closed], now=tx.now)
        builds = [derivation for _, kind, _, derivation in closed if kind is JobKind.BUILD and derivation]
        await requeue_builds(tx, ordered(builds))
        await _give_up_lost(tx, builds)
        evaluations = [e for _, kind, e, _ in closed if kind is JobKind.EVAL and e is not None]
        await lose_evaluations(tx, evaluations)


async def requeue_builds(tx: Transaction, builds: Collection[int]) -> None:
    """Back for others: what a worker had, whether it had begun or not."""
    if not builds:
        return
    requeued = await tx.ids(REQUEUE_BUILDING, ids=builds, now=tx.now)
    tx.moves.change(BuildChange(i, BuildStatus.BUILDING, BuildStatus.QUEUED) for i in requeued)
    tx.moves.returned.update(f"build:{i}" for i in builds)
    await settle_requeued(tx, builds)


async def settle_requeued(tx: Transaction, ids: Collection[int]) -> None:
    """Queued again by a report: done where every output was uploaded all the same, out of the queue where
    the conditions no longer hold, Skipped where nobody needs it any more."""
    await settle_held(tx, ids)
    await unpromote_ungated(tx, ids)
    await skip_unwanted(tx, ids)


async def _give_up_lost(tx: Transaction, builds: Collection[int]) -> None:
    """Builds that took ten workers in a row with them."""
    if not builds:
        return
    streaks = await tx.ids(LOST_STREAKS, ids=builds, limit=MAX_LOST_WORKERS)
    if streaks:
        rows = await tx.rows(GIVE_UP, ids=streaks, now=tx.now)
        changes = [BuildChange(i, BuildStatus(old), BuildStatus.FAILED_PERMANENT) for i, old in rows]
        tx.moves.change(changes)
        await cascade_dependency_failed(tx, [c.derivation for c in changes])
        await need_after(tx, changes)


@attrs.frozen
class RetryTransient:
    """Queue the transient failures whose backoff is over (writer message); answers how many."""

    limits: RetryLimits

    async def apply(self, tx: Transaction) -> int:
        """Back to Queued, and out of the queue again where the conditions no longer hold."""
        attempts = range(1, MAX_DOUBLINGS + 2)
        due = [tx.now - timedelta(seconds=backoff_secs(attempt, self.limits)) for attempt in attempts]
        requeued = await tx.ids(
            RETRY_TRANSIENT, attempts=list(attempts), due=due, last=attempts[-1], now=tx.now
        )
        tx.moves.change(BuildChange(i, BuildStatus.FAILED_TRANSIENT, BuildStatus.QUEUED) for i in requeued)
        await settle_requeued(tx, requeued)
        return len(requeued)
