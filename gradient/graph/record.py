"""Recording a batch of walked derivations. Layer: graph, run by the graph writer.

One batch of an EvalResult becomes rows, counters, names and queued builds in one step, so that a
build can start while the walk goes on. Replaying a batch changes nothing.
Source: seed "Queueing and Counters" (Queueing Events, Naming, Walk Completeness).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

import attrs

from gradient.graph.batch_checks import check_batch
from gradient.graph.can_start import promote, seed_blocking_deps, unpromote_ungated
from gradient.graph.completeness import spread_completeness
from gradient.graph.locks import SharedBuildLock, lock_shared_builds
from gradient.graph.messages import add_messages
from gradient.graph.need import settle_aborted, skip_unwanted, update_and_settle_need
from gradient.graph.references import adopt_runtime_references
from gradient.graph.runtime_can_start import complete_among, seed_missing_runtime_deps
from gradient.graph.statements import Statement
from gradient.graph.transaction import Rejected, Transaction, ordered
from gradient.graph.walk_completeness import seed_unwalked_inputs
from gradient.model import (
    EVALUATION_RUNNING,
    DiscoveredDerivation,
    EdgeKind,
    EntryPoint,
    EvaluationStatus,
    MessageLevel,
)
from gradient.nix.store_path import StorePath

# Merge limit of consecutive batches of one job (seed "Jobs", Evaluate).
MAX_BATCH: Final = 5000

LOCK_EVALUATION: Final = Statement(
    "lock_evaluation", "SELECT status, task FROM evaluation WHERE id = %(evaluation)s FOR NO KEY UPDATE"
)
INSERT_STUBS: Final = Statement(
    "insert_stubs",
    """
    INSERT INTO derivation (hash, name, created_at)
    SELECT hash, name, %(now)s FROM unnest(%(hashes)s::text[], %(names)s::text[]) AS asked (hash, name)
    ORDER BY hash, name
    ON CONFLICT (hash, name) DO NOTHING
    """,
)
RESOLVE_DERIVATIONS: Final = Statement(
    "resolve_derivations",
    """
    SELECT d.hash, d.name, d.id
    FROM unnest(%(hashes)s::text[], %(names)s::text[]) AS asked (hash, name)
    JOIN derivation d ON d.hash = asked.hash AND d.name = asked.name
    """,
)
# Rewrites only rows that were not walked yet, and returns those.
WALK_DERIVATIONS: Final = Statement(
    "walk_derivations",
    """
    WITH asked AS (
        SELECT * FROM jsonb_to_recordset(%(batch)s::jsonb) AS r (
            id bigint, architecture text, required_features text[], pname text,
            prefer_local_build boolean, is_fixed_output boolean, allow_substitutes boolean, ifd boolean)
    ), locked AS (
        SELECT d.id FROM derivation d JOIN asked a ON a.id = d.id WHERE NOT d.walked
        ORDER BY d.id FOR NO KEY UPDATE OF d
    )
    UPDATE derivation d
    SET architecture = a.architecture, required_features = a.required_features, pname = a.pname,
        prefer_local_build = a.prefer_local_build, is_fixed_output = a.is_fixed_output,
        allow_substitutes = a.allow_substitutes, ifd = d.ifd OR a.ifd, walked = true
    FROM asked a JOIN locked l ON l.id = a.id
    WHERE d.id = a.id
    RETURNING d.id
    """,
)
# All outputs of a derivation or none: a later record of it cannot add one to a closure that counts as
# complete without it.
INSERT_OUTPUTS: Final = Statement(
    "insert_outputs",
    """
    INSERT INTO derivation_output (derivation, name, hash, package, is_cached)
    SELECT r.derivation, r.name, r.hash, r.package,
           EXISTS (SELECT FROM cached_path p WHERE p.hash = r.hash AND p.file_hash IS NOT NULL)
    FROM unnest(%(derivations)s::bigint[], %(names)s::text[], %(hashes)s::text[], %(packages)s::text[])
        AS r (derivation, name, hash, package)
    WHERE NOT EXISTS (SELECT FROM derivation_output o WHERE o.derivation = r.derivation)
    ON CONFLICT (derivation, name) DO NOTHING
    RETURNING derivation
    """,
)
# A runtime edge recorded before becomes both; returns the derivations whose build edges grew.
INSERT_BUILD_EDGES: Final = Statement(
    "insert_build_edges",
    f"""
    INSERT INTO derivation_dependency AS e (derivation, dependency, kind)
    SELECT derivation, dependency, {int(EdgeKind.BUILD)}
    FROM unnest(%(derivations)s::bigint[], %(dependencies)s::bigint[]) AS r (derivation, dependency)
    WHERE derivation <> dependency
    ON CONFLICT (derivation, dependency) DO UPDATE SET kind = {int(EdgeKind.BOTH)}
        WHERE e.kind = {int(EdgeKind.RUNTIME)}
    RETURNING e.derivation
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
# With no upstream cache configured there is nobody to ask: the probe has answered.
INSERT_SHARED_BUILDS: Final = Statement(
    "insert_shared_builds",
    """
    INSERT INTO derivation_build (derivation, probed, created_at, updated_at)
    SELECT derivation, NOT EXISTS (SELECT FROM cache_upstream u WHERE u.active), %(now)s, %(now)s
    FROM unnest(%(ids)s::bigint[]) AS r (derivation)
    ON CONFLICT (derivation) DO NOTHING
    RETURNING derivation
    """,
)
WRITE_LIMITS: Final = Statement(
    "write_build_limits",
    """
    UPDATE derivation_build b SET timeout_secs = r.timeout, max_silent_secs = r.silent
    FROM unnest(%(ids)s::bigint[], %(timeouts)s::integer[], %(silents)s::integer[])
        AS r (derivation, timeout, silent)
    WHERE b.derivation = r.derivation
      AND (b.timeout_secs IS DISTINCT FROM r.timeout OR b.max_silent_secs IS DISTINCT FROM r.silent)
    """,
)
NAME_SHARED_BUILDS: Final = Statement(
    "name_shared_builds",
    """
    INSERT INTO build_job (evaluation, derivation, created_at)
    SELECT %(evaluation)s, derivation, %(now)s FROM unnest(%(ids)s::bigint[]) AS r (derivation)
    ON CONFLICT (evaluation, derivation) DO NOTHING
    RETURNING derivation
    """,
)
INSERT_ENTRY_POINTS: Final = Statement(
    "insert_entry_points",
    """
    INSERT INTO entry_point (evaluation, eval, derivation, task)
    SELECT %(evaluation)s, r.attr, r.derivation, %(task)s
    FROM unnest(%(attrs)s::text[], %(ids)s::bigint[]) AS r (attr, derivation)
    ON CONFLICT (evaluation, eval) DO NOTHING
    """,
)


