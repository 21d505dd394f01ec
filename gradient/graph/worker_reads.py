"""What workers ask about the graph. Layer: graph, reads only.

A failed read raises: the worker is told "state unknown" and asks again; it never reads as "missing".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final

import attrs

from gradient.graph.pg import Connection, fetch_all
from gradient.graph.predicates import recorded_predicate
from gradient.graph.statements import Statement
from gradient.nix.derivation import EXTENSION
from gradient.nix.store_path import StorePath

KNOWN_DERIVATIONS: Final = Statement(
    "known_derivations",
    f"""
    SELECT d.hash, d.name, d.id, greatest(d.created_at, d.promised_at) >= %(fresh_since)s
    FROM unnest(%(hashes)s::text[], %(names)s::text[]) AS asked (hash, name)
    JOIN derivation d ON d.hash = asked.hash AND d.name = asked.name
    WHERE {recorded_predicate("d")}
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
    asked = _by_key(drv_paths)
    rows = await fetch_all(connection, KNOWN_DERIVATIONS, {**_keys(asked), "fresh_since": fresh_since})
    return [Known(asked[hash_part, name], *rest) for hash_part, name, *rest in rows]


async def import_states(connection: Connection, drv_paths: Sequence[str]) -> list[ImportState]:
    """Where each of these derivations stands; unknown ones are missing in the answer."""
    asked = _by_key(drv_paths)
    rows = await fetch_all(connection, IMPORT_STATES, _keys(asked))
    return [ImportState(asked[hash_part, name], *rest) for hash_part, name, *rest in rows]


def _by_key(drv_paths: Collection[str]) -> dict[tuple[str, str], str]:
    """The paths as they were asked, by what their rows are found by: hash part, and name without `.drv`."""
    parsed = {path: StorePath.parse(path) for path in drv_paths}
    return {(of.hash_part, of.name.removesuffix(EXTENSION)): path for path, of in parsed.items()}


def _keys(asked: Collection[tuple[str, str]]) -> dict[str, list[str]]:
    return {"hashes": [hash_part for hash_part, _ in asked], "names": [name for _, name in asked]}
