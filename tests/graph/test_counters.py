"""The five counters of an evaluation: folded under contention, recounted, and never lost."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from gradient.graph.counters import (
    FOLD_LOCK,
    Counters,
    eval_counters,
    fold_shared_build_deltas,
    recount_evaluations,
)
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.pg import Connection, fetch_all, fetch_value
from gradient.graph.requeue import LoseWorker
from gradient.graph.transaction import Transaction
from tests.graph.world import WORKER, World
from tests.patience import PATIENCE

GRAPH = {"top": ["a", "b"], "a": [], "b": []}


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[Connection]:
    async with await Connection.connect(database_url) as connection:
        yield connection


async def read(world: World, evaluation: int) -> Counters:
    tx = Transaction(world.connection, world.now)
    return (await eval_counters(tx, [evaluation]))[evaluation]


async def ledger(world: World) -> int:
    return int(await world.value("SELECT count(*) FROM evaluation_shared_build_delta"))


async def folded(world: World, evaluation: int) -> Counters:
    columns = "named_shared_builds, active_shared_builds, failed_shared_builds, queued_shared_builds"
    query = f"SELECT {columns}, building_shared_builds FROM evaluation WHERE id = {evaluation}"
    return Counters(*(await fetch_all(world.connection, query))[0])


async def test_reading_needs_no_fold(world: World) -> None:
    evaluation = await world.evaluation()
    assert await read(world, evaluation) == Counters(0, 0, 0, 0, 0)
    await world.record(evaluation, GRAPH, entries=["top"])
    assert await read(world, evaluation) == Counters(named=3, active=3, failed=0, queued=2, building=0)
    await world.start("a")
    assert await read(world, evaluation) == Counters(named=3, active=3, failed=0, queued=1, building=1)
    assert await folded(world, evaluation) == Counters(0, 0, 0, 0, 0)
    assert await fold_shared_build_deltas(world.connection)
    assert await ledger(world) == 0
    assert await folded(world, evaluation) == await read(world, evaluation)
    await world.check()


async def test_a_fold_beside_a_fold_does_nothing(world: World, other: Connection) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["top"])
    async with other.transaction():
        await other.execute(f"SELECT pg_advisory_xact_lock({FOLD_LOCK})".encode())
        assert not await fold_shared_build_deltas(world.connection)
    assert await ledger(world) > 0
    assert await fold_shared_build_deltas(world.connection)


async def test_a_row_somebody_holds_is_skipped_and_never_waited_for(world: World, other: Connection) -> None:
    held, free = await world.evaluation(), await world.evaluation()
    for evaluation in (held, free):
        await world.record(evaluation, GRAPH, entries=["top"])
    async with other.transaction():
        await other.execute(f"SELECT FROM evaluation WHERE id = {held} FOR NO KEY UPDATE".encode())
        with trio.fail_after(PATIENCE):
            assert await fold_shared_build_deltas(world.connection)
            await recount_evaluations(world.connection, [held])
        assert await folded(world, held) == Counters(0, 0, 0, 0, 0)
        assert (await folded(world, free)).named == 3
        await world.check()  # nothing was lost: what is not folded is still in the ledger
    assert await fold_shared_build_deltas(world.connection)
    assert (await folded(world, held)).named == 3
    assert await ledger(world) == 0


async def test_a_transaction_in_flight_keeps_its_deltas(world: World, other: Connection) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["top"])
    async with other.transaction():
        await other.execute("UPDATE derivation_build SET status = 2 WHERE status = 1")
        assert await fold_shared_build_deltas(world.connection)
        assert (await folded(world, evaluation)).building == 0
    assert (await read(world, evaluation)).building == 2
    assert await fold_shared_build_deltas(world.connection)
    assert (await folded(world, evaluation)).building == 2


async def test_a_recount_repairs_a_drift_and_takes_the_ledger_with_it(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["top"])
    right = await read(world, evaluation)
    await world.connection.execute(
        "UPDATE evaluation SET active_shared_builds = 40, failed_shared_builds = -3"
    )
    assert await read(world, evaluation) != right
    await recount_evaluations(world.connection, [evaluation])
    assert await read(world, evaluation) == await folded(world, evaluation) == right
    assert await ledger(world) == 0
    await world.check()


async def test_a_recount_leaves_what_has_ended(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["top"])
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    await fold_shared_build_deltas(world.connection)
    before = await folded(world, evaluation)
    await world.connection.execute("UPDATE evaluation SET named_shared_builds = 99")
    await recount_evaluations(world.connection, [evaluation])
    assert (await folded(world, evaluation)).named == 99
    assert before.named == 3


async def test_the_deltas_of_a_deleted_evaluation_go(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["top"])
    await world.apply(LoseWorker(WORKER))
    await world.connection.execute(f"DELETE FROM evaluation WHERE id = {evaluation}".encode())
    assert await ledger(world) > 0
    await fold_shared_build_deltas(world.connection)
    assert await ledger(world) == 0
    assert await fetch_value(world.connection, "SELECT count(*) FROM build_job") == 0
