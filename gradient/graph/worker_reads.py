"""What workers ask about the graph. Layer: graph, reads only.

A failed read raises: the worker is told "state unknown" and asks again; it never reads as "missing".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final

import attrs

from gradient.graph.pg import Connection, fetch_all
from gradient.graph.statements import Statement
from gradient.graph.walk_completeness import KNOWN_DERIVATIONS
from gradient.nix.store_path import StorePath

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
class ImportState:
    """How far a derivation is that an evaluation imports from."""

    drv_path: str
    derivation: int
    status: int
    fetchable: bool


@attrs.frozen
class Known:
    """A derivation whose subtree is recorded; `fresh` says that it came, or was promised, not long ago."""

    drv_path: str
    id: int
    fresh: bool


async def known_derivations(
    connection: Connection, drv_paths: Collection[str], fresh_since: datetime
) -> list[Known]:
    """Those whose complete closure is in the graph: the worker's walk skips their subtrees."""
    keys = _drv_keys(drv_paths)
    params = {
        "hashes": list(keys),
        "names": [name for name, _ in keys.values()],
        "fresh_since": fresh_since,
    }
    rows = await fetch_all(connection, KNOWN_DERIVATIONS, params)
    return [Known(keys[hash_part][1], *rest) for hash_part, name, *rest in rows if keys[hash_part][0] == name]


async def import_states(connection: Connection, drv_paths: Sequence[str]) -> list[ImportState]:
    """Where each of these derivations stands; unknown ones are missing in the answer."""
    keys = _drv_keys(drv_paths)
    rows = await fetch_all(
        connection, IMPORT_STATES, {"hashes": list(keys), "names": [name for name, _ in keys.values()]}
    )
    return [ImportState(keys[hash_part][1], *rest) for hash_part, _, *rest in rows]


def _drv_keys(drv_paths: Collection[str]) -> dict[str, tuple[str, str]]:
    """Hash part -> (name without `.drv`, the path as it was asked)."""
    parsed = ((StorePath.parse(path), path) for path in drv_paths)
    return {store_path.hash_part: (store_path.name.removesuffix(".drv"), path) for store_path, path in parsed}
