"""Retiring cached paths: their rows go, and everything that rested on them moves back. Layer: graph.

The object of a retired path is removed later, by who makes sure that no upload of the path is on its way:
`retired_nar` keeps what is still to be removed, so that a crash in between leaves nothing behind.
Source: seed "Queueing and Counters" (Callers of update_need, Queued Invariant).
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Final

import attrs

from gradient.graph.can_start import promote, unpromote_ungated
from gradient.graph.locks import lock_shared_builds, proven
from gradient.graph.moves import BuildChange
from gradient.graph.need import lost_fetchability, skip_unwanted, update_and_settle_need
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.predicates import any_of, deterministic_failure, unassigned_predicate
from gradient.graph.runtime_can_start import complete_among, lose_completeness
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction
from gradient.model import TERMINAL_FAILURE, TERMINAL_SUCCESS, BuildStatus

# In hash order. A row made after `seen_at` is not the one that somebody has complained about.
LOCK_CACHED_PATHS: Final = Statement(
    "lock_cached_paths",
    """
    SELECT p.hash, coalesce(p.created_at > %(seen_at)s, false) FROM cached_path p
    WHERE p.hash = ANY(%(hashes)s) ORDER BY p.hash FOR UPDATE
    """,
)
DELETE_CACHED_PATHS: Final = Statement(
    "delete_cached_paths",
    """
    WITH gone AS (
        DELETE FROM cached_path WHERE hash = ANY(%(hashes)s) RETURNING hash, package, file_hash, "references"
    ), to_remove AS (
        INSERT INTO retired_nar (hash, package, retired_at)
        SELECT hash, package, %(now)s FROM gone WHERE file_hash IS NOT NULL
    )
    SELECT hash, package, "references" FROM gone
    """,
)
# Locked in derivation order.
LOCK_CACHED_OWNERS: Final = Statement(
    "lock_owners_of_cached_outputs",
    """
    SELECT b.derivation FROM derivation_build b
    WHERE b.derivation IN (SELECT o.derivation FROM derivation_output o
                           WHERE o.hash = ANY(%(hashes)s) AND o.is_cached)
    ORDER BY b.derivation FOR NO KEY UPDATE OF b
    """,
)
UNCACHE_OUTPUTS: Final = Statement(
    "uncache_outputs",
    "UPDATE derivation_output SET is_cached = false WHERE hash = ANY(%(hashes)s) AND is_cached",
)
# Also what failed, where the output was found bad: unless its builder has said no.
RESET_PRODUCERS: Final = Statement(
    "reset_producers",
    f"""
    WITH done AS (
        SELECT b.derivation, b.status FROM derivation_build b
        WHERE b.derivation = ANY(%(ids)s) AND ({any_of("b.status", TERMINAL_SUCCESS)}
              OR (%(distrusted)s AND {any_of("b.status", TERMINAL_FAILURE - {BuildStatus.DEPENDENCY_FAILED})}
                  AND NOT {deterministic_failure("b")}))
        ORDER BY b.derivation FOR NO KEY UPDATE
    )
    UPDATE derivation_build b
    SET status = {int(BuildStatus.CREATED)}, attempt = 0, substituted = false, updated_at = %(now)s
    FROM done d WHERE b.derivation = d.derivation
    RETURNING b.derivation, d.status
    """,
)
# A job that is out finishes undisturbed, as what it was handed out as.
DROP_CACHE_CLAIMS: Final = Statement(
    "drop_cache_claims",
    f"""
    WITH claimed AS (
        SELECT b.derivation FROM derivation_build b
        WHERE b.derivation = ANY(%(ids)s) AND b.cache_available AND {unassigned_predicate("b")}
        ORDER BY b.derivation FOR NO KEY UPDATE
    )
    UPDATE derivation_build b SET cache_available = false FROM claimed c
    WHERE b.derivation = c.derivation RETURNING b.derivation
    """,
)
OWNERS_OF_LOST_DRVS: Final = Statement(
    "owners_of_lost_drvs", "SELECT id FROM derivation WHERE hash = ANY(%(hashes)s)"
)
RETIRED_NARS: Final = Statement(
    "retired_nars",
    "SELECT id, hash, package FROM retired_nar WHERE id > %(after)s ORDER BY id LIMIT %(size)s",
)
NARS_REMOVED: Final = Statement("nars_removed", "DELETE FROM retired_nar WHERE id = ANY(%(ids)s)")


@attrs.frozen
class Retired:
    """What went: hash parts of paths, of what they referred to, and the derivations that made them."""

    hashes: tuple[str, ...] = ()
    references: frozenset[str] = frozenset()
    producers: tuple[int, ...] = ()


async def retire_cached_paths(
    tx: Transaction, hashes: Collection[str], *, seen_at: datetime | None = None, distrusted: bool = False
) -> Retired:
    """Take paths out of the cache, except those committed since `seen_at`.

    `distrusted` says that somebody could not use them: then no upstream cache is believed about their
    producers either, and producers that failed are tried again.
    """
    asked = sorted(set(hashes))
    found = dict(await tx.rows(LOCK_CACHED_PATHS, hashes=asked, seen_at=seen_at))
    due = [hash_part for hash_part in asked if not found.get(hash_part)]
    if not due:
        return Retired()
    rows = await tx.rows(DELETE_CACHED_PATHS, hashes=due, now=tx.now)
    producers = await demote_cached_output(tx, due, distrusted=distrusted)
    drvs = sorted(hash_part for hash_part, package, _ in rows if package.endswith(".drv"))
    if drvs:
        await unpromote_ungated(tx, await tx.ids(OWNERS_OF_LOST_DRVS, hashes=drvs))
    references = frozenset(base[:32] for _, _, bases in rows for base in bases)
    return Retired(tuple(row[0] for row in rows), references, tuple(producers))


async def demote_cached_output(
    tx: Transaction, hashes: Collection[str], *, distrusted: bool = False
) -> list[int]:
    """The outputs at these hash parts are not in the cache any more; returns the derivations that had them.

    What their closures completed is complete no more, what that made fetchable blocks again, and who made
    them is to make them again if anybody still wants it.
    """
    owners = await tx.ids(LOCK_CACHED_OWNERS, hashes=sorted(hashes))
    if not owners:
        return []
    lock = proven(tx, owners)
    complete_before = await complete_among(tx, owners)
    await tx.run(UNCACHE_OUTPUTS, hashes=sorted(hashes))
    flips = await lose_completeness(tx, lock, complete_before)
    await lost_fetchability(tx, await lock_shared_builds(tx, flips.lost, lock), flips.lost)
    if distrusted:
        await tx.run(DROP_CACHE_CLAIMS, ids=owners)
    rows = await tx.rows(RESET_PRODUCERS, ids=owners, distrusted=distrusted, now=tx.now)
    tx.moves.change(BuildChange(i, BuildStatus(old), BuildStatus.CREATED) for i, old in rows)
    await reopen(tx, owners)
    return owners


async def reopen(tx: Transaction, ids: Collection[int]) -> None:
    """Settle rows that were opened, or build from their inputs from now on: need, status, queue."""
    # In full: the mark of a row that was done means nothing, and may be of long ago.
    await update_and_settle_need(tx, ids)
    await skip_unwanted(tx, ids)
    await unpromote_ungated(tx, ids)
    await promote(tx, ids)


@attrs.frozen
class RetiredNar:
    """An object to remove: its row went with the path's."""

    id: int
    hash_part: str
    name: str


async def retired_nars(connection: Connection, after: int, size: int) -> list[RetiredNar]:
    """The next objects to remove, oldest first."""
    return [
        RetiredNar(*row) for row in await fetch_all(connection, RETIRED_NARS, {"after": after, "size": size})
    ]


@attrs.frozen
class NarsRemoved:
    """The objects of retired paths are gone (writer message), by the ids of their `retired_nar` rows."""

    ids: tuple[int, ...]

    async def apply(self, tx: Transaction) -> None:
        """Forget them."""
        await tx.run(NARS_REMOVED, ids=list(self.ids))
