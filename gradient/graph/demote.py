"""What is not as the graph has it: NARs that are gone, paths nobody can use, caches that promised too much.

Layer: graph, run by the graph writer. A path with a producer is retired at once and made again. Nobody
can make one without a producer: it goes only when its object is really gone, which is looked up outside
of any transaction (`Moves.suspected`), and only a walk brings it again.
Source: seed "Jobs" (Failures, InputsUnavailable); seed "Queueing and Counters" (Walk Completeness).
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Final

import attrs

from gradient.graph.can_start import promote_closure
from gradient.graph.predicates import any_of, build_edge, live_evaluation
from gradient.graph.reachability import adopt_pending_closure
from gradient.graph.retire import DROP_CACHE_CLAIMS, reopen, retire_cached_paths
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.graph.walk_completeness import unwalk_derivations
from gradient.model import BUILDER_STATUSES

PRODUCED: Final = Statement(
    "produced_paths", "SELECT DISTINCT o.hash FROM derivation_output o WHERE o.hash = ANY(%(hashes)s)"
)
OUTPUTS_REFERRING_TO: Final = Statement(
    "outputs_referring_to",
    """
    SELECT DISTINCT p.hash FROM cached_path_reference r JOIN cached_path p ON p.id = r.cached_path
    WHERE r.hash = ANY(%(hashes)s)
      AND EXISTS (SELECT FROM derivation_output o WHERE o.hash = p.hash AND o.is_cached)
    """,
)
# Of derivations with an input source that the cache lacks: the ones nobody waits for. What is waited for
# must be able to fail in words; it is un-walked then.
UNSOURCED: Final = Statement(
    "unsourced_derivations",
    f"""
    SELECT DISTINCT s.derivation FROM derivation_input_source s, LATERAL (
        SELECT FROM derivation_build b
        WHERE b.derivation = s.derivation AND NOT ({any_of("b.status", BUILDER_STATUSES)} AND b.wanted)
        OFFSET 0
    ) idle
    WHERE s.hash = ANY(%(sources)s)
      AND NOT EXISTS (SELECT FROM cached_path p WHERE p.hash = s.hash AND p.file_hash IS NOT NULL
                      OFFSET 0)
    """,
)
WAITING_EVALUATIONS: Final = Statement(
    "evaluations_waiting_for_build",
    f"""
    SELECT v.id FROM build_job j JOIN evaluation v ON v.id = j.evaluation
    WHERE j.derivation = %(derivation)s AND {live_evaluation("v")} ORDER BY v.id
    """,
)
ABOVE_ORPHANS: Final = Statement(
    "derivations_above_orphans",
    f"""
    SELECT DISTINCT e.derivation FROM derivation_dependency e
    WHERE e.dependency = ANY(%(ids)s) AND {build_edge("e")}
      AND NOT EXISTS (SELECT FROM build_job j WHERE j.derivation = e.dependency)
    """,
)


@attrs.frozen
class DemoteMissingNar:
    """The objects of these cached paths (hash parts) are not in the store (writer message).

    The sender has looked, and keeps uploads of them away until this is committed.
    """

    hashes: tuple[str, ...]

    async def apply(self, tx: Transaction) -> None:
        """Retire them. What has no producer takes the outputs that refer to it along: they cannot be
        fetched without it."""
        orphaned = set(self.hashes) - await _produced(tx, self.hashes)
        above = await tx.rows(OUTPUTS_REFERRING_TO, hashes=sorted(orphaned)) if orphaned else []
        await retire_cached_paths(tx, {*self.hashes, *(row[0] for row in above)}, distrusted=True)
        await unwalk_unsourced(tx, orphaned)


@attrs.frozen
class DemotePath:
    """Somebody could not use what the cache gave for these paths (hash parts) at `seen_at` (writer message).

    Answers the derivations that are to make them again.
    """

    hashes: tuple[str, ...]
    seen_at: datetime

    async def apply(self, tx: Transaction) -> tuple[int, ...]:
        """Retire what has a producer; the rest is suspected."""
        produced = await _produced(tx, self.hashes)
        tx.moves.suspected |= set(self.hashes) - produced
        retired = await retire_cached_paths(tx, produced, seen_at=self.seen_at, distrusted=True)
        return retired.producers


@attrs.frozen
class DemoteCacheClaim:
    """No upstream cache has these derivations after all (writer message)."""

    derivations: tuple[int, ...]

    async def apply(self, tx: Transaction) -> None:
        """They are built from their inputs from now on, unless a worker is fetching them."""
        await reopen(tx, await tx.ids(DROP_CACHE_CLAIMS, ids=ordered(self.derivations)))


async def heal_missing_inputs(
    tx: Transaction, derivation: int, hashes: Collection[str], seen_at: datetime
) -> None:
    """The missing-input self-heal, after a build failed for want of these paths: their producers make them
    again, and the build waits for that by its counters."""
    producers = await DemotePath(tuple(sorted(hashes)), seen_at).apply(tx)
    if producers:
        for evaluation in await tx.ids(WAITING_EVALUATIONS, derivation=derivation):
            await adopt_pending_closure(tx, evaluation)
            await promote_closure(tx, evaluation)
        # Nobody names them still, so nothing will queue them: the next walk must come by.
        await unwalk_derivations(tx, await tx.ids(ABOVE_ORPHANS, ids=ordered(producers)))
    await unwalk_unsourced(tx, hashes)


async def unwalk_unsourced(tx: Transaction, hashes: Collection[str]) -> None:
    """Let the next walk bring the input sources among these that are lost, with what needs them."""
    if hashes:
        await unwalk_derivations(tx, await tx.ids(UNSOURCED, sources=sorted(hashes)))


async def _produced(tx: Transaction, hashes: Collection[str]) -> set[str]:
    return {row[0] for row in await tx.rows(PRODUCED, hashes=sorted(hashes))}
