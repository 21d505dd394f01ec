"""What workers ask about the cache and the graph. Layer: graph, reads only.

A failed read raises: the worker is told "state unknown" and asks again; it never reads as "missing".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import attrs

from gradient.graph.pg import Connection, fetch_all
from gradient.graph.statements import Statement
from gradient.graph.walk_completeness import KNOWN_DERIVATIONS
from gradient.model import NarRecord
from gradient.nix.store_path import StorePath

HELD_PATHS: Final = Statement(
    "held_paths",
    """
    SELECT p.hash, p.package FROM cached_path p
    WHERE p.hash = ANY(%(hashes)s) AND p.file_hash IS NOT NULL
    """,
)
HELD_NARS: Final = Statement(
    "held_nars",
    """
    SELECT p.hash, p.package, p.nar_hash, p.nar_size, p.file_hash, p.file_size, p."references", p.deriver,
           p.ca, s.signature
    FROM cached_path p JOIN cached_path_signature s ON s.cached_path = p.id AND s.cache = %(cache)s
    WHERE p.hash = ANY(%(hashes)s) AND p.file_hash IS NOT NULL
    """,
)
IMPORT_STATES: Final = Statement(
    "import_states",
    """
    SELECT d.hash, d.name, b.derivation, b.status, b.fetchable
    FROM unnest(%(hashes)s::text[], %(names)s::text[]) AS asked (hash, name)
    JOIN derivation d ON d.hash = asked.hash AND d.name = asked.name
    JOIN derivation_build b ON b.derivation = d.id
    """,
)


@attrs.frozen
class HeldNar:
    """A path of the cache with everything a worker needs to import it."""

    nar: NarRecord
    signature: str


@attrs.frozen
class ImportState:
    """How far a derivation is that an evaluation imports from."""

    drv_path: str
    derivation: int
    status: int
    fetchable: bool


async def held_paths(connection: Connection, paths: Collection[str]) -> set[str]:
    """Those of `paths` that our cache holds."""
    rows = await fetch_all(connection, HELD_PATHS, {"hashes": _hashes(paths)})
    return {f"/nix/store/{hash_part}-{name}" for hash_part, name in rows}


async def held_nars(connection: Connection, cache: int, paths: Collection[str]) -> dict[str, HeldNar]:
    """The same with metadata, by store path."""
    rows = await fetch_all(connection, HELD_NARS, {"cache": cache, "hashes": _hashes(paths)})
    return {held.nar.store_path: held for held in map(_held_nar, rows)}


def _held_nar(row: Sequence[Any]) -> HeldNar:
    hash_part, name, nar_hash, nar_size, file_hash, file_size, references, deriver, ca, signature = row
    path = f"/nix/store/{hash_part}-{name}"
    record = NarRecord(path, nar_hash, nar_size, file_hash, file_size, tuple(references), deriver, ca)
    return HeldNar(record, signature)


async def known_derivations(connection: Connection, drv_paths: Sequence[str]) -> list[str]:
    """Those whose complete closure is in the graph: the worker's walk skips their subtrees."""
    keys = _drv_keys(drv_paths)
    rows = await fetch_all(
        connection, KNOWN_DERIVATIONS, {"hashes": list(keys), "names": [name for name, _ in keys.values()]}
    )
    return [keys[hash_part][1] for hash_part, name in rows if keys[hash_part][0] == name]


async def import_states(connection: Connection, drv_paths: Sequence[str]) -> list[ImportState]:
    """Where each of these derivations stands; unknown ones are missing in the answer."""
    keys = _drv_keys(drv_paths)
    rows = await fetch_all(
        connection, IMPORT_STATES, {"hashes": list(keys), "names": [name for name, _ in keys.values()]}
    )
    return [ImportState(keys[hash_part][1], *rest) for hash_part, _, *rest in rows]


def _hashes(paths: Collection[str]) -> list[str]:
    return sorted({StorePath.parse(path).hash_part for path in paths})


def _drv_keys(drv_paths: Collection[str]) -> dict[str, tuple[str, str]]:
    """Hash part -> (name without `.drv`, the path as it was asked)."""
    parsed = ((StorePath.parse(path), path) for path in drv_paths)
    return {store_path.hash_part: (store_path.name.removesuffix(".drv"), path) for store_path, path in parsed}