@attrs.frozen
class Recorded:
    """What a batch did: the derivations newly walked, or that it came too late and was dropped."""

    walked: tuple[int, ...] = ()
    dropped: bool = False


@attrs.frozen
class Record:
    """Record an EvalResult batch of an evaluation (writer message).

    Raises Rejected when the batch contradicts itself or the graph, InvalidStorePath for what is none; the
    evaluation then fails. A batch for an evaluation that is not evaluating any more is dropped.
    """

    evaluation: int
    derivations: tuple[DiscoveredDerivation, ...] = ()
    entry_points: tuple[EntryPoint, ...] = ()
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    async def apply(self, tx: Transaction) -> Recorded:
        """Write the batch, move the counters, queue what may start."""
        rows = await tx.rows(LOCK_EVALUATION, evaluation=self.evaluation)
        if not rows:
            raise Rejected(f"evaluation {self.evaluation} does not exist")
        status, task = rows[0]
        if EvaluationStatus(status) not in EVALUATION_RUNNING:
            return Recorded(dropped=True)
        tx.moves.progressed.add(self.evaluation)
        await add_messages(tx, self.evaluation, MessageLevel.WARNING, "evaluation", self.warnings)
        await add_messages(tx, self.evaluation, MessageLevel.ERROR, "evaluation", self.errors)
        if not (self.derivations or self.entry_points):
            return Recorded()
        check_batch(self.derivations, self.entry_points)
        batch = await _resolve(tx, self)
        walked = await _write_derivations(tx, batch)
        await _move_builds(tx, batch, walked, evaluation=self.evaluation, task=task)
        return Recorded(tuple(walked.fresh))


