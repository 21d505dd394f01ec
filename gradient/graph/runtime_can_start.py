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


def count_missing_runtime_deps(derivation: str) -> str:
    """What `missing_runtime_deps` of this shared build must say."""
    return f"""(
        SELECT count(*)::integer FROM derivation_dependency e
        LEFT JOIN derivation_build x ON x.derivation = e.dependency
        WHERE e.derivation = {derivation} AND {runtime_edge("e")}
          AND (x.derivation IS NULL OR NOT {shared_build_complete_predicate("x")})
    )"""


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
# For the consistency check: absolute, and answered and locked only where the count was wrong; with whether
# the closure is complete by the old count and by the new one.
RECOUNT_MISSING_RUNTIME_DEPS: Final = Statement(
    "recount_missing_runtime_deps",
    f"""
    WITH counted AS (
        SELECT own.derivation, {count_missing_runtime_deps("own.derivation")} AS missing
        FROM unnest(%(ids)s::bigint[]) AS own (derivation)
    ), wrong AS (
        SELECT b.derivation, {shared_build_complete_predicate("b")} AS complete, c.missing FROM counted c
        JOIN derivation_build b USING (derivation)
        WHERE b.missing_runtime_deps <> c.missing ORDER BY b.derivation FOR NO KEY UPDATE OF b
    )
    UPDATE derivation_build b SET missing_runtime_deps = w.missing FROM wrong w
    WHERE b.derivation = w.derivation
    RETURNING b.derivation, w.complete, {shared_build_complete_predicate("b")}
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
