"""The abort of an evaluation: it stops what no other live one wants, whatever ended ones still want."""

from __future__ import annotations

import attrs
import pytest

from gradient.graph import evaluation_reads
from gradient.graph.builds import BuildStarted
from gradient.graph.consistency import ConsistencyReport, graph_consistency_report
from gradient.graph.evaluation_end import FailEvaluation
from gradient.graph.evaluation_gc import CollectEvaluations
from gradient.graph.pg import Connection
from gradient.graph.record import Record
from gradient.model import BuildStatus, EntryPoint, EvaluationStatus
from tests.graph.world import World, drv, nar, out

CHAIN = {"top": ["mid"], "mid": ["bad", "good"], "bad": [], "good": []}
B = BuildStatus
E = EvaluationStatus


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def ended(world: World, graph: dict[str, list[str]], *entries: str) -> int:
    """One that has failed, and wants its closure still."""
    evaluation = await world.building(graph, *entries)
    await world.apply(FailEvaluation(evaluation, "test", "over"))
    return evaluation


async def pruned(world: World, *entries: str) -> int:
    """A running evaluation that has named nothing but entry points which the graph knows."""
    evaluation = await world.evaluation()
    await world.apply(Record(evaluation, (), tuple(EntryPoint(name, drv(name)) for name in entries)))
    return evaluation


async def marked(world: World, evaluation: int) -> set[str]:
    """What was aborted for it."""
    cursor = await world.connection.execute(
        "SELECT d.name FROM build_job j JOIN derivation d ON d.id = j.derivation"
        " WHERE j.evaluation = %s AND j.aborted",
        (evaluation,),
    )
    return {name for (name,) in await cursor.fetchall()}


async def settled(world: World) -> None:
    """Every column is right, and the consistency check brings nothing back."""
    await world.check()
    before = await world.statuses()
    report = await graph_consistency_report(world.connection, world.apply)
    assert attrs.evolve(report, adopted=0) == ConsistencyReport()
    assert await world.statuses() == before


async def test_what_only_an_ended_evaluation_wants_is_stopped_and_stays_so(world: World) -> None:
    await ended(world, CHAIN, "top")
    evaluation = await world.building(CHAIN, "top")
    await world.start("bad")
    await world.abort(evaluation)
    assert set((await world.statuses()).values()) == {B.ABORTED}
    assert [abort.job_id for abort in world.moves.aborts] == [f"build:{await world.id('bad')}"]
    # Nothing is wanted below a build that is held: it comes back with it.
    assert await marked(world, evaluation) == {"top"}
    await settled(world)
    await world.confirm_abort("bad")
    await settled(world)
    assert await world.status("bad") is B.ABORTED


async def test_whoever_asks_anew_gets_all_of_it(world: World) -> None:
    await ended(world, CHAIN, "top")
    await world.abort(await world.building(CHAIN, "top"))
    third = await pruned(world, "top")
    await world.end_stream(third)
    await world.check()
    for name in ("bad", "good", "mid", "top"):
        await world.build(name)
    assert await world.evaluation_status(third) is E.COMPLETED
    await world.check()


async def test_what_is_wanted_on_two_ways_is_held_on_both(world: World) -> None:
    """`bad` is an entry point of the ended one, so it is wanted though nothing above it is built."""
    await ended(world, CHAIN, "top", "bad")
    evaluation = await world.building(CHAIN, "top")
    await world.abort(evaluation)
    assert await marked(world, evaluation) == {"top", "bad"}
    await settled(world)
    third = await pruned(world, "top")
    await world.end_stream(third)
    await settled(world)
    assert await world.statuses() == {"top": B.CREATED, "mid": B.CREATED, "bad": B.QUEUED, "good": B.QUEUED}


async def test_what_a_live_one_wants_below_its_names_goes_on(world: World) -> None:
    """Its walk has stopped at `top`: it names nothing else, and wants all of it."""
    await ended(world, CHAIN, "top")
    evaluation = await world.building(CHAIN, "top")
    await pruned(world, "top")
    await world.start("bad")
    before = await world.statuses()
    await world.abort(evaluation)
    assert (await world.statuses(), world.moves.aborts) == (before, [])
    assert await marked(world, evaluation) == set()
    await settled(world)