# --- reading the batch ----------------------------------------------------------------------------


@attrs.frozen
class _Batch:
    """The message with every path parsed and every derivation resolved to its id."""

    derivations: dict[int, DiscoveredDerivation]
    entry_points: tuple[tuple[str, int], ...]
    ids: dict[tuple[str, str], int]

    def inputs(self, derivation: DiscoveredDerivation) -> list[int]:
        return [self.ids[_key(path)] for path in derivation.dependencies]

    @property
    def named(self) -> list[int]:
        """Every walked derivation, its direct inputs, and the entry points."""
        inputs = (i for derivation in self.derivations.values() for i in self.inputs(derivation))
        return ordered([*self.derivations, *inputs, *(i for _, i in self.entry_points)])


def _key(drv_path: str) -> tuple[str, str]:
    """Hash part and name, without `.drv`, of a derivation's store path."""
    path = StorePath.parse(drv_path)
    if not path.name.endswith(".drv"):
        raise Rejected(f"{drv_path} is not the path of a derivation")
    return path.hash_part, path.name.removesuffix(".drv")


async def _resolve(tx: Transaction, record: Record) -> _Batch:
    keys = {_key(d.drv_path) for d in record.derivations}
    keys |= {_key(path) for d in record.derivations for path in d.dependencies}
    stubs = sorted(keys)
    await tx.run(INSERT_STUBS, hashes=[k[0] for k in stubs], names=[k[1] for k in stubs], now=tx.now)
    keys |= {_key(entry.drv_path) for entry in record.entry_points}
    asked = sorted(keys)
    rows = await tx.rows(RESOLVE_DERIVATIONS, hashes=[k[0] for k in asked], names=[k[1] for k in asked])
    ids = {(hash_part, name): i for hash_part, name, i in rows}
    for entry in record.entry_points:
        if _key(entry.drv_path) not in ids:
            raise Rejected(f"entry point {entry.attr} names {entry.drv_path}, which was never sent")
    return _Batch(
        {ids[_key(d.drv_path)]: d for d in record.derivations},
        tuple((entry.attr, ids[_key(entry.drv_path)]) for entry in record.entry_points),
        ids,
    )


# --- derivations ----------------------------------------------------------------------------------


@attrs.frozen
class _Walked:
    """Derivations of the batch by what is new about them."""

    fresh: frozenset[int]  # walked for the first time
    grown: frozenset[int]  # gained a build edge
    new_outputs: frozenset[int]  # gained output rows


async def _write_derivations(tx: Transaction, batch: _Batch) -> _Walked:
    """The rows of `derivation` and its outputs, edges and sources; and how far the walk has come."""
    facts = [
        {
            "id": i,
            "architecture": d.architecture,
            "required_features": d.required_features,
            "pname": d.pname,
            "prefer_local_build": d.prefer_local_build,
            "is_fixed_output": d.is_fixed_output,
            "allow_substitutes": d.allow_substitutes,
            "ifd": d.ifd,
        }
        for i, d in batch.derivations.items()
    ]
    fresh = frozenset(await tx.ids(WALK_DERIVATIONS, batch=json.dumps(facts)))
    new_outputs = await _write_outputs(tx, batch.derivations)
    grown = await _write_edges(tx, batch)
    await _write_sources(tx, batch.derivations)
    await seed_unwalked_inputs(tx, fresh, grown)
    return _Walked(fresh, grown, new_outputs)


