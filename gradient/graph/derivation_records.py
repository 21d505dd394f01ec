"""Writing the records of walked derivations: outputs, edges, sources, and how far the walk has come.

Layer: graph, part of recording a batch. What was walked before stays as it is: its record is complete, and
no later one of it can add an output to a closure that counts as complete, or an edge that closes a circle.
Source: seed "Queueing and Counters", Walk Completeness.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import attrs
from psycopg.errors import SerializationFailure

from gradient.graph.batch_checks import CheckedBatch, CheckedDerivation, drv_key
from gradient.graph.build_circles import circle_refused, in_order, refuse_circles
from gradient.graph.output_twins import refuse_partial_twins
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.graph.walk_completeness import spread_recorded
from gradient.model import DiscoveredDerivation, EdgeKind
from gradient.nix.derivation import drv_path

# Locked in order: the counts of the batch rest on what these rows say.
KNOWN_OF_BATCH: Final = Statement(
    "known_of_batch",
    """
    SELECT d.hash, d.name, d.id, d.walked, d.unwalked_inputs
    FROM unnest(%(hashes)s::text[], %(names)s::text[]) AS asked (hash, name)
    JOIN derivation d ON d.hash = asked.hash AND d.name = asked.name
    ORDER BY d.id FOR NO KEY UPDATE OF d
    """,
)
_FACTS: Final = """
    architecture text, required_features text[], pname text, prefer_local_build boolean,
    is_fixed_output boolean, allow_substitutes boolean, ifd boolean, unwalked_inputs integer
"""
INSERT_WALKED: Final = Statement(
    "insert_walked_derivations",
    f"""
    INSERT INTO derivation (hash, name, architecture, required_features, pname, prefer_local_build,
                            is_fixed_output, allow_substitutes, ifd, walked, unwalked_inputs, created_at)
    SELECT hash, name, architecture, required_features, pname, prefer_local_build, is_fixed_output,
           allow_substitutes, ifd, true, unwalked_inputs, %(now)s
    FROM jsonb_to_recordset(%(batch)s::jsonb) AS r (hash text, name text, {_FACTS})
    ORDER BY hash, name
    ON CONFLICT (hash, name) DO NOTHING
    RETURNING hash, name, id
    """,
)
INSERT_STUBS: Final = Statement(
    "insert_stubs",
    """
    INSERT INTO derivation (hash, name, created_at)
    SELECT hash, name, %(now)s FROM unnest(%(hashes)s::text[], %(names)s::text[]) AS asked (hash, name)
    ORDER BY hash, name
    ON CONFLICT (hash, name) DO NOTHING
    RETURNING hash, name, id
    """,
)
WALK_STUBS: Final = Statement(
    "walk_stubs",
    f"""
    UPDATE derivation d
    SET architecture = a.architecture, required_features = a.required_features, pname = a.pname,
        prefer_local_build = a.prefer_local_build, is_fixed_output = a.is_fixed_output,
        allow_substitutes = a.allow_substitutes, ifd = d.ifd OR a.ifd, walked = true,
        unwalked_inputs = a.unwalked_inputs
    FROM jsonb_to_recordset(%(batch)s::jsonb) AS a (id bigint, {_FACTS})
    WHERE d.id = a.id
    """,
)
# All outputs of a derivation or none: one that was walked before has kept its rows.
INSERT_OUTPUTS: Final = Statement(
    "insert_outputs",
    """
    INSERT INTO derivation_output (derivation, name, hash, package, is_cached)
    SELECT r.derivation, r.name, r.hash, r.package,
           EXISTS (SELECT FROM cached_path p WHERE p.hash = r.hash AND p.file_hash IS NOT NULL)
    FROM unnest(%(derivations)s::bigint[], %(names)s::text[], %(hashes)s::text[], %(packages)s::text[])
        AS r (derivation, name, hash, package)
    WHERE NOT EXISTS (SELECT FROM derivation_output o WHERE o.derivation = r.derivation)
    RETURNING derivation
    """,
)
# What was walked, forgotten and is walked again has the inputs that its new record says.
FORGET_BUILD_EDGES: Final = Statement(
    "forget_build_edges",
    f"""
    WITH gone AS (
        DELETE FROM derivation_dependency e
        WHERE e.derivation = ANY(%(ids)s) AND e.kind = {int(EdgeKind.BUILD)}
    )
    UPDATE derivation_dependency e SET kind = {int(EdgeKind.RUNTIME)}
    WHERE e.derivation = ANY(%(ids)s) AND e.kind = {int(EdgeKind.BOTH)}
    """,
)
# A runtime edge recorded before becomes both.
INSERT_BUILD_EDGES: Final = Statement(
    "insert_build_edges",
    f"""
    INSERT INTO derivation_dependency AS e (derivation, dependency, kind)
    SELECT derivation, dependency, {int(EdgeKind.BUILD)}
    FROM unnest(%(derivations)s::bigint[], %(dependencies)s::bigint[]) AS r (derivation, dependency)
    ON CONFLICT (derivation, dependency) DO UPDATE SET kind = {int(EdgeKind.BOTH)}
        WHERE e.kind = {int(EdgeKind.RUNTIME)}
    """,
)
INSERT_SOURCES: Final = Statement(
    "insert_input_sources",
    """
    INSERT INTO derivation_input_source (derivation, hash, store_path)
    SELECT * FROM unnest(%(derivations)s::bigint[], %(hashes)s::text[], %(paths)s::text[])
    ON CONFLICT (derivation, hash) DO NOTHING
    """,
)


@attrs.frozen
class Walked:
    """A batch's derivations in the graph, and what is new about them."""

    ids: dict[str, int]  # of everything the batch names, by `.drv` path
    derivations: dict[int, CheckedDerivation]
    fresh: frozenset[int]  # walked for the first time
    new_outputs: frozenset[int]  # gained output rows

    @property
    def named(self) -> list[int]:
        """Every derivation of the batch and its direct inputs."""
        inputs = (self.ids[path] for derivation in self.derivations.values() for path in derivation.inputs)
        return ordered([*self.derivations, *inputs])


