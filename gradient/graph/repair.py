"""The repair pass over the closure of one evaluation. Layer: graph, run by the graph writer.

Counters queue a build the moment its conditions hold. What they cannot see is handled here: builds that
failed before and are asked for again, outputs that arrived without a build, builds named after what they
need had failed, and pruned subtrees that this evaluation never walked itself.

The steps run in the order of `repair_build_graph`, and none hides its failure: the first that fails takes
back the whole message.
Source: seeds "Waiting and Recovery" (Graph-Stuck Heal), "Queueing and Counters" (Dependency Failure, Build
Abort and Retry).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final

from gradient.graph.can_start import became_fetchable, promote, promote_closure
from gradient.graph.dependency_failure import repair_dependency_failed
from gradient.graph.locks import lock_shared_builds
from gradient.graph.moves import BuildChange
from gradient.graph.need import skip_unwanted, update_and_settle_need
from gradient.graph.predicates import (
    any_of,
    deterministic_failure,
    present_predicate,
    unassigned_predicate,
)
from gradient.graph.reachability import adopt_pending_closure, unfetchable_closure
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import CASCADE_TARGET, REQUEUEABLE, TERMINAL_FAILURE, BuildStatus

# What stays: the failures that are lasting here, what was aborted in the evaluation, and everything above
# either. At the end of a stream a failure is lasting when it came after the evaluation had begun, or when
# a task asks for what its own builder failed: that would be tried in vain with every commit. A stuck graph
# thaws whatever its builder has not failed.
REQUEUE_FAILED_CLOSURE: Final = Statement(
    "requeue_failed_closure",
    f"""
    WITH RECURSIVE failed AS MATERIALIZED (
        SELECT b.derivation, b.status, CASE
            WHEN %(unstick)s THEN {deterministic_failure("b")}
            ELSE b.updated_at >= v.created_at
                 OR (v.task IS NOT NULL AND NOT t.retry_failed_builds AND {deterministic_failure("b")})
            END AS stays
        FROM derivation_build b, evaluation v LEFT JOIN task t ON t.id = v.task
        WHERE b.derivation = ANY(%(closure)s) AND v.id = %(evaluation)s
          AND {any_of("b.status", TERMINAL_FAILURE)}
    ), lasting (derivation) AS (
        SELECT f.derivation FROM failed f
        WHERE f.status <> {int(BuildStatus.DEPENDENCY_FAILED)} AND f.stays
      UNION
        SELECT j.derivation FROM build_job j WHERE j.evaluation = %(evaluation)s AND j.aborted
      UNION
        SELECT above.derivation FROM lasting l, LATERAL (
            SELECT e.derivation FROM derivation_dependency e
            WHERE e.dependency = l.derivation OFFSET 0
        ) above
        WHERE (above.derivation IN (SELECT f.derivation FROM failed f
                                    WHERE f.status = {int(BuildStatus.DEPENDENCY_FAILED)})) IS TRUE
    )
    SELECT f.derivation FROM failed f WHERE f.derivation NOT IN (SELECT l.derivation FROM lasting l)
    """,
)
# Down from a DependencyFailed build through others that failed so, to the failures they failed through;
# then up again from those. `cause` marks what failed or was aborted itself.
RETRY_BUILD_CLOSURE: Final = Statement(
    "retry_build_closure",
    f"""
    WITH RECURSIVE closure (derivation) AS MATERIALIZED (
        SELECT unnest(%(closure)s::bigint[])
    ), below (derivation, passed) AS (
        SELECT b.derivation, b.status = {int(BuildStatus.DEPENDENCY_FAILED)} AND NOT b.cache_available
        FROM derivation_build b WHERE b.derivation = %(build)s
      UNION
        SELECT lower.* FROM below w, LATERAL (
            SELECT b.derivation, b.status = {int(BuildStatus.DEPENDENCY_FAILED)} AND NOT b.cache_available
            FROM derivation_dependency e
            JOIN derivation_build b ON b.derivation = e.dependency AND {any_of("b.status", REQUEUEABLE)}
            WHERE e.derivation = w.derivation AND w.passed OFFSET 0
        ) lower
    ), above (derivation, cause) AS (
        SELECT derivation, true FROM below WHERE NOT passed
      UNION
        SELECT higher.derivation, false FROM above a, LATERAL (
            SELECT b.derivation FROM derivation_dependency e
            JOIN derivation_build b ON b.derivation = e.derivation
            WHERE e.dependency = a.derivation AND b.status = {int(BuildStatus.DEPENDENCY_FAILED)} OFFSET 0
        ) higher
        WHERE (higher.derivation IN (SELECT i.derivation FROM closure i)) IS TRUE
    )
    SELECT derivation, bool_or(cause) FROM above GROUP BY derivation
    """,
)
THAW_FAILED: Final = Statement(
    "thaw_failed",
    f"""
    WITH failed AS (
        SELECT b.derivation, b.status FROM derivation_build b
        WHERE b.derivation = ANY(%(ids)s) AND {any_of("b.status", REQUEUEABLE)}
        ORDER BY b.derivation FOR NO KEY UPDATE
    )
    UPDATE derivation_build b
    SET status = {int(BuildStatus.CREATED)}, attempt = 0, updated_at = %(now)s
    FROM failed f WHERE b.derivation = f.derivation
    RETURNING b.derivation, f.status
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
    UNSTICK = "unstick"  # its evaluation waits, and nothing can be handed out
    RETRY = "retry"  # a person asked for a failed build again


