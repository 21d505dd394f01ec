"""The graph-stuck heal: an evaluation waits, workers for all of it are there, yet nothing can be handed out.

Layer: graph. The waiting pass sends this when it finds an evaluation so, and again from time to time.
Source: seed "Waiting and Recovery", Graph-Stuck Heal.
"""

from __future__ import annotations

import attrs

from gradient.graph.evaluations import IS_PAST_EVALUATION, check_evaluation_done
from gradient.graph.repair import RepairScope, repair_build_graph
from gradient.graph.transaction import Transaction


@attrs.frozen
class Repair:
    """Repair the closure of an evaluation that waits for its builds (writer message)."""

    evaluation: int
    scope: RepairScope = RepairScope.UNSTICK

    async def apply(self, tx: Transaction) -> None:
        """Run the repair pass; an evaluation that has gone on meanwhile, or ended, stays as it is."""
        if await tx.value(IS_PAST_EVALUATION, evaluation=self.evaluation):
            await repair_build_graph(tx, self.evaluation, self.scope)
            await check_evaluation_done(tx, self.evaluation)