@attrs.frozen
class _Known:
    """A derivation as the graph had it before the batch."""

    id: int
    walked: bool
    unwalked_inputs: int

    @property
    def recorded(self) -> bool:
        """Down to its leaves."""
        return self.walked and not self.unwalked_inputs


async def write_derivations(tx: Transaction, batch: CheckedBatch) -> Walked:
    """Every derivation of the batch walked, and what it names there, as a stub at least; both by `.drv` path.

    Raises Rejected for a circle, also one that other batches have begun, and for derivations that share some
    outputs only.
    """
    inputs = frozenset[str]().union(*(d.inputs for d in batch.derivations.values()))
    known = await _known(tx, inputs.union(batch.derivations, (path for _, path in batch.entry_points)))
    fresh = {path: d for path, d in batch.derivations.items() if path not in known or not known[path].walked}
    unwalked = seed_unwalked_inputs(
        {path: derivation.inputs for path, derivation in fresh.items()},
        {path for path, found in known.items() if found.recorded},
    )
    ids = {path: found.id for path, found in known.items()}
    ids |= await _write_rows(tx, fresh, unwalked, ids)
    ids |= await _insert_stubs(tx, inputs - ids.keys())
    written = {ids[path]: derivation for path, derivation in fresh.items()}
    new_outputs = await _write_outputs(tx, written)
    await refuse_partial_twins(tx, new_outputs)
    await _write_edges(tx, written, ids)
    await _write_sources(tx, written)
    await spread_recorded(
        tx, [known[path].id for path in fresh if path in known and not unwalked[path]], written
    )
    await refuse_circles(tx, [known[path].id for path in inputs if _begun(known.get(path))], written)
    derivations = {ids[path]: derivation for path, derivation in batch.derivations.items()}
    return Walked(ids, derivations, frozenset(written), new_outputs)


def seed_unwalked_inputs(inputs: Mapping[str, frozenset[str]], recorded: Collection[str]) -> dict[str, int]:
    """The count of each newly walked derivation, from its `inputs` and from those that are `recorded` down to
    their leaves. Raises Rejected when some of them are in a circle. All by `.drv` path."""
    counts: dict[str, int] = {}
    complete = set(recorded)
    inside = {path: below & inputs.keys() for path, below in inputs.items()}
    try:
        for path in TopologicalSorter(inside).static_order():
            counts[path] = len(inputs[path] - complete)
            if not counts[path]:
                complete.add(path)
    except CycleError as error:
        raise circle_refused(in_order(error)) from error
    return counts


