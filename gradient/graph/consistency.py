"""The consistency check: every maintained column against what it stands for. Layer: graph.

The only backstop for a lost move. It reads on a connection of its own, holding no lock, and has the graph
writer mend what it found, a chunk a message (docs/adr/0019). On a clean graph it writes nothing.
Source: seed "Queueing and Counters", Consistency Check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import attrs

from gradient.graph.counters import EVALUATION_DRIFT, recount_evaluations
from gradient.graph.drift import (
    CAN_START_DRIFT,
    FETCHABLE_DRIFT,
    MISSING_RUNTIME_DEPS_DRIFT,
    MOST,
    SKIPPED_DRIFT,
    SWEEP_SETTINGS,
    UNWALKED_INPUTS_DRIFT,
    WANTED_DRIFT,
    WANTED_IN_DOUBT,
)
from gradient.graph.evaluation_end import FinishEvaluation
from gradient.graph.pg import Connection, execute, fetch_all, fetch_value
from gradient.graph.reachability import UNNAMED_CLOSURES, pending_orphan_frontier
from gradient.graph.recounts import (
    AdoptPending,
    CanStartMended,
    RecountMissingRuntimeDeps,
    RecountUnwalkedInputs,
    RecountWanted,
    RepairCanStart,
    RepairFetchable,
    SettleSkipped,
)
from gradient.graph.statements import Statement
from gradient.graph.transaction import Message, Submit, ordered

T = TypeVar("T")

# Rows one message mends: its locks are gone within milliseconds, and the writer's other callers wait no
# longer than for a batch of an evaluation.
CHUNK: Final = 1000


@attrs.frozen
class ConsistencyReport:
    """How many rows each step had to mend."""

    walk_drift: int = 0
    runtime_drift: int = 0
    counter_drift: int = 0  # `fetchable`, `blocking_deps`, and what was queued without its conditions
    need_drift: int = 0
    skipped_moves: int = 0
    unpromoted_startable: int = 0
    adopted: int = 0
    eval_counter_drift: int = 0
    wedged_building_evals: int = 0

    @property
    def clean(self) -> bool:
        """Nothing had drifted."""
        return self == ConsistencyReport()


async def graph_consistency_report(connection: Connection, submit: Submit) -> ConsistencyReport:
    """Check the whole graph, mend what has drifted, and say how much that was.

    `connection` is the check's own for as long as it runs. Raises what `submit` raises; what was mended
    until then stays. Cancellation: likewise.
    """
    await execute(connection, SWEEP_SETTINGS)
    check = _Check(connection, submit)
    # In dependency order: each step counts over columns that the steps before it have mended.
    walk = await check.recount_unwalked_inputs()
    runtime = await check.recount_missing_runtime_deps()
    fetchable = await check.repair_fetchable()
    need = await check.recount_wanted()
    skipped = await check.settle_skipped()
    can_start = await check.repair_can_start()
    adopted = await check.adopt_pending_closures()
    counters, wedged = await check.recount_evaluations()
    return ConsistencyReport(
        walk_drift=walk,
        runtime_drift=runtime,
        counter_drift=fetchable + can_start.wrong,
        need_drift=need,
        skipped_moves=skipped,
        unpromoted_startable=can_start.startable,
        adopted=adopted,
        eval_counter_drift=counters,
        wedged_building_evals=wedged,
    )


@attrs.frozen
class _Check:
    """One run: `connection` reads, `submit` mends."""

    connection: Connection
    submit: Submit

    async def recount_unwalked_inputs(self) -> int:
        """How far the walk has come, from what is not recorded upward."""
        return await self._all_together(UNWALKED_INPUTS_DRIFT, RecountUnwalkedInputs)

    async def recount_missing_runtime_deps(self) -> int:
        """Complete closures, from what is not here upward."""
        return await self._all_together(MISSING_RUNTIME_DEPS_DRIFT, RecountMissingRuntimeDeps)

    async def repair_fetchable(self) -> int:
        """What is in the cache with its closure, and what is not."""
        return sum(await self._each_chunk(FETCHABLE_DRIFT, RepairFetchable, bool))

    async def recount_wanted(self) -> int:
        """The needs-build mark, from the entry points downward."""
        if not await fetch_value(self.connection, WANTED_IN_DOUBT):
            return 0
        return await self._all_together(WANTED_DRIFT, RecountWanted)

    async def settle_skipped(self) -> int:
        """Thaw and skip what the moves of the mark have left out."""
        return sum(await self._each_chunk(SKIPPED_DRIFT, SettleSkipped, bool))

    async def repair_can_start(self) -> CanStartMended:
        """Counters of the queue, then who leaves it and who enters it."""
        mended = await self._each_chunk(
            CAN_START_DRIFT, RepairCanStart, lambda found: bool(found.wrong or found.startable)
        )
        return CanStartMended(sum(m.wrong for m in mended), sum(m.startable for m in mended))

    async def adopt_pending_closures(self) -> int:
        """Names for what live evaluations wait for and none of them names."""
        adopted = 0
        while await pending_orphan_frontier(self.connection):
            names = await fetch_all(self.connection, UNNAMED_CLOSURES, {"limit": MOST})
            new = 0
            for chunk in _chunks([(evaluation, derivation) for evaluation, derivation in names]):
                new += await self.submit(AdoptPending(chunk))
            adopted += new
            if not new:
                break
        return adopted

    async def recount_evaluations(self) -> tuple[int, int]:
        """The five counters of every evaluation in flight; then verdicts that nothing keeps back."""
        found = await fetch_all(self.connection, EVALUATION_DRIFT)
        drifted = [evaluation for evaluation, wrong, _ in found if wrong]
        for evaluation in drifted:
            await recount_evaluations(self.connection, [evaluation])
        finished = [
            await self.submit(FinishEvaluation(evaluation)) for evaluation, _, wedged in found if wedged
        ]
        return len(drifted), sum(finished)

    # --- how ------------------------------------------------------------------------------------

    async def _ids(self, statement: Statement, **params: Any) -> list[int]:
        return [row[0] for row in await fetch_all(self.connection, statement, params)]

    async def _each_chunk(
        self,
        find: Statement,
        message: Callable[[tuple[int, ...]], Message[T]],
        mended_any: Callable[[T], bool],
    ) -> list[T]:
        """Have what `find` finds mended chunk by chunk, as often as it finds as much as it may."""
        answers: list[T] = []
        while True:
            found = await self._ids(find)
            new = [await self.submit(message(chunk)) for chunk in _chunks(ordered(found))]
            answers += new
            if len(found) < MOST or not any(map(mended_any, new)):
                return answers

    async def _all_together(
        self, find: Statement, message: Callable[[tuple[int, ...], int], Message[tuple[int, ...]]]
    ) -> int:
        """Mend a column of which one row's value rests on others': the suspects go together, because only on
        all of them is it seen which are wrong, and a chunk at a time is written."""
        wrong = 0
        while True:
            found = await self._ids(find)
            suspects, before = set(found), wrong
            while suspects:
                changed = await self.submit(message(tuple(ordered(suspects)), CHUNK))
                wrong += len(changed)
                suspects.difference_update(changed)
                if len(changed) < CHUNK:
                    break
            if len(found) < MOST or wrong == before:
                return wrong


def _chunks(rows: Sequence[T]) -> Iterator[tuple[T, ...]]:
    return (tuple(rows[start : start + CHUNK]) for start in range(0, len(rows), CHUNK))
