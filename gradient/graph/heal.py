"""The graph-stuck heal: an evaluation waits, workers for all of it are there, yet nothing can be handed out.

Layer: graph. The waiting pass sends this when it finds an evaluation so, and again from time to time.
Source: seed "Waiting and Recovery", Graph-Stuck Heal.
"""

from __future__ import annotations

from typing import Final

import attrs

from gradient.graph.evaluation_end import check_evaluation_done, fail_evaluation
from gradient.graph.predicates import any_of, blocks_evaluation, live_evaluation, past_walk
from gradient.graph.repair import RepairScope, repair_build_graph
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction
from gradient.model import BuildStatus

_UNDER_WAY: Final = frozenset({BuildStatus.QUEUED, BuildStatus.BUILDING, BuildStatus.FAILED_TRANSIENT})

IS_PAST_WALK: Final = Statement(
    "evaluation_is_past_walk", f"SELECT {past_walk('v')} FROM evaluation v WHERE v.id = %(evaluation)s"
)
# An evaluation may still walk what others wait for.
WALK_TO_COME: Final = Statement(
    "walk_to_come",
    f"""
    SELECT EXISTS (SELECT FROM evaluation v WHERE {live_evaluation("v")} AND v.building_started_at IS NULL)
    """,
)
# What the evaluation waits for and nobody can build: its record was taken out of the graph after the walk. No
# row while a build of the evaluation moves.
LOST_RECORD: Final = Statement(
    "lost_record",
    f"""
    WITH named AS MATERIALIZED (SELECT derivation FROM build_job WHERE evaluation = %(evaluation)s)
    SELECT lost.name FROM named, LATERAL (
        SELECT d.id, d.name FROM derivation d JOIN derivation_build b ON b.derivation = d.id
        WHERE d.id = named.derivation AND NOT d.walked AND {blocks_evaluation("b")} OFFSET 0) lost
    WHERE NOT EXISTS (SELECT FROM named n, LATERAL (
        SELECT FROM derivation_build b
        WHERE b.derivation = n.derivation AND {any_of("b.status", _UNDER_WAY)} OFFSET 0) moving)
    ORDER BY lost.id LIMIT 1
    """,
)


@attrs.frozen
class Repair:
    """Repair the closure of an evaluation that waits for its builds (writer message)."""

    evaluation: int
    scope: RepairScope = RepairScope.UNSTICK

    async def apply(self, tx: Transaction) -> None:
        """Run the repair pass, and end what that cannot help; an evaluation that has gone on meanwhile, or
        ended, stays as it is."""
        if await tx.value(IS_PAST_WALK, evaluation=self.evaluation):
            await repair_build_graph(tx, self.evaluation, self.scope)
            if not await check_evaluation_done(tx, self.evaluation):
                await self._end_without_record(tx)

    async def _end_without_record(self, tx: Transaction) -> None:
        if await tx.value(WALK_TO_COME):
            return
        lost = await tx.value(LOST_RECORD, evaluation=self.evaluation)
        if lost is not None:
            why = f"{lost} must be built again, and its record was taken out of the graph: evaluate again"
            await fail_evaluation(tx, self.evaluation, "evaluation", why)
