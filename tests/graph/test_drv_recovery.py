"""A live evaluation waits for a `.drv` that is gone: it is brought again, or the evaluation ends in words."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gradient.graph.demote import DemoteMissingNar
from gradient.graph.drv_recovery import RecoverDrv
from gradient.graph.evaluation_end import AbortEvaluation, FailEvaluation
from gradient.graph.evaluations import ParkEvaluation
from gradient.graph.heal import Repair
from gradient.graph.pg import Connection
from gradient.model import BuildStatus, EvaluationStatus
from tests.graph.world import World, hash_part

GRAPH = {"app": ["lib"], "lib": []}
STUCK = {"kind": "graph_stuck", "pending_shared_builds": 2}
B = BuildStatus
E = EvaluationStatus
LOST = "the .drv file of lib is gone from the cache"


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def stuck(world: World) -> int:
    """An evaluation that waits for `lib`, which cannot be built without its `.drv`."""
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["app"])
    await world.end_stream(evaluation)
    await world.apply(DemoteMissingNar((hash_part("lib.drv"),)))
    # The waiting pass heals it in vain, and parks it.
    await world.apply(Repair(evaluation))
    assert await world.statuses() == {"app": B.CREATED, "lib": B.CREATED}
    await world.apply(ParkEvaluation(evaluation, E.BUILDING, STUCK))
    return evaluation


async def messages(world: World, evaluation: int) -> list[str]:
    query = "SELECT coalesce(array_agg(message ORDER BY id), '{}') FROM evaluation_message"
    found: list[str] = await world.value(f"{query} WHERE evaluation = %s", evaluation)
    return found


async def recovery(world: World, evaluation: int) -> int:
    """The one that was begun for it."""
    world.now += timedelta(minutes=2)
    begun = await world.apply(RecoverDrv(evaluation))
    assert begun is not None
    return begun


async def test_another_evaluation_brings_it_back(world: World) -> None:
    evaluation = await stuck(world)
    second = await recovery(world, evaluation)
    assert world.moves.evaluations == {second: E.QUEUED}
    told = f"{LOST}: evaluation {second} walks the same source to bring it back"
    assert await messages(world, evaluation) == [told]
    same = "SELECT count(DISTINCT (repository, commit, wildcards, task)) FROM evaluation"
    assert await world.value(same) == 1
    query = "SELECT (kind, walk_mode, concurrent, recovers)::text FROM evaluation WHERE id = %s"
    assert await world.value(query, second) == f"(2,1,t,{evaluation})"
    # As long as it goes on, nothing else happens.
    world.now += timedelta(minutes=5)
    assert await world.apply(RecoverDrv(evaluation)) is None
    await world.start_evaluation(second)
    await world.record(second, GRAPH, entries=["app"])
    await world.end_stream(second)
    await world.check()
    await world.build("lib")
    await world.build("app")
    assert await world.evaluation_status(evaluation) is E.COMPLETED
    assert await world.evaluation_status(second) is E.COMPLETED
    await world.check()


async def test_what_it_has_not_brought_back_fails_the_evaluation_in_words(world: World) -> None:
    evaluation = await stuck(world)
    second = await recovery(world, evaluation)
    await world.apply(FailEvaluation(second, "fetch", "the repository is gone"))
    assert await world.apply(RecoverDrv(evaluation)) is None
    assert await world.evaluation_status(evaluation) is E.FAILED
    told = f"{LOST}, and evaluation {second} has not brought it back: evaluate again"
    assert (await messages(world, evaluation))[-1] == told
    await world.check()


async def test_a_recovery_that_is_stuck_itself_fails(world: World) -> None:
    evaluation = await stuck(world)
    second = await recovery(world, evaluation)
    await world.start_evaluation(second)
    await world.record(second, GRAPH, entries=["app"])
    await world.apply(DemoteMissingNar((hash_part("lib.drv"),)))
    await world.end_stream(second)
    await world.apply(ParkEvaluation(second, E.BUILDING, STUCK))
    assert await world.apply(RecoverDrv(second)) is None
    assert await world.evaluation_status(second) is E.WAITING
    world.now += timedelta(minutes=2)
    assert await world.apply(RecoverDrv(second)) is None
    assert await world.evaluation_status(second) is E.FAILED
    assert await messages(world, second) == [
        f"{LOST}, and this evaluation has not brought it back: evaluate again"
    ]
    await world.check()


async def test_only_what_has_been_stuck_for_long_is_recovered(world: World) -> None:
    evaluation = await stuck(world)
    world.now += timedelta(seconds=115)
    assert await world.apply(RecoverDrv(evaluation)) is None
    assert await world.value("SELECT count(*) FROM evaluation") == 1
    world.now += timedelta(seconds=5)
    assert await world.apply(RecoverDrv(evaluation)) is not None


async def test_what_waits_for_something_else_is_left_alone(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["app"])
    await world.end_stream(evaluation)
    # That will be due once `lib` is there.
    await world.apply(DemoteMissingNar((hash_part("app.drv"),)))
    for reason in (STUCK, {"kind": "workers", "unmet": []}):
        await world.connection.execute("UPDATE evaluation SET status = 3, waiting_reason = NULL")
        await world.apply(ParkEvaluation(evaluation, E.BUILDING, reason))
        world.now += timedelta(hours=1)
        assert await world.apply(RecoverDrv(evaluation)) is None
    assert await world.evaluation_status(evaluation) is E.WAITING


async def test_nor_is_one_that_has_ended(world: World) -> None:
    evaluation = await stuck(world)
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    world.now += timedelta(hours=1)
    assert await world.apply(RecoverDrv(evaluation)) is None
    assert await world.value("SELECT count(*) FROM evaluation") == 1
