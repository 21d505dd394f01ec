"""What the server told somebody it has stays for a while, so that nobody need send it again. Layer: graph.

A worker that is told "held" does not upload, and one that is told "known" does not walk on; what they build
on that comes later. A promise that is fresh enough is not renewed, so most answers only read.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final

import attrs

from gradient.graph.pg import fetch_all
from gradient.graph.pg_pool import Pool
from gradient.graph.predicates import recorded_predicate
from gradient.graph.statements import Statement
from gradient.graph.transaction import Submit, Transaction, ordered
from gradient.graph.worker_reads import known_derivations

# Less than the shortest grace of the collection, one hour, by the longest time between answer and use.
RENEWED_AFTER: Final = timedelta(minutes=20)

PROMISED_PATHS: Final = Statement(
    "promised_paths",
    """
    SELECT p.hash, greatest(p.created_at, p.promised_at) >= %(fresh_since)s
    FROM cached_path p WHERE p.hash = ANY(%(hashes)s) AND p.file_hash IS NOT NULL
    """,
)
PROMISE_PATHS: Final = Statement(
    "promise_paths",
    """
    WITH held AS (
        SELECT p.id FROM cached_path p WHERE p.hash = ANY(%(hashes)s) AND p.file_hash IS NOT NULL
        ORDER BY p.hash FOR NO KEY UPDATE
    )
    UPDATE cached_path p SET promised_at = %(now)s FROM held h WHERE p.id = h.id RETURNING p.hash
    """,
)
PROMISE_DERIVATIONS: Final = Statement(
    "promise_derivations",
    f"""
    WITH known AS (
        SELECT d.id FROM derivation d WHERE d.id = ANY(%(ids)s) AND {recorded_predicate("d")}
        ORDER BY d.id FOR NO KEY UPDATE
    )
    UPDATE derivation d SET promised_at = %(now)s FROM known k WHERE d.id = k.id RETURNING d.id
    """,
)


@attrs.frozen
class PromisePaths:
    """Keep cached paths (hash parts) for somebody (writer message); answers those that are still held."""

    hashes: tuple[str, ...]

    async def apply(self, tx: Transaction) -> frozenset[str]:
        """Stamp them."""
        return frozenset(row[0] for row in await tx.rows(PROMISE_PATHS, hashes=self.hashes, now=tx.now))


@attrs.frozen
class PromiseDerivations:
    """Keep known derivations for somebody (writer message); answers those that are still known."""

    ids: tuple[int, ...]

    async def apply(self, tx: Transaction) -> frozenset[int]:
        """Stamp them."""
        return frozenset(await tx.ids(PROMISE_DERIVATIONS, ids=ordered(self.ids), now=tx.now))


async def promised_paths(
    readers: Pool, submit: Submit, hash_parts: Collection[str], now: datetime
) -> set[str]:
    """The hash parts of those paths that are held, and stay so until what is built on them can name them.

    Raises as `readers` and `submit` do."""
    params = {"hashes": list(hash_parts), "fresh_since": now - RENEWED_AFTER}
    async with readers.connection() as connection:
        rows = await fetch_all(connection, PROMISED_PATHS, params)
    held = {hash_part for hash_part, fresh in rows if fresh}
    stale = tuple(sorted(hash_part for hash_part, fresh in rows if not fresh))
    return held | await submit(PromisePaths(stale)) if stale else held


async def promised_derivations(
    readers: Pool, submit: Submit, drv_paths: Collection[str], now: datetime
) -> list[str]:
    """Those whose complete closure is in the graph, and stays so until what is built on them names them.

    Raises as `readers` and `submit` do."""
    async with readers.connection() as connection:
        known = await known_derivations(connection, drv_paths, now - RENEWED_AFTER)
    stale = tuple(derivation.id for derivation in known if not derivation.fresh)
    kept = await submit(PromiseDerivations(stale)) if stale else frozenset()
    return [derivation.drv_path for derivation in known if derivation.fresh or derivation.id in kept]
