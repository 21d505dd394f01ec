"""Recording a batch of walked derivations. Layer: graph, run by the graph writer.

One batch of an EvalResult becomes rows, counters, names and queued builds in one step, so that a
build can start while the walk goes on. Replaying a batch changes nothing.
Source: seed "Queueing and Counters" (Queueing Events, Naming, Walk Completeness).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs

from gradient.graph.batch_checks import CheckedBatch, CheckedDerivation, check_batch
from gradient.graph.can_start import count_blocking_deps, promote, seed_blocking_deps, unpromote_ungated
from gradient.graph.completeness import spread_completeness
from gradient.graph.derivation_records import Walked, write_derivations
from gradient.graph.locks import SharedBuildLock, lock_shared_builds
from gradient.graph.messages import add_messages
from gradient.graph.need import settle_aborted, skip_unwanted, update_and_settle_need
from gradient.graph.references import adopt_runtime_references
from gradient.graph.runtime_can_start import complete_among, seed_missing_runtime_deps
from gradient.graph.statements import Statement
from gradient.graph.transaction import Rejected, Transaction, ordered
from gradient.model import (
    EVALUATION_RUNNING,
    DiscoveredDerivation,
    EntryPoint,
    EvaluationStatus,
    MessageLevel,
)

# Merge limit of consecutive batches of one job (seed "Jobs", Evaluate).
MAX_BATCH: Final = 5000

LOCK_EVALUATION: Final = Statement(
    "lock_evaluation", "SELECT status, task FROM evaluation WHERE id = %(evaluation)s FOR NO KEY UPDATE"
)
# With no upstream cache configured there is nobody to ask: the probe has answered.
# Their edges are there already, and none of them is fetchable yet, so they come with their count.
INSERT_SHARED_BUILDS: Final = Statement(
    "insert_shared_builds",
    f"""
    INSERT INTO derivation_build (derivation, probed, blocking_deps, created_at, updated_at)
    SELECT derivation, NOT EXISTS (SELECT FROM cache_upstream u WHERE u.active),
           {count_blocking_deps("r.derivation")}, %(now)s, %(now)s
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
# Who has drawn the graph of an evaluation sees that it has grown: this one's, and of everybody who names what
# was a stub so far. In id order; all others who lock evaluations hold the graph lock or skip what is locked.
GROW_GRAPHS: Final = Statement(
    "grow_graphs",
    """
    WITH grown AS (
        SELECT v.id FROM evaluation v
        WHERE v.id = ANY(ARRAY(
            SELECT %(evaluation)s::bigint
          UNION
            SELECT j.evaluation FROM build_job j WHERE j.derivation = ANY(%(fresh)s)))
        ORDER BY v.id FOR NO KEY UPDATE
    )
    UPDATE evaluation v SET graph_version = v.graph_version + 1 FROM grown g WHERE v.id = g.id
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

    Raises Rejected, in words that name the derivation, when the batch contradicts itself or the graph; the
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
        batch = check_batch(self.derivations, self.entry_points)
        walked = await write_derivations(tx, batch)
        await _move_builds(tx, batch, walked, evaluation=self.evaluation, task=task)
        return Recorded(tuple(walked.fresh))


async def _move_builds(
    tx: Transaction, batch: CheckedBatch, walked: Walked, *, evaluation: int, task: int | None
) -> None:
    """Shared builds of the batch, their names and counters, then the need and the queue."""
    entries = _entries(batch, walked)
    named = ordered([*walked.named, *entries.values()])
    # Before anything is counted: what the counts of the batch read is among them.
    lock = await lock_shared_builds(tx, named)
    created = frozenset(await tx.ids(INSERT_SHARED_BUILDS, ids=named, now=tx.now))
    await _write_limits(tx, walked.derivations)
    await _write_entry_points(tx, entries, evaluation, task)
    above = await adopt_runtime_references(tx, walked.new_outputs)
    touched = walked.fresh | created | above
    await _seed_counters(tx, await lock_shared_builds(tx, above, lock), touched, walked, created, above)
    # An adopted reference is among them, on one side at least.
    await update_and_settle_need(tx, walked.fresh.union(entries.values()), only_gains=True)
    # Named last: a name counts what became of the build meanwhile.
    newly_named = await tx.ids(NAME_SHARED_BUILDS, evaluation=evaluation, ids=named, now=tx.now)
    if newly_named or walked.fresh:
        await tx.run(GROW_GRAPHS, evaluation=evaluation, fresh=ordered(walked.fresh))
    await skip_unwanted(tx, named)
    await settle_aborted(tx, newly_named)
    # Being named is a queue condition: also rows that were known before may have waited for it.
    await promote(tx, touched.union(named))
    await unpromote_ungated(tx, above)


def _entries(batch: CheckedBatch, walked: Walked) -> dict[str, int]:
    """The derivation that each attribute names; of two the first, as when they come in two batches."""
    entries: dict[str, int] = {}
    for attr, path in batch.entry_points:
        if path not in walked.ids:
            raise Rejected(f"entry point {attr} names {path}, which was never sent")
        entries.setdefault(attr, walked.ids[path])
    return entries


async def _write_limits(tx: Transaction, derivations: dict[int, CheckedDerivation]) -> None:
    records = {i: derivation.record for i, derivation in derivations.items()}
    limited = {i: record for i, record in records.items() if record.timeout_secs or record.max_silent_secs}
    if limited:
        await tx.run(
            WRITE_LIMITS,
            ids=list(limited),
            timeouts=[d.timeout_secs for d in limited.values()],
            silents=[d.max_silent_secs for d in limited.values()],
        )


async def _write_entry_points(
    tx: Transaction, entries: dict[str, int], evaluation: int, task: int | None
) -> None:
    if entries:
        await tx.run(
            INSERT_ENTRY_POINTS,
            evaluation=evaluation,
            task=task,
            attrs=list(entries),
            ids=list(entries.values()),
        )


async def _seed_counters(
    tx: Transaction,
    lock: SharedBuildLock,
    touched: Collection[int],
    walked: Walked,
    created: frozenset[int],
    above: frozenset[int],
) -> None:
    """`missing_runtime_deps`, `blocking_deps` and `fetchable` of what the batch touched.

    New output rows can complete a row only now: until it has some, nothing is present.
    """
    fresh_here = created | walked.new_outputs
    before = await complete_among(tx, ordered(set(touched) - fresh_here))
    flips = await seed_missing_runtime_deps(tx, lock, touched, before)
    await seed_blocking_deps(tx, lock, ordered((walked.fresh - created) | above))
    await spread_completeness(tx, flips)
