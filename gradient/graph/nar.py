"""Committing NARs: a row appears in the cache only after its object is durable. Layer: graph.

A commit may complete closures, make builds fetchable, and queue the builds that waited for their own
`.drv`. Committing a NAR that is there already changes nothing.
Source: seed "Queueing and Counters", Start Condition Columns and Queueing Events.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import ClassVar, Final, Self

import attrs

from gradient.graph.can_start import add_blocking_deps, promote, unpromote_ungated
from gradient.graph.completeness import spread_completeness
from gradient.graph.joint import Joint, Stage
from gradient.graph.locks import proven
from gradient.graph.need import update_and_settle_need
from gradient.graph.references import Referring, references_of
from gradient.graph.runtime_can_start import seed_missing_runtime_deps
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction
from gradient.model import NarRecord
from gradient.nix.store_path import StorePath

# Paths in hash order; one that is known but not backed is backed by this, a backed one stays. Its
# signature and the references that may become runtime edges go in with it. Answers the new ones.
COMMIT_PATHS: Final = Statement(
    "commit_cached_paths",
    """
    WITH landed AS (
        INSERT INTO cached_path AS p (hash, package, nar_hash, nar_size, file_hash, file_size,
                                      "references", deriver, ca, created_at)
        SELECT hash, package, nar_hash, nar_size, file_hash, file_size, "references", deriver, ca, %(now)s
        FROM jsonb_to_recordset(%(nars)s::jsonb) AS r (
            hash text, package text, nar_hash text, nar_size bigint, file_hash text, file_size bigint,
            "references" text[], deriver text, ca text)
        ORDER BY hash
        ON CONFLICT (hash) DO UPDATE
            SET nar_hash = excluded.nar_hash, nar_size = excluded.nar_size, file_hash = excluded.file_hash,
                file_size = excluded.file_size, "references" = excluded."references",
                deriver = excluded.deriver, ca = excluded.ca
            WHERE p.file_hash IS NULL
        RETURNING p.id, p.hash, p.package, p."references"
    ), referred AS (
        INSERT INTO cached_path_reference (cached_path, hash)
        SELECT l.id, left(base, 32) FROM landed l, unnest(l."references") AS base
        WHERE l.package NOT LIKE '%%.drv' AND left(base, 32) <> l.hash
        ON CONFLICT DO NOTHING
    ), signed AS (
        INSERT INTO cached_path_signature (cached_path, cache, signature)
        SELECT coalesce(l.id, p.id), r.cache, r.signature
        FROM unnest(%(caches)s::bigint[], %(hashes)s::text[], %(signatures)s::text[])
            AS r (cache, hash, signature)
        LEFT JOIN landed l ON l.hash = r.hash LEFT JOIN cached_path p ON p.hash = r.hash
        ON CONFLICT (cached_path, cache) DO NOTHING
    )
    SELECT hash FROM landed
    """,
)
# Answers the shared builds they are outputs of, locked in derivation order before anything is marked.
MARK_OUTPUTS_CACHED: Final = Statement(
    "mark_outputs_cached",
    """
    WITH owner AS MATERIALIZED (
        SELECT b.derivation FROM derivation_build b
        WHERE b.derivation IN (SELECT o.derivation FROM derivation_output o
                               WHERE o.hash = ANY(%(hashes)s) AND NOT o.is_cached)
        ORDER BY b.derivation FOR NO KEY UPDATE OF b
    ), marked AS (
        UPDATE derivation_output o SET is_cached = true, nar_size = p.nar_size
        FROM owner, cached_path p
        WHERE p.hash = ANY(%(hashes)s) AND o.hash = p.hash AND o.derivation = owner.derivation
          AND NOT o.is_cached
    )
    SELECT derivation FROM owner
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
class CommitNars(Joint[None]):
    """Commit NARs whose objects are durable to a cache (writer message)."""

    cache: int
    nars: tuple[Signed, ...]

    stage: ClassVar[Stage] = Stage.UPLOAD

    @property
    def subject(self) -> Hashable:
        """None: of two that commit one path the second changes nothing."""
        return None

    @classmethod
    async def apply_together(cls, tx: Transaction, messages: Sequence[Self]) -> list[None]:
        """Write the rows and everything that follows from the new ones."""
        new = await _commit(tx, messages)
        drvs = sorted(path.hash_part for path in new if path.name.endswith(".drv"))
        outputs = sorted(path.hash_part for path in new if not path.name.endswith(".drv"))
        if outputs:
            await _outputs_landed(tx, outputs, any(_refers(path, nar) for path, nar in new.items()))
        if drvs:
            await promote(tx, await tx.ids(OWNERS_OF_DRVS, hashes=drvs))
        return [None] * len(messages)


async def _commit(tx: Transaction, messages: Sequence[CommitNars]) -> dict[StorePath, NarRecord]:
    """Write the rows of the cache; what is new in it."""
    # The hash part is the key of a path, whatever its name says, and the first to commit it decides.
    paths: dict[str, tuple[StorePath, NarRecord]] = {}
    signatures: dict[tuple[int, str], str] = {}
    for message in messages:
        for signed in message.nars:
            path = StorePath.parse(signed.nar.store_path)
            paths.setdefault(path.hash_part, (path, signed.nar))
            signatures.setdefault((message.cache, path.hash_part), signed.signature)
    landed = await tx.rows(
        COMMIT_PATHS,
        nars=json.dumps([_row(path, nar) for path, nar in paths.values()]),
        caches=[cache for cache, _ in signatures],
        hashes=[hash_part for _, hash_part in signatures],
        signatures=list(signatures.values()),
        now=tx.now,
    )
    return dict(paths[hash_part] for (hash_part,) in landed)


def _refers(path: StorePath, nar: NarRecord) -> bool:
    """Whether it refers to another path, so that runtime edges may come of it."""
    return any(base != path.base_name for base in nar.references)


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


async def _outputs_landed(tx: Transaction, hashes: list[str], refer: bool) -> None:
    """The outputs are present now; `refer` says whether any NAR refers to something."""
    ids = await tx.ids(MARK_OUTPUTS_CACHED, hashes=hashes)
    if not ids:
        return
    lock = proven(tx, ids)
    referring = await references_of(tx, ids) if refer else Referring()
    # An output was missing until now: none of them was complete.
    flips = await seed_missing_runtime_deps(tx, lock, ids, frozenset())
    await unpromote_ungated(tx, await add_blocking_deps(tx, lock, referring.links))
    await spread_completeness(tx, flips, lock)
    await update_and_settle_need(tx, referring.grown, only_gains=True)
