"""Dependency failure: what needs a failed build fails with it, unless a cache has it. Layer: graph.

Source: seed "Queueing and Counters", Dependency Failure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gradient.graph.moves import BuildChange
from gradient.graph.need import need_after
from gradient.graph.predicates import any_of, non_passthrough_predicate
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import CASCADE_TARGET, TERMINAL_FAILURE, BuildStatus

_FAIL_ABOVE = f"""
    WITH RECURSIVE {{closure}}failed (derivation) AS (
        {{seeds}}
      UNION
        SELECT above.derivation FROM failed f, LATERAL (
            SELECT b.derivation FROM derivation_dependency e
            JOIN derivation_build b ON b.derivation = e.derivation
            WHERE e.dependency = f.derivation AND {any_of("b.status", CASCADE_TARGET)}
              AND {non_passthrough_predicate("b")} {{bound}} OFFSET 0
        ) above
    ), targets AS (
        SELECT b.derivation, b.status FROM failed f JOIN derivation_build b USING (derivation)
        WHERE {any_of("b.status", CASCADE_TARGET)} AND {non_passthrough_predicate("b")}
        ORDER BY b.derivation FOR NO KEY UPDATE OF b
    )
    UPDATE derivation_build b
    SET status = {int(BuildStatus.DEPENDENCY_FAILED)}, updated_at = %(now)s
    FROM targets t WHERE b.derivation = t.derivation
    RETURNING b.derivation, t.status
"""
CASCADE_DEPENDENCY_FAILED: Final = Statement(
    "cascade_dependency_failed",
    _FAIL_ABOVE.format(
        closure="",
        seeds="""SELECT above.derivation FROM derivation_dependency above
        WHERE above.dependency = ANY(%(failed)s)""",
        bound="",
    ),
)
# Within one closure, from every lasting failure and every build the evaluation aborted. The closure may be
# larger than what the evaluation names: a pruned subtree has its interior unnamed.
REPAIR_DEPENDENCY_FAILED: Final = Statement(
    "repair_dependency_failed",
    _FAIL_ABOVE.format(
        closure="closure (derivation) AS MATERIALIZED (SELECT unnest(%(closure)s::bigint[])), ",
        seeds=f"""SELECT e.derivation FROM closure c
        JOIN derivation_build x ON x.derivation = c.derivation
        LEFT JOIN build_job j ON j.evaluation = %(evaluation)s AND j.derivation = c.derivation
        JOIN derivation_dependency e ON e.dependency = c.derivation
        JOIN closure inside ON inside.derivation = e.derivation
        WHERE (j.aborted OR {any_of("x.status", TERMINAL_FAILURE)}) AND {non_passthrough_predicate("x")}""",
        bound="AND EXISTS (SELECT FROM closure i WHERE i.derivation = b.derivation)",
    ),
)


async def cascade_dependency_failed(tx: Transaction, failed: Collection[int]) -> None:
    """Mark everything that wants a freshly failed build, across evaluations."""
    await _apply(tx, await tx.rows(CASCADE_DEPENDENCY_FAILED, failed=ordered(failed), now=tx.now))


async def repair_dependency_failed(tx: Transaction, evaluation: int, closure: Collection[int]) -> None:
    """Repeat the walk within an evaluation's closure: catches builds named after their dependency failed."""
    rows = await tx.rows(
        REPAIR_DEPENDENCY_FAILED, evaluation=evaluation, closure=ordered(closure), now=tx.now
    )
    await _apply(tx, rows)


async def _apply(tx: Transaction, rows: list[tuple[int, int]]) -> None:
    changes = [BuildChange(i, BuildStatus(old), BuildStatus.DEPENDENCY_FAILED) for i, old in rows]
    tx.moves.change(changes)
    await need_after(tx, changes)