async def repair_build_graph(
    tx: Transaction, evaluation: int, scope: RepairScope, retried: Collection[int] = ()
) -> None:
    """Bring the closure of an evaluation to where the counters can take over.

    In the scope RETRY exactly the failed builds in `retried` thaw, whatever failed them.
    """
    closure = await unfetchable_closure(tx, evaluation)
    if not closure:
        return
    if scope is RepairScope.RETRY:
        await thaw_failed(tx, retried)
    else:
        await requeue_failed_closure(tx, evaluation, closure, scope)
    await repair_cached_shared_builds_for_eval(tx, closure)
    await repair_dependency_failed(tx, evaluation, closure)
    await adopt_pending_closure(tx, evaluation)
    await promote_closure(tx, evaluation)


async def requeue_failed_closure(
    tx: Transaction, evaluation: int, closure: Collection[int], scope: RepairScope
) -> None:
    """Back to Created with what failed in a way that need not last, and with what failed only through
    that; and with what failed through something that is no failure any more."""
    unstick = scope is RepairScope.UNSTICK
    ids = await tx.ids(
        REQUEUE_FAILED_CLOSURE, evaluation=evaluation, closure=ordered(closure), unstick=unstick
    )
    await thaw_failed(tx, ids)


async def retry_closure(
    tx: Transaction, build: int, closure: Iterable[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """What a retry of `build` thaws: the failures themselves, and what failed through them in `closure`."""
    rows = await tx.rows(RETRY_BUILD_CLOSURE, build=build, closure=ordered(closure))
    causes = frozenset(derivation for derivation, cause in rows if cause)
    return causes, frozenset(derivation for derivation, _ in rows) - causes


async def thaw_failed(tx: Transaction, ids: Collection[int]) -> None:
    """Back to Created with failed and aborted builds, as if they had never been tried."""
    if not ids:
        return
    rows = await tx.rows(THAW_FAILED, ids=ordered(ids), now=tx.now)
    changes = [BuildChange(i, BuildStatus(old), BuildStatus.CREATED) for i, old in rows]
    tx.moves.change(changes)
    thawed = [change.derivation for change in changes]
    # In full: the mark of a failed row means nothing, and may be of long ago.
    await update_and_settle_need(tx, thawed)
    # Not left to the end of the repair pass, which queues what its evaluation names: that is not all of it.
    await promote(tx, thawed)
    await skip_unwanted(tx, thawed)


async def repair_cached_shared_builds_for_eval(tx: Transaction, closure: Collection[int]) -> None:
    """Complete what waits though every output is in the cache, and let what needs it go on."""
    rows = await tx.rows(COMPLETE_CACHED, closure=ordered(closure), now=tx.now)
    changes = [BuildChange(i, BuildStatus(old), BuildStatus.COMPLETED) for i, old in rows]
    tx.moves.change(changes)
    if changes:
        await advance_fetchable(tx, [change.derivation for change in changes])


async def advance_fetchable(tx: Transaction, completed: Collection[int]) -> None:
    """Let what needs these builds go on, which were completed without a job: they are fetchable where their
    closures are complete. What only they needed is needed no more."""
    await became_fetchable(tx, await lock_shared_builds(tx, completed), completed)
    await update_and_settle_need(tx, completed)
