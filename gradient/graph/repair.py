"""The repair pass over the closure of one evaluation. Layer: graph, run by the graph writer.

Counters queue a build the moment its conditions hold. What they cannot see is handled here: builds that
failed before and are asked for again, outputs that arrived without a build, builds named after what they
need had failed, and pruned subtrees that this evaluation never walked itself.
Source: seeds "Waiting and Recovery" (Graph-Stuck Heal), "Queueing and Counters" (Dependency Failure).
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Final

from gradient.graph.can_start import became_fetchable, promote, promote_closure
from gradient.graph.dependency_failure import repair_dependency_failed
from gradient.graph.locks import lock_shared_builds
from gradient.graph.moves import BuildChange
from gradient.graph.need import skip_unwanted, update_and_settle_need
from gradient.graph.predicates import any_of, present_predicate, unassigned_predicate
from gradient.graph.reachability import adopt_pending_closure, unfetchable_closure
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import CASCADE_TARGET, TERMINAL_FAILURE, BuildStatus

# A failure is lasting when it happened after the evaluation had begun, or when a task asked: that would
# try a build that cannot succeed again with every commit. What was aborted in the evaluation, and what
# stands above a lasting failure, stays as it is too.
REQUEUE_FAILED_CLOSURE: Final = Statement(
    "requeue_failed_closure",
    f"""
    WITH RECURSIVE failed AS MATERIALIZED (
        SELECT b.derivation, b.status, v.task IS NULL AND b.updated_at < v.created_at AS again
        FROM derivation_build b, evaluation v
        WHERE b.derivation = ANY(%(closure)s) AND v.id = %(evaluation)s
          AND {any_of("b.status", TERMINAL_FAILURE)}
    ), lasting (derivation) AS (
        SELECT f.derivation FROM failed f
        WHERE f.status <> {int(BuildStatus.DEPENDENCY_FAILED)} AND NOT f.again
      UNION
        SELECT j.derivation FROM build_job j WHERE j.evaluation = %(evaluation)s AND j.aborted
      UNION
        SELECT e.derivation FROM lasting l
        JOIN derivation_dependency e ON e.dependency = l.derivation
        JOIN failed f ON f.derivation = e.derivation
        WHERE f.status = {int(BuildStatus.DEPENDENCY_FAILED)}
    ), thawed AS (
        SELECT b.derivation, b.status FROM failed f JOIN derivation_build b USING (derivation)
        WHERE NOT EXISTS (SELECT FROM lasting l WHERE l.derivation = b.derivation)
        ORDER BY b.derivation FOR NO KEY UPDATE OF b
    )
    UPDATE derivation_build b
    SET status = {int(BuildStatus.CREATED)}, attempt = 0, updated_at = %(now)s
    FROM thawed t WHERE b.derivation = t.derivation
    RETURNING b.derivation, t.status
    """,
)
# Present is enough: what it refers to and the cache lacks is wanted through its runtime edges.
COMPLETE_CACHED: Final = Statement(
    "complete_cached_shared_builds",
    f"""
    WITH held AS (
        SELECT b.derivation, b.status FROM derivation_build b
        WHERE b.derivation = ANY(%(closure)s)
          AND {any_of("b.status", CASCADE_TARGET | {BuildStatus.SKIPPED})}
          AND {present_predicate("b.derivation")} AND {unassigned_predicate("b")}
        ORDER BY b.derivation FOR NO KEY UPDATE
    )
    UPDATE derivation_build b SET status = {int(BuildStatus.COMPLETED)}, updated_at = %(now)s
    FROM held h WHERE b.derivation = h.derivation
    RETURNING b.derivation, h.status
    """,
)


class RepairScope(Enum):
    """Why a closure is repaired."""

    EVAL = "eval"  # its evaluation has reported everything


async def repair_build_graph(tx: Transaction, evaluation: int, scope: RepairScope) -> None:
    """Bring the closure of an evaluation to where the counters can take over."""
    assert scope is RepairScope.EVAL
    closure = await unfetchable_closure(tx, evaluation)
    if not closure:
        return
    await requeue_failed_closure(tx, evaluation, closure)
    await repair_cached_shared_builds_for_eval(tx, closure)
    await repair_dependency_failed(tx, evaluation, closure)
    await adopt_pending_closure(tx, evaluation)
    await promote_closure(tx, evaluation)


async def requeue_failed_closure(tx: Transaction, evaluation: int, closure: Collection[int]) -> None:
    """Back to Created with what failed before a person asked for it again, and with what failed only
    through that; and with what failed through something that is no failure any more."""
    rows = await tx.rows(REQUEUE_FAILED_CLOSURE, evaluation=evaluation, closure=ordered(closure), now=tx.now)
    changes = [BuildChange(i, BuildStatus(old), BuildStatus.CREATED) for i, old in rows]
    tx.moves.change(changes)
    thawed = [change.derivation for change in changes]
    # In full: the mark of a failed row means nothing, and may be of long ago.
    await update_and_settle_need(tx, thawed)
    await promote(tx, thawed)
    await skip_unwanted(tx, thawed)


async def repair_cached_shared_builds_for_eval(tx: Transaction, closure: Collection[int]) -> None:
    """Complete what waits though every output is in the cache, and let what needs it go on."""
    rows = await tx.rows(COMPLETE_CACHED, closure=ordered(closure), now=tx.now)
    changes = [BuildChange(i, BuildStatus(old), BuildStatus.COMPLETED) for i, old in rows]
    tx.moves.change(changes)
    held = [change.derivation for change in changes]
    if not held:
        return
    await became_fetchable(tx, await lock_shared_builds(tx, held), held)
    await update_and_settle_need(tx, held)
