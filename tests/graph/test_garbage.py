"""The pass that collects garbage, beside imports that go on."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial

import attrs
import pytest
import trio
import trio.testing

from gradient.graph.assignments import ClaimEvaluation
from gradient.graph.evaluation_end import AbortEvaluation, FailEvaluation
from gradient.graph.evaluation_reports import EvaluationPhase
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.nar import CommitNars
from gradient.graph.pg import Connection
from gradient.graph.pg_pool import Pool
from gradient.graph.record import Record
from gradient.graph.writer import GraphWriter
from gradient.model import EntryPoint, EvaluationStatus, Repository
from gradient.nursery.health import HealthTable
from gradient.nursery.periodic import periodic
from gradient.passes import garbage
from gradient.passes.garbage import Garbage
from gradient.settings.tables import Eval, Gc
from tests.graph.world import WORKER, World, derivation, drv, nar, out
from tests.patience import PATIENCE

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@attrs.define
class Clock:
    """The time, moved by hand."""

    now: datetime = NOW

    def __call__(self) -> datetime:
        return self.now

    def days(self, days: float) -> None:
        self.now += timedelta(days=days)


@attrs.define(eq=False)
class Yard:
    """A writer at work, a collector, and what tests ask of the database."""

    writer: GraphWriter
    garbage: Garbage
    clock: Clock
    world: World

    async def begin(self) -> int:
        """An evaluation that a worker evaluates."""
        evaluation = await self.writer.submit(
            CreateEvaluation("main", Repository("git+https://example.org/x"))
        )
        assignment = await self.writer.submit(ClaimEvaluation(evaluation, WORKER, "w"))
        assert assignment is not None
        await self.writer.submit(EvaluationPhase(assignment, EvaluationStatus.EVALUATING_DERIVATION))
        return evaluation

    async def evaluate(self, name: str, *below: str) -> int:
        """An evaluation of a chain, all of it walked, that was aborted in the end."""
        evaluation = await self.begin()
        chain = [name, *below]
        await self.writer.submit(CommitNars(1, tuple(nar(drv(link)) for link in chain)))
        walked = tuple(derivation(link, chain[i + 1 : i + 2]) for i, link in enumerate(chain))
        await self.writer.submit(Record(evaluation, walked, (EntryPoint(name, drv(name)),)))
        await self.writer.submit(AbortEvaluation(evaluation, "enough"))
        return evaluation

    async def count(self, table: str) -> int:
        return int(await self.world.value(f"SELECT count(*) FROM {table}"))


@pytest.fixture
async def yard(connection: Connection, pool: Pool, database_url: str) -> AsyncIterator[Yard]:
    world = World(connection)
    await world.setup()
    clock = Clock()
    async with trio.open_nursery() as nursery:
        writer = GraphWriter(database_url, lambda moves: None, clock)
        garbage = Garbage(pool, writer.submit, Gc(), Eval(max_keep=2), clock)
        writer.publish = garbage.moved
        await nursery.start(writer.run)
        yield Yard(writer, garbage, clock, world)
        writer.close()


async def test_one_thing_lets_go_of_the_next(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant in ("DERIVATIONS_AT_ONCE", "PATHS_AT_ONCE", "PAGE"):
        monkeypatch.setattr(garbage, constant, 2)
    for number in range(5):
        await yard.evaluate(f"top{number}", f"mid{number}", "shared")
    # A chain of references that nothing needs, five deep.
    paths = [out(f"p{i}") for i in range(5)]
    await yard.writer.submit(CommitNars(1, tuple(nar(p, paths[i + 1 : i + 2]) for i, p in enumerate(paths))))
    await yard.garbage.collect()
    assert (await yard.count("evaluation"), await yard.count("derivation")) == (2, 11)
    yard.clock.days(2)
    await yard.garbage.collect()
    assert (await yard.count("derivation"), await yard.count("cached_path")) == (5, 16)
    yard.clock.days(15)
    await yard.garbage.collect()
    assert await yard.count("cached_path") == 5
    assert await yard.count("retired_nar") == 11
    await yard.world.check()


async def test_an_old_evaluation_goes_as_soon_as_another_has_ended(yard: Yard) -> None:
    """Nobody waits for an hour to pass."""
    collects = partial(
        periodic, "old evaluations", math.inf, 60, yard.garbage.collect_evaluations, health=HealthTable()
    )
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(collects, wake=yard.garbage.ended))
            for number in range(5):
                await yard.evaluate(f"top{number}")
            while await yard.count("evaluation") > 2:  # noqa: ASYNC110 - the collector says nothing
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()


async def test_an_evaluation_that_goes_on_wakes_no_collector(yard: Yard) -> None:
    woken = False

    async def sleep() -> None:
        nonlocal woken
        await yard.garbage.ended.wait()
        woken = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep)
        evaluation = await yard.begin()
        await trio.testing.wait_all_tasks_blocked()
        assert not woken
        await yard.writer.submit(FailEvaluation(evaluation, "test", "it broke"))


async def test_what_is_set_to_be_kept_is_kept(yard: Yard) -> None:
    await yard.evaluate("top")
    yard.clock.days(100)
    await yard.world.connection.execute("DELETE FROM evaluation")
    keeps_all = attrs.evolve(yard.garbage.settings, nar_ttl_hours=0, orphan_derivation_hours=24 * 365)
    yard.garbage = Garbage(yard.garbage.readers, yard.writer.submit, keeps_all, Eval(max_keep=0), yard.clock)
    await yard.garbage.collect()
    assert (await yard.count("derivation"), await yard.count("cached_path")) == (1, 1)


async def test_imports_and_the_collector_beside_each_other(yard: Yard) -> None:
    """Each evaluation names again what the one before it left for collection."""
    done = 0

    async def imports(number: int) -> None:
        nonlocal done
        for turn in range(12):
            await yard.evaluate(f"top{number}{turn}", f"mid{number}", f"low{turn % 3}", "shared")
            yard.clock.days(0.4)
        done += 1

    async def collects() -> None:
        while done < 3:
            await yard.garbage.collect()

    with trio.fail_after(10 * PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collects)
            for number in range(3):
                nursery.start_soon(imports, number)
    await yard.world.check()
    yard.clock.days(2)
    await yard.garbage.collect()
    await yard.world.check()
    # Two evaluations are kept, of four derivations each, which they share in part.
    assert await yard.count("evaluation") == 2
    assert 5 <= await yard.count("derivation") <= 8