async def _write_outputs(tx: Transaction, derivations: dict[int, DiscoveredDerivation]) -> frozenset[int]:
    rows = []
    for i, derivation in derivations.items():
        for output in derivation.outputs:
            path = StorePath.parse(output.path)
            rows.append((i, output.name, path.hash_part, path.name))
    if not rows:
        return frozenset()
    ids, names, hashes, packages = zip(*rows, strict=True)
    return frozenset(
        await tx.ids(INSERT_OUTPUTS, derivations=ids, names=names, hashes=hashes, packages=packages)
    )


async def _write_edges(tx: Transaction, batch: _Batch) -> frozenset[int]:
    pairs = sorted({(i, below) for i, d in batch.derivations.items() for below in batch.inputs(d)})
    if not pairs:
        return frozenset()
    above, below = zip(*pairs, strict=True)
    return frozenset(await tx.ids(INSERT_BUILD_EDGES, derivations=above, dependencies=below))


async def _write_sources(tx: Transaction, derivations: dict[int, DiscoveredDerivation]) -> None:
    rows = [(i, StorePath.parse(path), path) for i, d in derivations.items() for path in d.input_sources]
    if rows:
        await tx.run(
            INSERT_SOURCES,
            derivations=[i for i, _, _ in rows],
            hashes=[parsed.hash_part for _, parsed, _ in rows],
            paths=[path for _, _, path in rows],
        )


# --- shared builds --------------------------------------------------------------------------------


async def _move_builds(
    tx: Transaction, batch: _Batch, walked: _Walked, *, evaluation: int, task: int | None
) -> None:
    """Shared builds of the batch, their names and counters, then the need and the queue."""
    named = batch.named
    created = frozenset(await tx.ids(INSERT_SHARED_BUILDS, ids=named, now=tx.now))
    newly_named = await tx.ids(NAME_SHARED_BUILDS, evaluation=evaluation, ids=named, now=tx.now)
    await _write_limits(tx, batch.derivations)
    await _write_entry_points(tx, batch, evaluation, task)
    above = await adopt_runtime_references(tx, walked.new_outputs)
    touched = walked.fresh | walked.grown | walked.new_outputs | created | above
    lock = await lock_shared_builds(tx, touched)
    await _seed_counters(tx, lock, touched, walked, created, above)
    need_roots = walked.fresh | walked.grown | {i for _, i in batch.entry_points} | above
    await update_and_settle_need(tx, need_roots, only_gains=True)
    await skip_unwanted(tx, named)
    await settle_aborted(tx, newly_named)
    # Being named is a queue condition: also rows that were known before may have waited for it.
    await promote(tx, touched.union(named))
    await unpromote_ungated(tx, walked.grown | above)


async def _write_limits(tx: Transaction, derivations: dict[int, DiscoveredDerivation]) -> None:
    limited = {i: d for i, d in derivations.items() if d.timeout_secs or d.max_silent_secs}
    if limited:
        await tx.run(
            WRITE_LIMITS,
            ids=list(limited),
            timeouts=[d.timeout_secs for d in limited.values()],
            silents=[d.max_silent_secs for d in limited.values()],
        )


async def _write_entry_points(tx: Transaction, batch: _Batch, evaluation: int, task: int | None) -> None:
    if batch.entry_points:
        await tx.run(
            INSERT_ENTRY_POINTS,
            evaluation=evaluation,
            task=task,
            attrs=[attr for attr, _ in batch.entry_points],
            ids=[i for _, i in batch.entry_points],
        )


async def _seed_counters(
    tx: Transaction,
    lock: SharedBuildLock,
    touched: Collection[int],
    walked: _Walked,
    created: frozenset[int],
    above: frozenset[int],
) -> None:
    """`missing_runtime_deps`, `blocking_deps` and `fetchable` of what the batch touched.

    New output rows can complete a row only now: until it has some, nothing is present.
    """
    fresh_here = created | walked.new_outputs
    before = await complete_among(tx, ordered(set(touched) - fresh_here))
    flips = await seed_missing_runtime_deps(tx, lock, touched, before)
    await seed_blocking_deps(tx, lock, ordered(walked.fresh | walked.grown | created | above))
    await spread_completeness(tx, flips)
