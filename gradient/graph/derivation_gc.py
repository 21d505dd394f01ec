"""Deleting derivations that nothing reaches any more. Layer: graph.

Roots are entry points, named shared builds, jobs on a worker, and what a worker was told is known. The
search reads the whole graph, on a reader's connection; the graph writer then looks again at each
candidate, upwards to the next root: anything may have been named since.
Source: seed "Queueing and Counters", Walk Completeness.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Final

import attrs

from gradient.graph.can_start import seed_blocking_deps
from gradient.graph.completeness import spread_completeness
from gradient.graph.locks import lock_shared_builds
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.predicates import build_edge
from gradient.graph.runtime_can_start import complete_among, seed_missing_runtime_deps
from gradient.graph.statements import Statement
from gradient.graph.transaction import Alone, Transaction, ordered
from gradient.graph.walk_completeness import count_unwalked_inputs, unwalk_derivations


def _rooted(d: str) -> str:
    """Something wants this derivation to be there, whatever is above it. OFFSET 0 keeps the planner from
    reading a whole table to answer for a few rows."""
    return f"""(EXISTS (SELECT FROM build_job j WHERE j.derivation = {d}.id OFFSET 0)
        OR EXISTS (SELECT FROM entry_point t WHERE t.derivation = {d}.id OFFSET 0)
        OR EXISTS (SELECT FROM dispatched_job q
                   WHERE q.derivation = {d}.id AND q.finished_at IS NULL OFFSET 0)
        OR coalesce({d}.promised_at >= %(promised_since)s, false))"""


# The closure of all roots, over every edge; of the rest what is old enough. Parents come first, as far as
# ids tell: a batch has its inputs in it or before it. EXCEPT, because nobody can estimate the closure: a look
# into it for each row might read all of it each time.
ORPHAN_DERIVATIONS: Final = Statement(
    "orphan_derivations",
    """
    WITH RECURSIVE kept (id) AS (
        (SELECT derivation FROM build_job UNION SELECT derivation FROM entry_point
         UNION SELECT id FROM derivation WHERE promised_at >= %(promised_since)s
         UNION SELECT derivation FROM dispatched_job WHERE finished_at IS NULL AND derivation IS NOT NULL)
      UNION
        SELECT below.dependency FROM kept, LATERAL (
            SELECT e.dependency FROM derivation_dependency e WHERE e.derivation = kept.id OFFSET 0
        ) below
    )
    SELECT d.id FROM derivation d WHERE d.created_at < %(created_before)s
    EXCEPT SELECT id FROM kept ORDER BY id DESC
    """,
)
# Everything above the candidates, up to the next root and with it.
ABOVE_CANDIDATES: Final = Statement(
    "above_candidates",
    f"""
    WITH RECURSIVE above (id) AS (
        SELECT d.id FROM derivation d WHERE d.id = ANY(%(ids)s)
      UNION
        SELECT up.derivation FROM above, LATERAL (
            SELECT e.derivation FROM derivation d JOIN derivation_dependency e ON e.dependency = d.id
            WHERE d.id = above.id AND NOT {_rooted("d")} OFFSET 0
        ) up
    )
    SELECT above.id, root.is_root FROM above, LATERAL (
        SELECT {_rooted("d")} AS is_root FROM derivation d WHERE d.id = above.id OFFSET 0
    ) root
    """,
)
KEPT_BELOW: Final = Statement(
    "kept_below_roots",
    """
    WITH RECURSIVE kept (id) AS (
        SELECT unnest(%(roots)s::bigint[])
      UNION
        SELECT below.dependency FROM kept, LATERAL (
            SELECT e.dependency FROM derivation_dependency e
            WHERE e.derivation = kept.id AND e.dependency = ANY(%(area)s) OFFSET 0
        ) below
    )
    SELECT id FROM kept
    """,
)
LOCK_DOOMED: Final = Statement(
    "lock_doomed_derivations",
    """
    SELECT id FROM derivation WHERE id = ANY(%(ids)s) AND created_at < %(created_before)s
    ORDER BY id FOR UPDATE
    """,
)
SURVIVORS_ABOVE: Final = Statement(
    "survivors_above",
    f"""
    SELECT e.derivation, bool_or({build_edge("e")}) FROM derivation_dependency e
    WHERE e.dependency = ANY(%(ids)s) AND e.derivation <> ALL(%(ids)s)
    GROUP BY e.derivation ORDER BY e.derivation
    """,
)
DELETE_DERIVATIONS: Final = Statement("delete_derivations", "DELETE FROM derivation WHERE id = ANY(%(ids)s)")
# Of rows that are not walked, whose count nothing above them rests on.
COUNT_UNWALKED_INPUTS: Final = Statement(
    "count_unwalked_inputs",
    f"""
    UPDATE derivation d SET unwalked_inputs = {count_unwalked_inputs("d.id")}
    WHERE d.id = ANY(%(ids)s) AND NOT d.walked
    """,
)


async def orphan_derivations(
    connection: Connection, *, created_before: datetime, promised_since: datetime
) -> list[int]:
    """Derivations outside the closure of every root, parents first as far as that is known."""
    ages = {"created_before": created_before, "promised_since": promised_since}
    return [row[0] for row in await fetch_all(connection, ORPHAN_DERIVATIONS, ages)]


@attrs.frozen
class CollectDerivations(Alone):
    """Delete those of the candidates that no root reaches now (writer message); answers how many went."""

    candidates: tuple[int, ...]
    created_before: datetime
    promised_since: datetime

    async def apply(self, tx: Transaction) -> int:
        """Delete them; what needs one of them and stays is to be walked again."""
        orphans = await _still_orphans(tx, self.candidates, self.promised_since)
        doomed = await tx.ids(LOCK_DOOMED, ids=orphans, created_before=self.created_before)
        if doomed:
            above = await tx.rows(SURVIVORS_ABOVE, ids=doomed)
            await unwalk_derivations(tx, [i for i, builds_from in above if builds_from])
            await _delete(tx, doomed, [i for i, _ in above])
        return len(doomed)


async def _still_orphans(tx: Transaction, candidates: Collection[int], promised_since: datetime) -> list[int]:
    """Those of the candidates that no root reaches now."""
    above = await tx.rows(ABOVE_CANDIDATES, ids=ordered(candidates), promised_since=promised_since)
    roots = [i for i, is_root in above if is_root]
    kept = set(await tx.ids(KEPT_BELOW, roots=roots, area=ordered(i for i, _ in above))) if roots else set()
    return ordered(set(candidates) - kept)


async def _delete(tx: Transaction, doomed: list[int], survivors: Collection[int]) -> None:
    """Delete, and count what lost an edge by it. Nobody names that, so nothing of it may start."""
    lock = await lock_shared_builds(tx, survivors)
    complete_before = await complete_among(tx, survivors)
    await tx.run(DELETE_DERIVATIONS, ids=doomed)
    if survivors:
        await tx.run(COUNT_UNWALKED_INPUTS, ids=ordered(survivors))
        flips = await seed_missing_runtime_deps(tx, lock, survivors, complete_before)
        await seed_blocking_deps(tx, lock, survivors)
        await spread_completeness(tx, flips, lock)
