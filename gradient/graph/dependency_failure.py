"""Dependency failure: what wants a failed build fails with it, unless a cache has it. Layer: graph.

Source: seed "Queueing and Counters", Dependency Failure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gradient.graph.moves import BuildChange
from gradient.graph.need import need_after
from gradient.graph.predicates import any_of, non_passthrough_predicate, runtime_edge
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import CASCADE_TARGET, TERMINAL_FAILURE, TERMINAL_SUCCESS, BuildStatus

# Up from the failed builds, over every edge into what waits for its dependencies. What is built already
# does not fail; where its own closure lacks the failed one, what waits for that closure fails all the same.
_FAIL_ABOVE = f"""
    WITH RECURSIVE {{closure}}doomed (derivation) AS (
        {{seeds}}
      UNION
        SELECT above.derivation FROM doomed f, LATERAL (
            SELECT b.derivation FROM derivation_dependency e
            JOIN derivation_build b ON b.derivation = e.derivation
            WHERE e.dependency = f.derivation AND {non_passthrough_predicate("b")}
              AND ({any_of("b.status", CASCADE_TARGET)}
                   OR ({any_of("b.status", TERMINAL_SUCCESS)} AND NOT b.fetchable AND {runtime_edge("e")}))
            OFFSET 0
        ) above {{bound}}
    ), targets AS (
        SELECT b.derivation, b.status FROM derivation_build b
        WHERE b.derivation = ANY(ARRAY(SELECT derivation FROM doomed))
          AND {any_of("b.status", CASCADE_TARGET)}
        ORDER BY b.derivation FOR NO KEY UPDATE OF b
    )
    UPDATE derivation_build b
    SET status = {int(BuildStatus.DEPENDENCY_FAILED)}, updated_at = %(now)s
    FROM targets t WHERE b.derivation = t.derivation
    RETURNING b.derivation, t.status
"""
CASCADE_DEPENDENCY_FAILED: Final = Statement(
    "cascade_dependency_failed",
    _FAIL_ABOVE.format(closure="", seeds="SELECT unnest(%(failed)s::bigint[])", bound=""),
)
# Within one closure, from every lasting failure and every build the evaluation aborted. The closure may be
# larger than what the evaluation names: a pruned subtree has its interior unnamed. A passthrough that could
# not be fetched for good is a failure like any other, and an abort counts until the build is wanted again.
REPAIR_DEPENDENCY_FAILED: Final = Statement(
    "repair_dependency_failed",
    _FAIL_ABOVE.format(
        closure="closure (derivation) AS MATERIALIZED (SELECT unnest(%(closure)s::bigint[])), ",
        seeds=f"""SELECT x.derivation FROM closure JOIN derivation_build x USING (derivation)
        LEFT JOIN build_job j ON j.evaluation = %(evaluation)s AND j.derivation = x.derivation
        WHERE (j.aborted AND x.status = {int(BuildStatus.ABORTED)})
           OR {any_of("x.status", TERMINAL_FAILURE)}""",
        # Outside of LATERAL, and IS TRUE: one hash table for the whole walk.
        bound="WHERE (above.derivation IN (SELECT i.derivation FROM closure i)) IS TRUE",
    ),
)


async def cascade_dependency_failed(tx: Transaction, failed: Collection[int]) -> None:
    """Mark everything that wants a freshly failed build, across evaluations."""
    await _apply(tx, await tx.rows(CASCADE_DEPENDENCY_FAILED, failed=ordered(failed), now=tx.now))


async def repair_dependency_failed(tx: Transaction, evaluation: int, closure: Collection[int]) -> list[int]:
    """Repeat the walk within an evaluation's closure: catches builds named after their dependency failed,
    and what wants a build that was aborted in it. Returns what failed."""
    rows = await tx.rows(
        REPAIR_DEPENDENCY_FAILED, evaluation=evaluation, closure=ordered(closure), now=tx.now
    )
    return await _apply(tx, rows)


async def _apply(tx: Transaction, rows: list[tuple[int, int]]) -> list[int]:
    changes = [BuildChange(i, BuildStatus(old), BuildStatus.DEPENDENCY_FAILED) for i, old in rows]
    tx.moves.change(changes)
    await need_after(tx, changes)
    return [change.derivation for change in changes]
