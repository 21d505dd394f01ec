"""What an evaluation names, and what it reaches without naming it. Layer: graph.

A worker's walk stops at derivations the graph knows completely, so an evaluation names the top of such a
subtree only. Its interior belongs to whoever walked it, until it is adopted.
Source: seed "Queueing and Counters", Naming and Adoption.
"""

from __future__ import annotations

from typing import Final

from gradient.graph.need import open_closure_cte_body, update_and_settle_need
from gradient.graph.predicates import (
    blocks_evaluation,
    non_passthrough_predicate,
    open_predicate,
    runtime_edge,
)
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction

EVAL_BLOCKED: Final = Statement(
    "eval_blocked",
    f"""
    SELECT EXISTS (SELECT FROM build_job j JOIN derivation_build b ON b.derivation = j.derivation
                   WHERE j.evaluation = %(evaluation)s AND {blocks_evaluation("b")})
    """,
)
# Failed rows too, which the open walk of need does not enter.
UNFETCHABLE_CLOSURE: Final = Statement(
    "unfetchable_closure",
    f"""
    WITH RECURSIVE closure (derivation) AS (
        SELECT b.derivation FROM build_job j JOIN derivation_build b ON b.derivation = j.derivation
        WHERE j.evaluation = %(evaluation)s AND NOT b.fetchable
      UNION
        SELECT below.derivation FROM closure c, LATERAL (
            SELECT b.derivation FROM derivation_build x
            JOIN derivation_dependency e ON e.derivation = x.derivation
                 AND ({runtime_edge("e")} OR {non_passthrough_predicate("x")})
            JOIN derivation_build b ON b.derivation = e.dependency AND NOT b.fetchable
            WHERE x.derivation = c.derivation OFFSET 0
        ) below
    )
    SELECT derivation FROM closure
    """,
)
ADOPT_PENDING_CLOSURE: Final = Statement(
    "adopt_pending_closure",
    f"""
    WITH RECURSIVE reached (derivation) AS (
        {
        open_closure_cte_body(
            f'''SELECT b.derivation FROM build_job j JOIN derivation_build b ON b.derivation = j.derivation
            WHERE j.evaluation = %(evaluation)s AND b.wanted AND {open_predicate("b")}''',
            into="AND b.wanted",
        )
    }
    )
    INSERT INTO build_job (evaluation, derivation, created_at)
    SELECT %(evaluation)s, derivation, %(now)s FROM reached ORDER BY derivation
    ON CONFLICT (evaluation, derivation) DO NOTHING
    RETURNING derivation
    """,
)


async def eval_blocked(tx: Transaction, evaluation: int) -> bool:
    """Whether any named shared build still keeps the evaluation waiting: confirms a counter's zero."""
    return bool(await tx.value(EVAL_BLOCKED, evaluation=evaluation))


async def unfetchable_closure(tx: Transaction, evaluation: int) -> list[int]:
    """Every shared build below the names of an evaluation that is not fetchable, failed ones included.
    Below what an upstream cache serves only what that refers to."""
    return await tx.ids(UNFETCHABLE_CLOSURE, evaluation=evaluation)


async def adopt_pending_closure(tx: Transaction, evaluation: int) -> None:
    """Name for the evaluation every wanted shared build its names still wait for."""
    adopted = await tx.ids(ADOPT_PENDING_CLOSURE, evaluation=evaluation, now=tx.now)
    if adopted:
        tx.moves.progressed.add(evaluation)
        await update_and_settle_need(tx, adopted, only_gains=True)
