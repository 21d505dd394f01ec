"""What an evaluation names, and what it reaches without naming it. Layer: graph.

A worker's walk stops at derivations the graph knows completely, so an evaluation names the top of such a
subtree only. Its interior belongs to whoever walked it, until it is adopted.
Source: seed "Queueing and Counters", Naming and Adoption.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gradient.graph.can_start import promote
from gradient.graph.need import open_closure_cte_body, settle_aborted, update_and_settle_need
from gradient.graph.pg import Connection, fetch_value
from gradient.graph.predicates import (
    blocks_evaluation,
    live_evaluation,
    non_passthrough_predicate,
    open_predicate,
    runtime_edge,
    steps_over,
)
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction

# The names of every live evaluation, and from each one step of the open walk down, to a wanted row. Looked up
# name by name, and what is named already taken off at the end: nobody can estimate how little is left then.
_BELOW_LIVE_NAMES = f"""
    named AS MATERIALIZED (
        SELECT j.evaluation, j.derivation FROM evaluation v JOIN build_job j ON j.evaluation = v.id
        WHERE {live_evaluation("v")}
    ), below_names AS (
        SELECT named.evaluation, below.derivation FROM named, LATERAL (
            SELECT b.derivation FROM derivation_build x JOIN derivation xd ON xd.id = x.derivation
            JOIN derivation_dependency e ON e.derivation = x.derivation AND {steps_over("e", "x", "xd")}
            JOIN derivation_build b ON b.derivation = e.dependency AND b.wanted AND {open_predicate("b")}
            WHERE x.derivation = named.derivation AND x.wanted AND {open_predicate("x")} OFFSET 0
        ) below
    )
"""
# Looked up name by name: whoever hopes to meet a blocking row early reads a whole table when there is none.
EVAL_BLOCKED: Final = Statement(
    "eval_blocked",
    f"""
    WITH named AS MATERIALIZED (SELECT derivation FROM build_job WHERE evaluation = %(evaluation)s)
    SELECT EXISTS (SELECT FROM named, LATERAL (
        SELECT FROM derivation_build b
        WHERE b.derivation = named.derivation AND {blocks_evaluation("b")} OFFSET 0) blocking)
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
PENDING_ORPHAN_FRONTIER: Final = Statement(
    "pending_orphan_frontier",
    f"""
    WITH {_BELOW_LIVE_NAMES}
    SELECT EXISTS (SELECT derivation FROM below_names EXCEPT SELECT derivation FROM named)
    """,
)
# The open walk from every name of every live evaluation, as far as it leads to what is not named by it: a
# named row starts a walk of its own.
UNNAMED_CLOSURES: Final = Statement(
    "unnamed_closures",
    f"""
    WITH RECURSIVE {_BELOW_LIVE_NAMES}, unnamed AS MATERIALIZED (
        SELECT evaluation, derivation FROM below_names EXCEPT SELECT evaluation, derivation FROM named
    ), reached (evaluation, derivation) AS (
        {
        open_closure_cte_body(
            "SELECT evaluation, derivation FROM unnamed",
            into='''AND b.wanted AND NOT EXISTS (SELECT FROM build_job n
                WHERE n.evaluation = reached.evaluation AND n.derivation = b.derivation)''',
            carried="evaluation",
        )
    }
    )
    SELECT evaluation, derivation FROM reached LIMIT %(limit)s
    """,
)
ADOPT_PENDING: Final = Statement(
    "adopt_pending",
    f"""
    INSERT INTO build_job (evaluation, derivation, created_at)
    SELECT v.id, b.derivation, %(now)s
    FROM unnest(%(evaluations)s::bigint[], %(ids)s::bigint[]) AS p (evaluation, derivation)
    JOIN evaluation v ON v.id = p.evaluation AND {live_evaluation("v")}
    JOIN derivation_build b ON b.derivation = p.derivation AND b.wanted AND {open_predicate("b")}
    ORDER BY v.id, b.derivation
    ON CONFLICT (evaluation, derivation) DO NOTHING
    RETURNING evaluation, derivation
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
        await settle_aborted(tx, adopted)


async def pending_orphan_frontier(connection: Connection) -> bool:
    """Whether a wanted shared build that no live evaluation names stands one step below one that is named."""
    return bool(await fetch_value(connection, PENDING_ORPHAN_FRONTIER))


async def adopt_pending_closures(tx: Transaction) -> int:
    """Name for every live evaluation every wanted shared build its names still wait for; how many names
    that were. Worth a walk only once `pending_orphan_frontier` finds something, or when a name of an open
    build was deleted."""
    return await adopt_pending(tx, await tx.rows(UNNAMED_CLOSURES, limit=None))


async def adopt_pending(tx: Transaction, names: Collection[tuple[int, int]]) -> int:
    """Name shared builds for evaluations, as (evaluation, derivation), where one still waits for the other;
    queue those that waited for a name. Returns how many names are new."""
    if not names:
        return 0
    evaluations, ids = zip(*names, strict=True)
    rows = await tx.rows(ADOPT_PENDING, evaluations=list(evaluations), ids=list(ids), now=tx.now)
    tx.moves.progressed.update(evaluation for evaluation, _ in rows)
    adopted = {derivation for _, derivation in rows}
    await update_and_settle_need(tx, adopted, only_gains=True)
    await settle_aborted(tx, adopted)
    await promote(tx, adopted)
    return len(rows)