async def test_what_a_live_one_names_goes_on(world: World) -> None:
    """It has no use for it, or does not know yet that it has: an abort would not hold, and fail it."""
    await ended(world, {"tool": []}, "tool")
    evaluation = await world.building({"tool": []}, "tool")
    other = await world.evaluation()
    await world.commit(nar(out("held")))
    await world.record(other, {"held": ["tool"]}, entries=["held"])
    await world.start("tool")
    await world.abort(evaluation)
    assert (await world.status("tool"), world.moves.aborts) == (B.BUILDING, [])
    await world.end_stream(other)
    await world.commit(nar(out("tool")))
    await world.complete("tool")
    assert await world.evaluation_status(other) is E.COMPLETED
    await world.check()


async def test_a_live_one_keeps_what_it_wants_and_no_more(world: World) -> None:
    await ended(world, {**CHAIN, "alone": []}, "top", "alone")
    evaluation = await world.building({**CHAIN, "alone": []}, "top", "alone")
    other = await world.building({"good": []}, "good")
    await world.start("alone")
    await world.abort(evaluation)
    assert await world.statuses() == {
        "top": B.ABORTED,
        "mid": B.ABORTED,
        "bad": B.ABORTED,
        "alone": B.ABORTED,
        "good": B.QUEUED,
    }
    assert not await world.apply(BuildStarted(world.open["alone"]))
    await settled(world)
    await world.abort(other)
    assert await world.status("good") is B.ABORTED
    await settled(world)


async def test_what_runs_below_without_a_name_is_stopped_too(world: World) -> None:
    """A pruned stream that is aborted before its end has named the top alone."""
    await ended(world, CHAIN, "top")
    evaluation = await pruned(world, "top")
    await world.start("bad")
    await world.abort(evaluation)
    assert set((await world.statuses()).values()) == {B.ABORTED}
    assert f"build:{await world.id('bad')}" in {abort.job_id for abort in world.moves.aborts}
    assert await marked(world, evaluation) == {"top"}
    await settled(world)


async def test_a_retry_takes_up_all_of_an_aborted_evaluation(world: World) -> None:
    await ended(world, CHAIN, "top", "bad")
    evaluation = await world.building({**CHAIN, "x": []}, "top", "x")
    await world.abort(evaluation)
    await world.retry_build("x", evaluation)
    assert await marked(world, evaluation) == set()
    await settled(world)
    for name in ("bad", "good", "mid", "top", "x"):
        await world.build(name)
    assert await world.evaluation_status(evaluation) is E.COMPLETED
    await world.check()


async def test_also_what_was_aborted_by_itself_before(world: World) -> None:
    evaluation = await world.building({"a": [], "b": []}, "a", "b")
    await world.abort_build("a")
    await world.abort(evaluation)
    await world.retry_build("b")
    assert await world.statuses() == {"a": B.QUEUED, "b": B.QUEUED}
    await settled(world)


async def test_the_abort_of_one_that_has_ended_fails_nobody_who_has_no_use_for_it(world: World) -> None:
    first = await ended(world, {"tool": []}, "tool")
    evaluation = await world.building({"tool": []}, "tool")
    await world.abort(evaluation)
    assert await marked(world, evaluation) == {"tool"}
    await world.apply(CollectEvaluations((first,)))
    await settled(world)
    await world.commit(nar(out("held")))
    third = await world.building({"held": ["tool"], "x": []}, "held", "x")
    assert await world.status("tool") is B.SKIPPED
    await world.build("x")
    assert await world.evaluation_status(third) is E.COMPLETED
    await settled(world)


async def test_but_the_abort_for_a_live_one_is_its_failure(world: World) -> None:
    evaluation = await world.building({"tool": [], "y": []}, "tool", "y")
    await world.abort_build("tool")
    await world.commit(nar(out("held")))
    await world.building({"held": ["tool"]}, "held")
    assert await world.status("tool") is B.ABORTED
    await world.build("y")
    assert await world.evaluation_status(evaluation) is E.FAILED
    await world.check()


async def test_its_counters_are_those_of_its_end(world: World) -> None:
    """What the abort ended has failed; what goes on for another one is still to come."""
    await world.building({"shared": []}, "shared")
    evaluation = await world.building({**CHAIN, "shared": []}, "top", "shared")
    for name in ("bad", "shared"):
        await world.apply(BuildStarted(await world.claim(name)))
    await world.abort(evaluation)
    row = await evaluation_reads.evaluation(world.connection, evaluation)
    assert row is not None
    counted = (row.named, row.active, row.failed, row.queued, row.building)
    assert counted == (5, 1, 4, 0, 1)
