"""`fetchable`, `blocking_deps` and the queue: when a shared build may start. Layer: graph.

A flag change returns exactly the rows it changed, and only those spread; the spread is one hop.
Reaching zero queues a waiting build and never makes that build fetchable.
Source: seed "Queueing and Counters", Start Condition Columns, Queueing Events, Queued Invariant.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs

from gradient.graph.locks import SharedBuildLock, lock_shared_builds
from gradient.graph.moves import BuildChange
from gradient.graph.predicates import (
    any_of,
    fetchable_predicate,
    gates_predicate,
    held_predicate,
    promotable_predicate,
    unassigned_predicate,
)
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import TERMINAL_SUCCESS, BuildStatus

# Of a dependency. A look at each: as a join, a young database would read all builds for each derivation.
_FETCHABLE: Final = """coalesce((SELECT x.fetchable FROM derivation_build x
                                WHERE x.derivation = e.dependency), false)"""
# As it will be, of the rows that a repair is about to flip.
_FETCHABLE_THEN: Final = f"""(({_FETCHABLE} OR e.dependency = ANY(%(became)s))
                             AND e.dependency <> ALL(%(lost)s))"""


def count_blocking_deps(derivation: str, fetchable: str = _FETCHABLE) -> str:
    """What `blocking_deps` of this shared build must say. A dependency without a shared build blocks."""
    return f"""(
        SELECT count(*)::integer FROM derivation_dependency e
        WHERE e.derivation = {derivation} AND NOT {fetchable}
    )"""


# What our cache holds already, with everything it refers to, is not built again: what waits for its turn,
# or was not needed until now, is Substituted as it is marked. A job that is out finishes undisturbed.
BECAME_FETCHABLE: Final = Statement(
    "became_fetchable",
    f"""
    WITH complete AS (
        SELECT b.derivation, b.status, {any_of("b.status", TERMINAL_SUCCESS)} AS done
        FROM derivation_build b
        WHERE b.derivation = ANY(%(ids)s) AND NOT b.fetchable
              AND ({fetchable_predicate("b")} OR {held_predicate("b")})
        ORDER BY b.derivation FOR NO KEY UPDATE
    )
    UPDATE derivation_build b
    SET fetchable = true, substituted = b.substituted OR NOT c.done,
        status = CASE WHEN c.done THEN c.status ELSE {int(BuildStatus.SUBSTITUTED)} END,
        updated_at = CASE WHEN c.done THEN b.updated_at ELSE %(now)s END
    FROM complete c WHERE b.derivation = c.derivation
    RETURNING b.derivation, c.status, b.status
    """,
)
LOST_FETCHABILITY: Final = Statement(
    "lost_fetchability",
    f"""
    UPDATE derivation_build b SET fetchable = false
    WHERE b.derivation = ANY(%(ids)s) AND b.fetchable AND NOT {fetchable_predicate("b")}
    RETURNING b.derivation
    """,
)
# One hop: every row above `flipped`, locked in order; returns those that nothing blocks any more.
RIPPLE_DOWN: Final = Statement(
    "ripple_down",
    """
    WITH moved AS (
        SELECT e.derivation, count(*)::integer AS edges FROM derivation_dependency e
        WHERE e.dependency = ANY(%(flipped)s) GROUP BY e.derivation
    ), locked AS (
        SELECT b.derivation FROM derivation_build b JOIN moved m ON m.derivation = b.derivation
        ORDER BY b.derivation FOR NO KEY UPDATE OF b
    ), written AS (
        UPDATE derivation_build b SET blocking_deps = b.blocking_deps - m.edges
        FROM moved m JOIN locked l ON l.derivation = m.derivation
        WHERE b.derivation = m.derivation RETURNING b.derivation, b.blocking_deps
    )
    SELECT derivation FROM written WHERE blocking_deps = 0
    """,
)
# The way back also takes Queued rows without an assignment out of the queue, in the same statement.
RIPPLE_UP: Final = Statement(
    "ripple_up",
    f"""
    WITH moved AS (
        SELECT e.derivation, count(*)::integer AS edges FROM derivation_dependency e
        WHERE e.dependency = ANY(%(flipped)s) GROUP BY e.derivation
    ), locked AS (
        SELECT b.derivation, b.status AS before FROM derivation_build b
        JOIN moved m ON m.derivation = b.derivation
        ORDER BY b.derivation FOR NO KEY UPDATE OF b
    ), written AS (
        UPDATE derivation_build b
        SET blocking_deps = b.blocking_deps + m.edges,
            status = CASE WHEN b.status = {int(BuildStatus.QUEUED)} AND NOT b.cache_available
                          AND {unassigned_predicate("b")} THEN {int(BuildStatus.CREATED)} ELSE b.status END
        FROM moved m JOIN locked l ON l.derivation = m.derivation
        WHERE b.derivation = m.derivation RETURNING b.derivation, l.before, b.status AS after
    )
    SELECT derivation FROM written WHERE before <> after
    """,
)
# Absolute, over the stored column: the flips of this transaction that follow spread from there.
SEED_BLOCKING_DEPS: Final = Statement(
    "seed_blocking_deps",
    f"""
    UPDATE derivation_build b SET blocking_deps = counted.blocking FROM (
        SELECT own.derivation, {count_blocking_deps("own.derivation")} AS blocking
        FROM unnest(%(ids)s::bigint[]) AS own (derivation)
    ) counted
    WHERE b.derivation = counted.derivation AND b.blocking_deps <> counted.blocking
    """,
)
# Edges that are new among those of their rows, which have counted the others.
ADD_BLOCKING_DEPS: Final = Statement(
    "add_blocking_deps",
    f"""
    UPDATE derivation_build b SET blocking_deps = b.blocking_deps + more.blocking FROM (
        SELECT e.derivation, count(*)::integer AS blocking
        FROM unnest(%(derivations)s::bigint[], %(dependencies)s::bigint[]) AS e (derivation, dependency)
        WHERE NOT {_FETCHABLE} GROUP BY e.derivation
    ) more
    WHERE b.derivation = more.derivation
    RETURNING b.derivation
    """,
)
# For the consistency check, which comes without the transition: it answers, and locks, only the rows whose
# count is wrong, or will be once `became` are fetchable and `lost` are not.
RECOUNT_BLOCKING_DEPS: Final = Statement(
    "recount_blocking_deps",
    f"""
    WITH counted AS (
        SELECT own.derivation, {count_blocking_deps("own.derivation", _FETCHABLE_THEN)} AS blocking
        FROM unnest(%(ids)s::bigint[]) AS own (derivation)
    ), wrong AS (
        SELECT b.derivation, c.blocking FROM counted c JOIN derivation_build b USING (derivation)
        WHERE b.blocking_deps <> c.blocking ORDER BY b.derivation FOR NO KEY UPDATE OF b
    )
    UPDATE derivation_build b SET blocking_deps = w.blocking FROM wrong w WHERE b.derivation = w.derivation
    RETURNING b.derivation
    """,
)
FETCHABLE_FLIPS: Final = Statement(
    "fetchable_flips",
    f"""
    SELECT b.derivation, b.fetchable FROM derivation_build b
    WHERE b.derivation = ANY(%(ids)s) AND b.fetchable <> ({fetchable_predicate("b")} OR {held_predicate("b")})
    """,
)
DIRECTLY_ABOVE: Final = Statement(
    "directly_above",
    "SELECT DISTINCT derivation FROM derivation_dependency WHERE dependency = ANY(%(ids)s)",
)
PROMOTE: Final = Statement(
    "promote",
    f"""
    UPDATE derivation_build b
    SET status = {int(BuildStatus.QUEUED)}, queued_at = %(now)s, updated_at = %(now)s
    FROM derivation d
    WHERE b.derivation = ANY(%(ids)s) AND d.id = b.derivation AND {promotable_predicate("b", "d")}
    RETURNING b.derivation
    """,
)
UNPROMOTE_UNGATED: Final = Statement(
    "unpromote_ungated",
    f"""
    UPDATE derivation_build b SET status = {int(BuildStatus.CREATED)}, updated_at = %(now)s
    FROM derivation d
    WHERE b.derivation = ANY(%(ids)s) AND d.id = b.derivation AND b.status = {int(BuildStatus.QUEUED)}
      AND NOT {gates_predicate("b", "d")} AND {unassigned_predicate("b")}
    RETURNING b.derivation
    """,
)
PROMOTE_CLOSURE: Final = Statement(
    "promote_closure",
    f"""
    WITH ready AS (
        SELECT promotable.derivation FROM build_job named, LATERAL (
            SELECT b.derivation FROM derivation_build b JOIN derivation d ON d.id = b.derivation
            WHERE b.derivation = named.derivation AND {promotable_predicate("b", "d")} OFFSET 0
        ) promotable
        WHERE named.evaluation = %(evaluation)s
    )
    UPDATE derivation_build b
    SET status = {int(BuildStatus.QUEUED)}, queued_at = %(now)s, updated_at = %(now)s
    FROM ready WHERE b.derivation = ready.derivation
    RETURNING b.derivation
    """,
)


async def became_fetchable(tx: Transaction, lock: SharedBuildLock, ids: Collection[int]) -> list[int]:
    """Mark those of `ids` that are successes with a complete closure, or need no build because theirs is
    complete already; lower `blocking_deps` above them, and queue what nothing blocks any more. Returns the
    rows that flipped: an update of the need below those that were not successes is due."""
    lock.check(tx, ids)
    flipped = await _mark_fetchable(tx, ids)
    if flipped:
        await promote(tx, await tx.ids(RIPPLE_DOWN, flipped=flipped))
    return flipped


async def _mark_fetchable(tx: Transaction, ids: Collection[int]) -> list[int]:
    rows = await tx.rows(BECAME_FETCHABLE, ids=ordered(ids), now=tx.now)
    tx.moves.change(BuildChange(i, BuildStatus(old), BuildStatus(new)) for i, old, new in rows if old != new)
    return [i for i, _, _ in rows]


async def clear_fetchable(tx: Transaction, lock: SharedBuildLock, ids: Collection[int]) -> list[int]:
    """Clear the mark of those of `ids` it holds for no more, raise `blocking_deps` above them and take
    Queued ones without an assignment out of the queue. Returns the rows that flipped: they want again what
    they refer to, so this is for `need.lost_fetchability` alone."""
    lock.check(tx, ids)
    flipped = await tx.ids(LOST_FETCHABILITY, ids=ordered(ids))
    if flipped:
        demoted = await tx.ids(RIPPLE_UP, flipped=flipped)
        tx.moves.change(BuildChange(i, BuildStatus.QUEUED, BuildStatus.CREATED) for i in demoted)
    return flipped


async def seed_blocking_deps(tx: Transaction, lock: SharedBuildLock, ids: Collection[int]) -> None:
    """Count the direct dependencies that are not fetchable, for rows whose edges are new."""
    lock.check(tx, ids)
    if ids:
        await tx.run(SEED_BLOCKING_DEPS, ids=ordered(ids))


async def add_blocking_deps(
    tx: Transaction, lock: SharedBuildLock, edges: Collection[tuple[int, int]]
) -> list[int]:
    """Count new edges (derivation, dependency) to what is not fetchable; the rows that wait for more now."""
    lock.check(tx, (above for above, _ in edges))
    if not edges:
        return []
    above, below = ([edge[side] for edge in edges] for side in (0, 1))
    return await tx.ids(ADD_BLOCKING_DEPS, derivations=above, dependencies=below)


async def promote(tx: Transaction, ids: Collection[int]) -> list[int]:
    """Queue those of `ids` whose queue conditions hold: `ids` is only a bound."""
    if not ids:
        return []
    queued = await tx.ids(PROMOTE, ids=ordered(ids), now=tx.now)
    tx.moves.change(BuildChange(i, BuildStatus.CREATED, BuildStatus.QUEUED) for i in queued)
    return queued


async def promote_closure(tx: Transaction, evaluation: int) -> list[int]:
    """Queue everything an evaluation names whose queue conditions hold."""
    queued = await tx.ids(PROMOTE_CLOSURE, evaluation=evaluation, now=tx.now)
    tx.moves.change(BuildChange(i, BuildStatus.CREATED, BuildStatus.QUEUED) for i in queued)
    return queued


async def unpromote_ungated(tx: Transaction, ids: Collection[int]) -> list[int]:
    """Take those of `ids` out of the queue whose queue conditions no longer hold, unless assigned."""
    if not ids:
        return []
    demoted = await tx.ids(UNPROMOTE_UNGATED, ids=ordered(ids), now=tx.now)
    tx.moves.change(BuildChange(i, BuildStatus.QUEUED, BuildStatus.CREATED) for i in demoted)
    return demoted


@attrs.frozen
class CanStartRepair:
    """What the consistency check had to mend: rows with a wrong counter, or out of place in the queue."""

    counters: tuple[int, ...]
    unqueued: tuple[int, ...]
    queued: tuple[int, ...]


async def repair_fetchable(tx: Transaction, ids: Collection[int]) -> frozenset[int]:
    """Write `fetchable` of `ids` as its predicate says; returns the rows it was wrong on.

    What stands above counts afresh instead of moving by one: nobody knows whether the lost transition had
    spread. That is read before anything is locked, because there may be a hundred thousand of them. The
    need below the answer is due.
    """
    flips = await tx.rows(FETCHABLE_FLIPS, ids=ordered(ids))
    became, lost = ([i for i, was in flips if was is before] for before in (False, True))
    above = await tx.ids(DIRECTLY_ABOVE, ids=[*became, *lost])
    counters = await tx.ids(RECOUNT_BLOCKING_DEPS, ids=above, became=became, lost=lost)
    await lock_shared_builds(tx, ids)
    cleared = await tx.ids(LOST_FETCHABILITY, ids=ordered(ids))
    marked = await _mark_fetchable(tx, ids)
    await unpromote_ungated(tx, counters)
    await promote(tx, counters)
    return frozenset((*cleared, *marked))


async def repair_can_start(tx: Transaction, ids: Collection[int]) -> CanStartRepair:
    """The backstop for a lost move: recount `blocking_deps` of `ids`, take out of the queue what must not
    start, then queue what may."""
    counters = await tx.ids(RECOUNT_BLOCKING_DEPS, ids=ordered(ids), became=[], lost=[])
    unqueued = await unpromote_ungated(tx, ids)
    queued = await promote(tx, ids)
    return CanStartRepair(tuple(counters), tuple(unqueued), tuple(queued))
