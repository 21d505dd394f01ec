"""`missing_runtime_deps` and complete closures: what a NAR refers to must be in the cache too.

A shared build is complete when every output is present and its count is 0. Counts are seeded when a
NAR lands or runtime edges grow, and spread transitively in one SQL function call.
Source: seed "Queueing and Counters", Start Condition Columns.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs

from gradient.graph.locks import SharedBuildLock
from gradient.graph.predicates import present_predicate, runtime_edge, shared_build_complete_predicate
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered

COMPLETE_AMONG: Final = Statement(
    "complete_among",
    f"""
    SELECT b.derivation FROM derivation_build b
    WHERE b.derivation = ANY(%(ids)s) AND {shared_build_complete_predicate("b")}
    """,
)
# Rows of `fresh` count as missing on both sides; a dependency without a shared build is missing.
# Answers the rows that are complete by the new count.
SEED_MISSING_RUNTIME_DEPS: Final = Statement(
    "seed_missing_runtime_deps",
    f"""
    WITH counted AS (
        SELECT own.derivation, (
            SELECT count(*) FROM derivation_dependency e
            LEFT JOIN derivation_build x ON x.derivation = e.dependency
            WHERE e.derivation = own.derivation AND {runtime_edge("e")}
              AND (x.derivation IS NULL OR x.derivation = ANY(%(fresh)s)
                   OR NOT {shared_build_complete_predicate("x")})
        )::integer AS missing
        FROM unnest(%(ids)s::bigint[]) AS own (derivation)
    ), written AS (
        UPDATE derivation_build b SET missing_runtime_deps = c.missing FROM counted c
        WHERE b.derivation = c.derivation AND b.missing_runtime_deps <> c.missing
    )
    SELECT c.derivation FROM counted c WHERE c.missing = 0 AND {present_predicate("c.derivation")}
    """,
)
# For the consistency check: of rows that it found to be all whose count is wrong, those that are so now. Each
# stands on what is complete around them, and on what inside them turns out to be.
RECOUNT_MISSING_RUNTIME_DEPS: Final = Statement(
    "recount_missing_runtime_deps",
    f"""
    WITH RECURSIVE area AS MATERIALIZED (
        SELECT b.derivation AS id, {present_predicate("b.derivation")} AS present FROM derivation_build b
        WHERE b.derivation = ANY(%(ids)s)
    ), step AS MATERIALIZED (
        SELECT a.id AS above, e.dependency AS below,
               (e.dependency IN (SELECT o.id FROM area o)) IS TRUE AS inside,
               x.derivation IS NULL OR NOT {shared_build_complete_predicate("x")} AS incomplete
        FROM area a JOIN derivation_dependency e ON e.derivation = a.id AND {runtime_edge("e")}
        LEFT JOIN derivation_build x ON x.derivation = e.dependency
    ), incomplete (id) AS (
        (SELECT a.id FROM area a WHERE NOT a.present
         UNION SELECT s.above FROM step s WHERE NOT s.inside AND s.incomplete)
      UNION SELECT s.above FROM incomplete i JOIN step s ON s.below = i.id WHERE s.inside
    ), counted AS (
        SELECT s.above AS id, count(*)::integer AS missing
        FROM step s LEFT JOIN incomplete i ON i.id = s.below
        WHERE CASE WHEN s.inside THEN i.id IS NOT NULL ELSE s.incomplete END
        GROUP BY s.above
    ), wrong AS (
        SELECT b.derivation, coalesce(c.missing, 0) AS missing
        FROM area a JOIN derivation_build b ON b.derivation = a.id LEFT JOIN counted c ON c.id = a.id
        WHERE b.missing_runtime_deps <> coalesce(c.missing, 0)
        ORDER BY b.derivation LIMIT %(limit)s FOR NO KEY UPDATE OF b
    )
    UPDATE derivation_build b SET missing_runtime_deps = w.missing FROM wrong w
    WHERE b.derivation = w.derivation RETURNING b.derivation
    """,
)
RIPPLE_MISSING_RUNTIME_DEPS: Final = Statement(
    "ripple_missing_runtime_deps", "SELECT ripple_missing_runtime_deps(%(frontier)s, %(direction)s)"
)


@attrs.frozen
class Completeness:
    """Shared builds whose closure became complete, or stopped being so."""

    gained: frozenset[int]
    lost: frozenset[int]


async def complete_among(tx: Transaction, ids: Collection[int]) -> frozenset[int]:
    """Those of `ids` whose closure is complete right now."""
    return frozenset(await tx.ids(COMPLETE_AMONG, ids=ordered(ids))) if ids else frozenset()


async def seed_missing_runtime_deps(
    tx: Transaction, lock: SharedBuildLock, ids: Collection[int], complete_before: frozenset[int]
) -> Completeness:
    """Recount `ids` after their outputs landed or their runtime edges grew, and spread the flips.

    `complete_before` is `complete_among(ids)` as it was before the event: a row that was complete
    already is no transition, so committing a NAR again moves nothing.
    """
    lock.check(tx, ids)
    if not ids:
        return Completeness(frozenset(), frozenset())
    fresh = set(ids) - complete_before
    # One statement for all of them: every count is of the states before the event, fresh rows missing,
    # and each row that is otherwise now is a transition that the ripples carry to everything above it.
    complete_now = set(await tx.ids(SEED_MISSING_RUNTIME_DEPS, ids=ordered(ids), fresh=ordered(fresh)))
    broken = (set(ids) & complete_before) - complete_now
    complete = fresh & complete_now
    # Up before down: a row that a fresh one seems to complete may rest on one that broke.
    lost = await _spread(tx, broken, 1)
    return Completeness(gained=await _spread(tx, complete, -1), lost=lost)


async def lose_completeness(
    tx: Transaction, lock: SharedBuildLock, complete_before: frozenset[int]
) -> Completeness:
    """Spread that some of `complete_before` are complete no more, because outputs of theirs are gone.

    Nothing is counted again: a row's count is of what it refers to, which its own outputs do not move.
    """
    lock.check(tx, complete_before)
    lost = complete_before - await complete_among(tx, complete_before)
    return Completeness(gained=frozenset(), lost=await _spread(tx, lost, 1))


async def _spread(tx: Transaction, flipped: Collection[int], direction: int) -> frozenset[int]:
    if not flipped:
        return frozenset()
    beyond = await tx.ids(RIPPLE_MISSING_RUNTIME_DEPS, frontier=ordered(flipped), direction=direction)
    return frozenset((*flipped, *beyond))