def _begun(known: _Known | None) -> bool:
    """Walked by an earlier batch, but not yet down to its leaves."""
    return known is not None and known.walked and not known.recorded


async def _known(tx: Transaction, paths: Collection[str]) -> dict[str, _Known]:
    if not paths:
        return {}
    hashes, names = zip(*map(drv_key, paths), strict=True)
    rows = await tx.rows(KNOWN_OF_BATCH, hashes=hashes, names=names)
    return {drv_path(hash_part, name): _Known(*found) for hash_part, name, *found in rows}


async def _write_rows(
    tx: Transaction,
    fresh: dict[str, CheckedDerivation],
    unwalked: dict[str, int],
    known: dict[str, int],
) -> dict[str, int]:
    """Insert what the graph has never heard of, as walked at once; rewrite what was a stub. Returns the ids
    of the former."""
    facts = {path: _facts(derivation.record, unwalked[path]) for path, derivation in fresh.items()}
    stubs = [{"id": known[path], **of} for path, of in facts.items() if path in known]
    if stubs:
        await tx.run(WALK_STUBS, batch=json.dumps(stubs))
        await tx.run(FORGET_BUILD_EDGES, ids=ordered(known[path] for path in facts if path in known))
    new = [{**_named(path), **of} for path, of in facts.items() if path not in known]
    if not new:
        return {}
    return _all(await tx.rows(INSERT_WALKED, batch=json.dumps(new), now=tx.now), len(new))


def _named(path: str) -> dict[str, Any]:
    hash_part, name = drv_key(path)
    return {"hash": hash_part, "name": name}


async def _insert_stubs(tx: Transaction, paths: Collection[str]) -> dict[str, int]:
    if not paths:
        return {}
    hashes, names = zip(*map(drv_key, paths), strict=True)
    return _all(await tx.rows(INSERT_STUBS, hashes=hashes, names=names, now=tx.now), len(paths))


def _all(rows: Collection[tuple[str, str, int]], count: int) -> dict[str, int]:
    """The ids of inserted rows. Raises SerializationFailure, on which the writer tries again, when somebody
    else has inserted one of them since it was looked for."""
    if len(rows) < count:
        raise SerializationFailure("another transaction recorded the same derivation")
    return {drv_path(hash_part, name): i for hash_part, name, i in rows}


def _facts(record: DiscoveredDerivation, unwalked_inputs: int) -> dict[str, Any]:
    return {
        "architecture": record.architecture,
        "required_features": record.required_features,
        "pname": record.pname,
        "prefer_local_build": record.prefer_local_build,
        "is_fixed_output": record.is_fixed_output,
        "allow_substitutes": record.allow_substitutes,
        "ifd": record.ifd,
        "unwalked_inputs": unwalked_inputs,
    }


async def _write_outputs(tx: Transaction, derivations: dict[int, CheckedDerivation]) -> frozenset[int]:
    rows = [(i, name, path.hash_part, path.name) for i, d in derivations.items() for name, path in d.outputs]
    if not rows:
        return frozenset()
    ids, names, hashes, packages = zip(*rows, strict=True)
    return frozenset(
        await tx.ids(INSERT_OUTPUTS, derivations=ids, names=names, hashes=hashes, packages=packages)
    )


async def _write_edges(
    tx: Transaction, derivations: dict[int, CheckedDerivation], ids: dict[str, int]
) -> None:
    above: list[int] = []
    below: list[int] = []
    for i, derivation in sorted(derivations.items()):
        above += [i] * len(derivation.inputs)
        below += sorted(ids[path] for path in derivation.inputs)
    if above:
        await tx.run(INSERT_BUILD_EDGES, derivations=above, dependencies=below)


async def _write_sources(tx: Transaction, derivations: dict[int, CheckedDerivation]) -> None:
    rows = [(i, path.hash_part, path.path()) for i, d in derivations.items() for path in d.sources]
    if rows:
        ids, hashes, paths = zip(*rows, strict=True)
        await tx.run(INSERT_SOURCES, derivations=ids, hashes=hashes, paths=paths)
