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
from gradient.graph.predicates import RUNTIME_EDGE, present_predicate, shared_build_complete_predicate
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
            WHERE e.derivation = own.derivation AND {RUNTIME_EDGE}
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
    was_complete = ordered(set(ids) & complete_before)
    fresh = ordered(set(ids) - complete_before)
    lost: set[int] = set()
    if was_complete:
        # Fresh rows count as missing here too; those that turn out complete ripple back down below.
        still = await tx.ids(SEED_MISSING_RUNTIME_DEPS, ids=was_complete, fresh=fresh)
        broken = ordered(set(was_complete) - set(still))
        if broken:
            lost = {*broken, *await tx.ids(RIPPLE_MISSING_RUNTIME_DEPS, frontier=broken, direction=1)}
    gained: set[int] = set()
    if fresh:
        complete = ordered(await tx.ids(SEED_MISSING_RUNTIME_DEPS, ids=fresh, fresh=fresh))
        if complete:
            gained = {*complete, *await tx.ids(RIPPLE_MISSING_RUNTIME_DEPS, frontier=complete, direction=-1)}
    return Completeness(frozenset(gained), frozenset(lost))
