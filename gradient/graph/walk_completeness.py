"""`derivation.unwalked_inputs`: how far the walk of a derivation's subtree has come. Layer: graph.

A subtree is recorded when the derivation is walked and its count is 0; the worker's walk stops there.
Source: seed "Queueing and Counters", Walk Completeness.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gradient.graph.can_start import unpromote_ungated
from gradient.graph.need import update_and_settle_need
from gradient.graph.predicates import any_of, build_edge, recorded_predicate
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import EVALUATION_RUNNING


def count_unwalked_inputs(derivation: str) -> str:
    """What `unwalked_inputs` of this derivation must say."""
    return f"""(
        SELECT count(*)::integer FROM derivation_dependency e JOIN derivation i ON i.id = e.dependency
        WHERE e.derivation = {derivation} AND {build_edge("e")} AND NOT {recorded_predicate("i")}
    )"""


# One hop, to what earlier batches have recorded: `fresh` has counted already.
SPREAD_RECORDED: Final = Statement(
    "spread_recorded",
    f"""
    WITH moved AS (
        SELECT e.derivation, count(*)::integer AS edges FROM derivation_dependency e
        WHERE e.dependency = ANY(%(recorded)s) AND {build_edge("e")}
          AND e.derivation NOT IN (SELECT unnest(%(fresh)s::bigint[]))
        GROUP BY e.derivation
    ), locked AS (
        SELECT d.id FROM derivation d JOIN moved m ON m.derivation = d.id
        ORDER BY d.id FOR NO KEY UPDATE OF d
    ), written AS (
        UPDATE derivation d SET unwalked_inputs = d.unwalked_inputs - m.edges
        FROM moved m JOIN locked l ON l.id = m.derivation
        WHERE d.id = m.derivation RETURNING d.id, d.walked, d.unwalked_inputs
    )
    SELECT id FROM written WHERE walked AND unwalked_inputs = 0
    """,
)
RIPPLE_UNWALKED_INPUTS: Final = Statement(
    "ripple_unwalked_inputs", "SELECT ripple_unwalked_inputs(%(frontier)s, %(direction)s)"
)
# For the consistency check: of rows that it found to be all whose count is wrong, those that are so now. Each
# stands on what is recorded around them, and on what inside them turns out to be.
RECOUNT_UNWALKED_INPUTS: Final = Statement(
    "recount_unwalked_inputs",
    f"""
    WITH RECURSIVE area AS MATERIALIZED (
        SELECT d.id, d.walked FROM derivation d WHERE d.id = ANY(%(ids)s)
    ), step AS MATERIALIZED (
        SELECT a.id AS above, i.id AS below, (i.id IN (SELECT o.id FROM area o)) IS TRUE AS inside,
               NOT {recorded_predicate("i")} AS unrecorded
        FROM area a JOIN derivation_dependency e ON e.derivation = a.id AND {build_edge("e")}
        JOIN derivation i ON i.id = e.dependency
    ), unrecorded (id) AS (
        (SELECT a.id FROM area a WHERE NOT a.walked
         UNION SELECT s.above FROM step s WHERE NOT s.inside AND s.unrecorded)
      UNION SELECT s.above FROM unrecorded u JOIN step s ON s.below = u.id WHERE s.inside
    ), counted AS (
        SELECT s.above AS id, count(*)::integer AS unwalked
        FROM step s LEFT JOIN unrecorded u ON u.id = s.below
        WHERE CASE WHEN s.inside THEN u.id IS NOT NULL ELSE s.unrecorded END
        GROUP BY s.above
    ), wrong AS (
        SELECT d.id, coalesce(c.unwalked, 0) AS unwalked
        FROM area a JOIN derivation d ON d.id = a.id LEFT JOIN counted c ON c.id = a.id
        WHERE d.unwalked_inputs <> coalesce(c.unwalked, 0)
        ORDER BY d.id LIMIT %(limit)s FOR NO KEY UPDATE OF d
    )
    UPDATE derivation d SET unwalked_inputs = w.unwalked FROM wrong w WHERE d.id = w.id RETURNING d.id
    """,
)
UNWALK_DERIVATIONS: Final = Statement(
    "unwalk_derivations",
    """
    WITH locked AS (
        SELECT d.id FROM derivation d WHERE d.id = ANY(%(ids)s) AND d.walked
        ORDER BY d.id FOR NO KEY UPDATE
    )
    UPDATE derivation d SET walked = false FROM locked l WHERE d.id = l.id
    RETURNING d.id, d.unwalked_inputs = 0
    """,
)
# A walk that is under way has perhaps reported this one, or stopped above it as known.
LOSE_WALKS: Final = Statement(
    "lose_walks",
    f"""
    UPDATE evaluation SET walk_lost = true
    WHERE {any_of("status", EVALUATION_RUNNING)} AND NOT walk_lost
    """,
)


async def spread_recorded(tx: Transaction, recorded: Collection[int], fresh: Collection[int]) -> None:
    """Spread that stubs of earlier batches are `recorded` now, however deep, to what is not of `fresh`."""
    if not recorded:
        return
    complete = await tx.ids(SPREAD_RECORDED, recorded=ordered(recorded), fresh=ordered(fresh))
    if complete:
        await tx.rows(RIPPLE_UNWALKED_INPUTS, frontier=ordered(complete), direction=-1)


async def unwalk_derivations(tx: Transaction, ids: Collection[int]) -> list[int]:
    """Forget that these were walked, so that the next walk reports them again; returns those that were.

    Everything above them is not completely recorded any more. They can neither start nor need their inputs
    until they are walked again: nothing that somebody waits for may be among them.
    """
    rows = await tx.rows(UNWALK_DERIVATIONS, ids=ordered(ids)) if ids else []
    if not rows:
        return []
    unwalked = ordered(i for i, _ in rows)
    complete = ordered(i for i, was_complete in rows if was_complete)
    if complete:
        await tx.rows(RIPPLE_UNWALKED_INPUTS, frontier=complete, direction=1)
    await tx.run(LOSE_WALKS)
    await unpromote_ungated(tx, unwalked)
    await update_and_settle_need(tx, unwalked)
    return unwalked
