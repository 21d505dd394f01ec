"""From complete closures to fetchable builds: the step every event that moves a closure ends with.

Layer: graph. `runtime_can_start` says whose closure flipped; this applies it to the status, `fetchable`,
the queue and the need, in that order. What became complete without being built is Substituted: whether its
NARs or its batch came first makes no difference.
"""

from __future__ import annotations

from gradient.graph.can_start import became_fetchable
from gradient.graph.locks import SharedBuildLock, lock_shared_builds
from gradient.graph.need import lost_fetchability, update_and_settle_need
from gradient.graph.runtime_can_start import Completeness
from gradient.graph.transaction import Transaction


async def spread_completeness(
    tx: Transaction, flips: Completeness, held: SharedBuildLock | None = None
) -> None:
    """Mark and clear `fetchable` where a closure flipped. A row that lost and regained its closure in
    one event ends where it was: both marks read the predicate as it is now."""
    if flips.lost:
        await lost_fetchability(tx, await lock_shared_builds(tx, flips.lost, held), flips.lost)
    if flips.gained:
        lock = await lock_shared_builds(tx, flips.gained, held)
        changed = await became_fetchable(tx, lock, flips.gained)
        # A row that became fetchable ends the walk: what only it wanted at run time is settled.
        await update_and_settle_need(tx, changed)
