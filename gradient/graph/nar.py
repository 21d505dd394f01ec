"""Committing NARs: a row appears in the cache only after its object is durable. Layer: graph.

A commit may complete closures, make builds fetchable, and queue the builds that waited for their own
`.drv`. Committing a NAR that is there already changes nothing.
Source: seed "Queueing and Counters", Start Condition Columns and Queueing Events.
"""

from __future__ import annotations

import json
from typing import Final

import attrs

from gradient.graph.can_start import promote, seed_blocking_deps, unpromote_ungated
from gradient.graph.completeness import spread_completeness
from gradient.graph.locks import lock_shared_builds
from gradient.graph.need import update_and_settle_need
from gradient.graph.references import references_of
from gradient.graph.runtime_can_start import complete_among, seed_missing_runtime_deps
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import NarRecord
from gradient.nix.store_path import StorePath

# Locks in hash order. A path that is known but not backed is backed by this; a backed one stays.
INSERT_CACHED_PATHS: Final = Statement(
    "insert_cached_paths",
    """
    INSERT INTO cached_path AS p (hash, package, nar_hash, nar_size, file_hash, file_size,
                                  "references", deriver, ca, created_at)
    SELECT r.hash, r.package, r.nar_hash, r.nar_size, r.file_hash, r.file_size, r."references",
           r.deriver, r.ca, %(now)s
    FROM jsonb_to_recordset(%(batch)s::jsonb) AS r (
        hash text, package text, nar_hash text, nar_size bigint, file_hash text, file_size bigint,
        "references" text[], deriver text, ca text)
    ORDER BY r.hash
    ON CONFLICT (hash) DO UPDATE
        SET nar_hash = excluded.nar_hash, nar_size = excluded.nar_size, file_hash = excluded.file_hash,
            file_size = excluded.file_size, "references" = excluded."references",
            deriver = excluded.deriver, ca = excluded.ca
        WHERE p.file_hash IS NULL
    RETURNING p.id, p.hash
    """,
)
INSERT_REFERENCES: Final = Statement(
    "insert_cached_path_references",
    """
    INSERT INTO cached_path_reference (cached_path, hash)
    SELECT p.id, left(base, 32) FROM cached_path p, unnest(p."references") AS base
    WHERE p.id = ANY(%(ids)s) AND p.package NOT LIKE '%%.drv' AND left(base, 32) <> p.hash
    ON CONFLICT DO NOTHING
    """,
)
SIGN_PATHS: Final = Statement(
    "sign_cached_paths",
    """
    INSERT INTO cached_path_signature (cached_path, cache, signature)
    SELECT p.id, %(cache)s, r.signature
    FROM unnest(%(hashes)s::text[], %(signatures)s::text[]) AS r (hash, signature)
    JOIN cached_path p ON p.hash = r.hash
    ON CONFLICT (cached_path, cache) DO NOTHING
    """,
)
OWNERS_OF_OUTPUTS: Final = Statement(
    "owners_of_outputs",
    """
    SELECT DISTINCT o.derivation FROM derivation_output o
    WHERE o.hash = ANY(%(hashes)s) AND NOT o.is_cached
    """,
)
MARK_OUTPUTS_CACHED: Final = Statement(
    "mark_outputs_cached",
    """
    UPDATE derivation_output o SET is_cached = true, nar_size = p.nar_size
    FROM cached_path p WHERE p.hash = ANY(%(hashes)s) AND o.hash = p.hash AND NOT o.is_cached
    """,
)
OWNERS_OF_DRVS: Final = Statement(
    "owners_of_drvs", "SELECT id FROM derivation WHERE hash = ANY(%(hashes)s) AND walked"
)


@attrs.frozen
class Signed:
    """A NAR and its signature by the key of the cache it is committed to."""

    nar: NarRecord
    signature: str


@attrs.frozen
class CommitNars:
    """Commit NARs whose objects are durable to a cache (writer message)."""

    cache: int
    nars: tuple[Signed, ...]

    async def apply(self, tx: Transaction) -> None:
        """Write the rows and everything that follows from the new ones."""
        paths = {StorePath.parse(signed.nar.store_path): signed for signed in self.nars}
        batch = [_row(path, signed.nar) for path, signed in paths.items()]
        landed = await tx.rows(INSERT_CACHED_PATHS, batch=json.dumps(batch), now=tx.now)
        await tx.run(
            SIGN_PATHS,
            cache=self.cache,
            hashes=[path.hash_part for path in paths],
            signatures=[signed.signature for signed in paths.values()],
        )
        if landed:
            await tx.run(INSERT_REFERENCES, ids=[i for i, _ in landed])
            await _land(tx, {hash_part for _, hash_part in landed}, paths)


def _row(path: StorePath, nar: NarRecord) -> dict[str, object]:
    return {
        "hash": path.hash_part,
        "package": path.name,
        "nar_hash": nar.nar_hash,
        "nar_size": nar.nar_size,
        "file_hash": nar.file_hash,
        "file_size": nar.file_size,
        "references": nar.references,
        "deriver": nar.deriver,
        "ca": nar.ca,
    }


async def _land(tx: Transaction, hashes: set[str], paths: dict[StorePath, Signed]) -> None:
    """What newly backed paths move: outputs present, `.drv` files there."""
    drvs = sorted(p.hash_part for p in paths if p.hash_part in hashes and p.name.endswith(".drv"))
    others = sorted(hashes.difference(drvs))
    if others:
        await _outputs_landed(tx, others)
    if drvs:
        await promote(tx, await tx.ids(OWNERS_OF_DRVS, hashes=drvs))


async def _outputs_landed(tx: Transaction, hashes: list[str]) -> None:
    owners = await tx.ids(OWNERS_OF_OUTPUTS, hashes=hashes)
    if not owners:
        return
    lock = await lock_shared_builds(tx, owners)
    before = await complete_among(tx, owners)
    await tx.run(MARK_OUTPUTS_CACHED, hashes=hashes)
    grown = ordered(await references_of(tx, owners))
    flips = await seed_missing_runtime_deps(tx, lock, owners, before)
    if grown:
        await seed_blocking_deps(tx, lock, grown)
        await unpromote_ungated(tx, grown)
    await spread_completeness(tx, flips)
    await update_and_settle_need(tx, grown, only_gains=True)
