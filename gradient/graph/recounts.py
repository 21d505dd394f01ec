"""What the consistency check has the graph writer mend: one message a chunk. Layer: graph.

The check only suspects. Each message looks again at rows as they are in its own transaction, where nothing
else moves, and writes absolute values: a suspect that a transition has mended meanwhile is left alone, and
no spread starts from a state (docs/adr/0019).
Source: seed "Queueing and Counters", Consistency Check.
"""

from __future__ import annotations

import attrs

from gradient.graph.can_start import repair_can_start, repair_fetchable
from gradient.graph.need import recount_wanted, settle_skipped, skip_unwanted
from gradient.graph.reachability import adopt_pending
from gradient.graph.runtime_can_start import RECOUNT_MISSING_RUNTIME_DEPS
from gradient.graph.transaction import Alone, Transaction, ordered
from gradient.graph.walk_completeness import RECOUNT_UNWALKED_INPUTS


@attrs.frozen
class RecountUnwalkedInputs(Alone):
    """Count the unwalked inputs of these derivations, which are all whose count is wrong, afresh (writer
    message)."""

    suspects: tuple[int, ...]
    limit: int

    async def apply(self, tx: Transaction) -> tuple[int, ...]:
        """Answers the rows that were wrong, at most `limit`."""
        ids = ordered(self.suspects)
        return tuple(await tx.ids(RECOUNT_UNWALKED_INPUTS, ids=ids, limit=self.limit))


@attrs.frozen
class RecountMissingRuntimeDeps(Alone):
    """Count the missing runtime dependencies of these shared builds, which are all whose count is wrong,
    afresh (writer message)."""

    suspects: tuple[int, ...]
    limit: int

    async def apply(self, tx: Transaction) -> tuple[int, ...]:
        """Answers the rows that were wrong, at most `limit`; `fetchable` follows in its own step."""
        ids = ordered(self.suspects)
        return tuple(await tx.ids(RECOUNT_MISSING_RUNTIME_DEPS, ids=ids, limit=self.limit))


@attrs.frozen
class RepairFetchable(Alone):
    """Write `fetchable` of these shared builds as its predicate says (writer message)."""

    ids: tuple[int, ...]

    async def apply(self, tx: Transaction) -> int:
        """With the counters above; the need below is recounted next. Answers how many were wrong."""
        return len(await repair_fetchable(tx, self.ids))


@attrs.frozen
class RecountWanted(Alone):
    """Write the needs-build mark of these shared builds, which are all whose mark is wrong, and settle them
    (writer message)."""

    suspects: tuple[int, ...]
    limit: int

    async def apply(self, tx: Transaction) -> tuple[int, ...]:
        """Answers the rows that were wrong, at most `limit`."""
        return tuple(await recount_wanted(tx, self.suspects, self.limit))


@attrs.frozen
class SettleSkipped(Alone):
    """Thaw and skip these shared builds as their marks say (writer message)."""

    ids: tuple[int, ...]

    async def apply(self, tx: Transaction) -> int:
        """Answers how many moved."""
        return await settle_skipped(tx, self.ids)


@attrs.frozen
class CanStartMended:
    """Shared builds that were counted or queued wrongly, and those that could have started."""

    wrong: int
    startable: int


@attrs.frozen
class RepairCanStart(Alone):
    """Recount `blocking_deps` of these shared builds, un-queue, then queue (writer message)."""

    ids: tuple[int, ...]

    async def apply(self, tx: Transaction) -> CanStartMended:
        """What left the queue and is needed by nobody is skipped."""
        found = await repair_can_start(tx, self.ids)
        await skip_unwanted(tx, found.unqueued)
        return CanStartMended(len({*found.counters, *found.unqueued}), len(found.queued))


@attrs.frozen
class AdoptPending(Alone):
    """Name shared builds for evaluations that wait for them, as (evaluation, derivation) (writer message)."""

    names: tuple[tuple[int, int], ...]

    async def apply(self, tx: Transaction) -> int:
        """Answers how many names are new."""
        return await adopt_pending(tx, self.names)
