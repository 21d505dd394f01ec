"""The consistency check: each kind of drift is found, reported under its field and mended; a clean graph
reports zero and is not written to; and a writer may work beside it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import attrs
import pytest
import trio

from gradient.graph import consistency
from gradient.graph.builds import BuildCompleted
from gradient.graph.consistency import ConsistencyReport, graph_consistency_report
from gradient.graph.counters import fold_shared_build_deltas
from gradient.graph.evaluation_end import AbortEvaluation, FailEvaluation
from gradient.graph.moves import Moves
from gradient.graph.nar import CommitNars
from gradient.graph.pg import Connection
from gradient.graph.reachability import adopt_pending_closures
from gradient.graph.record import Record
from gradient.graph.recounts import AdoptPending
from gradient.graph.transaction import Message, Transaction
from gradient.graph.writer import GraphWriter
from gradient.model import BuildStatus, EntryPoint, EvaluationStatus
from tests.graph.test_random_walk import Walk
from tests.graph.world import LIMITS, World, drv, nar, out
from tests.patience import PATIENCE

T = TypeVar("T")
CLEAN = ConsistencyReport()
# `lib` and `tool` are built, `leaf` is queued, `mid` and `top` wait; `held` is in the cache, so `unneeded`
# is Skipped; of `stub` nothing is known but its name.
GRAPH = {"top": ["mid", "tool"], "mid": ["lib", "leaf"], "lib": [], "leaf": [], "tool": ["lib"]}


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["top"])
    await world.build("lib")
    await world.build("tool", ["lib"])
    await world.commit(nar(out("held")))
    await world.record(evaluation, {"held": ["unneeded"], "unneeded": []}, entries=["held"])
    await world.end_stream(evaluation)
    partial = await world.evaluation()
    await world.record(partial, {"far": ["farther"], "farther": ["stub"]}, entries=["far"])
    await world.check()
    return world


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[Connection]:
    async with await Connection.connect(database_url) as connection:
        yield connection


async def check(world: World) -> ConsistencyReport:
    return await graph_consistency_report(world.connection, world.apply)


async def run(world: World, query: str) -> None:
    await world.connection.execute(query.encode())


def build(name: str) -> str:
    """The shared build of `name`, for a WHERE."""
    return f"derivation = (SELECT id FROM derivation WHERE name = '{name}')"


def write(name: str, column: str, value: object) -> str:
    return f"UPDATE derivation_build SET {column} = {value} WHERE {build(name)}"


DRIFT = {
    "a subtree that counts as unrecorded": (
        "UPDATE derivation SET unwalked_inputs = 5 WHERE name = 'mid'",
        {"walk_drift": 1},
    ),
    "and what stands on it too": (
        "UPDATE derivation SET unwalked_inputs = 1 WHERE name IN ('mid', 'top', 'leaf')",
        {"walk_drift": 3},
    ),
    "a subtree that counts as recorded": (
        "UPDATE derivation SET unwalked_inputs = 0 WHERE name IN ('far', 'farther')",
        {"walk_drift": 2},
    ),
    "a runtime dependency that is not missing": (
        write("tool", "missing_runtime_deps", 3),
        {"runtime_drift": 1},
    ),
    "the same below": (write("lib", "missing_runtime_deps", 1), {"runtime_drift": 1}),
    "a mark that was not set": (write("lib", "fetchable", False), {"counter_drift": 1}),
    "a mark that was not cleared": (write("leaf", "fetchable", True), {"counter_drift": 1}),
    "a lost spread of the mark": (
        f"{write('leaf', 'fetchable', True)}; {write('mid', 'blocking_deps', 0)}",
        {"counter_drift": 1},
    ),
    "a build that waits for what is here": (
        f"UPDATE derivation_output SET is_cached = true WHERE {build('leaf')}",
        {"counter_drift": 1},
    ),
    "a success whose output is gone": (
        f"UPDATE derivation_output SET is_cached = false WHERE {build('lib')}",
        {"runtime_drift": 1, "counter_drift": 2},
    ),
    "need that was not gained": (write("leaf", "wanted", False), {"need_drift": 1}),
    "need that was not gained at the top": (write("top", "wanted", False), {"need_drift": 1}),
    "need that nothing has": (write("unneeded", "wanted", True), {"need_drift": 1}),
    "no need at all": ("UPDATE derivation_build SET wanted = false", {"need_drift": 6}),
    "a thaw that was lost": (write("leaf", "status", 10), {"skipped_moves": 1}),
    "a thaw of an abort that was lost": (write("leaf", "status", 5), {"skipped_moves": 1}),
    # Until it thaws it needs nothing, and `leaf` is skipped for as long.
    "the same higher up": (write("mid", "status", 5), {"need_drift": 1, "skipped_moves": 1}),
    "a skip that was lost": (write("unneeded", "status", 0), {"skipped_moves": 1}),
    "a count that is too high": (write("mid", "blocking_deps", 7), {"counter_drift": 1}),
    "a count that is too low": (write("top", "blocking_deps", 0), {"counter_drift": 1}),
    "a build that never queued": (write("leaf", "status", 0), {"unpromoted_startable": 1}),
    "a build that queued too early": (write("mid", "status", 1), {"counter_drift": 1}),
    "a build that queued for nobody": (write("unneeded", "status", 1), {"counter_drift": 1}),
    "a zero that queued nothing": (
        f"UPDATE derivation_build SET status = 0, blocking_deps = 1 WHERE {build('leaf')}",
        {"counter_drift": 1, "unpromoted_startable": 1},
    ),
    "a name that is gone": (
        f"DELETE FROM build_job WHERE {build('leaf')}",
        {"counter_drift": 1, "adopted": 1},
    ),
    "all names but the top": (
        "DELETE FROM build_job j USING derivation d WHERE d.id = j.derivation AND d.name IN ('mid', 'leaf')",
        {"counter_drift": 1, "adopted": 2},
    ),
    "counters of an evaluation": (
        "UPDATE evaluation SET active_shared_builds = 40, failed_shared_builds = -3 WHERE status = 3",
        {"eval_counter_drift": 1},
    ),
    "deltas that were lost": ("TRUNCATE evaluation_shared_build_delta", {"eval_counter_drift": 2}),
}


@pytest.mark.parametrize("drift", DRIFT)
async def test_drift_is_found_reported_and_mended(world: World, drift: str) -> None:
    statements, expected = DRIFT[drift]
    for statement in statements.split("; "):
        await run(world, statement)
    assert await check(world) == attrs.evolve(CLEAN, **expected)
    await world.check()
    assert await check(world) == CLEAN


async def test_a_clean_graph_is_not_written_to(world: World, other: Connection) -> None:
    """Not even a lock is waited for: another transaction holds every row."""

    async def refuse(message: Message[T]) -> T:
        raise AssertionError(f"nothing is to be mended: {message}")

    async with other.transaction():
        for table in ("derivation", "derivation_build", "evaluation", "build_job"):
            await other.execute(f"SELECT FROM {table} FOR UPDATE".encode())
        with trio.fail_after(PATIENCE):
            assert await graph_consistency_report(world.connection, refuse) == CLEAN


async def test_an_evaluation_that_nothing_keeps_from_its_verdict_gets_it(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"lib": []}, entries=["lib"])
    await world.end_stream(evaluation)
    assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED
    await run(world, f"UPDATE evaluation SET status = 3, finished_at = NULL WHERE id = {evaluation}")
    assert await check(world) == attrs.evolve(CLEAN, wedged_building_evals=1)
    assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED
    assert await check(world) == CLEAN


async def test_an_evaluation_with_wrong_counters_gets_its_verdict_too(world: World) -> None:
    """The drift had kept it from finishing: counters are mended before the verdict is asked for."""
    await world.build("leaf")
    await run(world, "UPDATE evaluation SET active_shared_builds = active_shared_builds + 1 WHERE status = 3")
    await world.build("mid")
    await world.build("top")
    evaluation = await world.value("SELECT min(id) FROM evaluation")
    assert await world.evaluation_status(evaluation) is EvaluationStatus.BUILDING
    found = attrs.evolve(CLEAN, eval_counter_drift=1, wedged_building_evals=1)
    assert await check(world) == found
    assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED


async def test_marks_that_only_hold_up_each_other_are_cleared(world: World) -> None:
    evaluation = await world.evaluation()
    await world.commit(nar(out("kept")))
    await world.record(evaluation, {"kept": ["x"], "x": ["y"], "y": []}, entries=["kept"])
    x, y = await world.id("x"), await world.id("y")
    await run(world, f"INSERT INTO derivation_dependency VALUES ({y}, {x}, 1)")
    circle = "blocking_deps = 1, missing_runtime_deps = 1"
    await run(world, f"UPDATE derivation_build SET {circle} WHERE derivation = {y}")
    assert await check(world) == CLEAN
    await run(world, f"UPDATE derivation_build SET wanted = true, status = 0 WHERE derivation IN ({x}, {y})")
    assert await check(world) == attrs.evolve(CLEAN, need_drift=2)
    assert await world.status("x") is await world.status("y") is BuildStatus.SKIPPED
    await world.check()


async def test_counters_in_a_circle_come_to_rest(world: World) -> None:
    """No real graph has one; a walk of all that is wrong must end on it all the same."""
    leaf, top = await world.id("leaf"), await world.id("top")
    await run(world, f"INSERT INTO derivation_dependency VALUES ({leaf}, {top}, 0)")
    await run(world, "UPDATE derivation SET unwalked_inputs = 3 WHERE name IN ('top', 'mid', 'leaf')")
    assert (await check(world)).walk_drift > 0
    assert await check(world) == CLEAN


async def test_adoption_names_what_live_evaluations_wait_for(world: World) -> None:
    """As after the deletion of the evaluation that walked it: the second names the top of a pruned walk."""
    second = await world.evaluation()
    await world.apply(Record(second, (), (EntryPoint("top", drv("top")),)))
    first = await world.value("SELECT min(id) FROM evaluation")
    await run(world, f"DELETE FROM evaluation WHERE id = {first}")
    assert await world.apply(Adopt()) == 2
    named = (
        "SELECT array_agg(d.name ORDER BY d.name) FROM build_job j JOIN derivation d ON d.id = j.derivation"
    )
    assert await world.value(f"{named} WHERE j.evaluation = %s", second) == ["leaf", "mid", "top"]
    assert second in world.moves.progressed
    await world.check()
    assert await world.apply(Adopt()) == 0
    assert await check(world) == CLEAN


async def test_adoption_looks_what_is_needed_below(world: World) -> None:
    second = await world.evaluation()
    await world.apply(Record(second, (), (EntryPoint("top", drv("top")),)))
    await run(world, write("leaf", "wanted", False))
    await run(world, write("leaf", "status", int(BuildStatus.SKIPPED)))
    assert await world.apply(Adopt()) == 1  # `mid`
    await world.check()
    assert await world.status("leaf") is BuildStatus.QUEUED


async def test_the_dead_adopt_nothing(world: World) -> None:
    first = await world.value("SELECT min(id) FROM evaluation")
    await run(world, f"DELETE FROM build_job WHERE {build('leaf')}")
    await world.apply(AbortEvaluation(first, "by a person"))
    assert await world.apply(Adopt()) == 0
    assert (await check(world)).adopted == 0


async def test_one_that_has_ended_since_it_was_found_is_given_no_name(world: World) -> None:
    """It wants its closure still, and waits for nothing."""
    first = await world.value("SELECT min(id) FROM evaluation")
    leaf = await world.id("leaf")
    await run(world, f"DELETE FROM build_job WHERE {build('leaf')}")
    await world.apply(FailEvaluation(first, "test", "over"))
    assert await world.value("SELECT wanted FROM derivation_build WHERE derivation = %s", leaf)
    assert await world.apply(AdoptPending(((first, leaf),))) == 0


@attrs.frozen
class Adopt:
    """The adoption as the collection of evaluations calls it."""

    async def apply(self, tx: Transaction) -> int:
        return await adopt_pending_closures(tx)


# --- with a writer beside it ----------------------------------------------------------------------


async def test_what_moved_since_it_was_found_is_judged_as_it_is_now(world: World) -> None:
    """Between the look and the message the evaluation is aborted: nobody needs `leaf` any more."""
    first = await world.value("SELECT min(id) FROM evaluation")
    await run(world, write("leaf", "wanted", False))
    due: list[Message[Any]] = [AbortEvaluation(first, "by a person")]

    async def after_that(message: Message[T]) -> T:
        while due:
            await world.apply(due.pop())
        return await world.apply(message)

    assert await graph_consistency_report(world.connection, after_that) == CLEAN
    assert await world.status("leaf") is BuildStatus.ABORTED
    await world.check()


async def test_a_transition_between_the_look_and_the_recount_is_counted_once(world: World) -> None:
    await world.start("leaf")
    await run(world, write("mid", "blocking_deps", 7))
    due: list[Message[Any]] = [
        CommitNars(1, (nar(out("leaf")),)),
        BuildCompleted(world.open.pop("leaf"), LIMITS),
    ]

    async def after_that(message: Message[T]) -> T:
        while due:
            await world.apply(due.pop(0))
        return await world.apply(message)

    report = await graph_consistency_report(world.connection, after_that)
    assert report == attrs.evolve(CLEAN, counter_drift=1, unpromoted_startable=1)
    assert await world.status("mid") is BuildStatus.QUEUED
    await world.check()


class Beside(World):
    """A world whose messages go through a real writer."""

    writer: GraphWriter

    async def apply(self, message: Message[T]) -> T:
        return await self.writer.submit(message)


async def test_a_writer_works_beside_it(database_url: str, connection: Connection, other: Connection) -> None:
    world = Beside(connection)
    await world.setup()
    world.writer = GraphWriter(database_url, ignore, lambda: datetime.now(UTC))
    names = [f"n{i}" for i in range(40)]
    graph = {name: names[max(0, i - 3) : i] for i, name in enumerate(names)}
    reports: list[ConsistencyReport] = []

    async def check_again_and_again() -> None:
        while not await built():
            reports.append(await graph_consistency_report(other, world.writer.submit))

    async def built() -> bool:
        query = "SELECT count(*) = 40 AND bool_and(fetchable) FROM derivation_build"
        cursor = await other.execute(query)
        return bool((await cursor.fetchone() or [False])[0])

    async with trio.open_nursery() as root:
        await root.start(world.writer.run)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check_again_and_again)
            evaluation = await world.evaluation()
            for start in range(0, 40, 8):
                batch = names[start : start + 8]
                await world.record(evaluation, {name: graph[name] for name in batch}, entries=batch[-1:])
            await world.end_stream(evaluation)
            for name in names:
                await world.build(name, graph[name][:1])
        world.writer.close()
    assert set(reports) == {CLEAN}
    await fold_shared_build_deltas(connection)
    await world.check()


def ignore(moves: Moves) -> None:
    """Nobody follows this writer."""


# --- anything at all ------------------------------------------------------------------------------

COLUMNS = {
    "unwalked_inputs": "UPDATE derivation SET unwalked_inputs = {number} WHERE id = {row}",
    "missing_runtime_deps": "{build} SET missing_runtime_deps = {number} WHERE derivation = {row}",
    "blocking_deps": "{build} SET blocking_deps = {number} WHERE derivation = {row}",
    "fetchable": "{build} SET fetchable = NOT fetchable WHERE derivation = {row}",
    "wanted": "{build} SET wanted = NOT wanted WHERE derivation = {row}",
    "queue": "{build} SET status = 1 - status WHERE status IN (0, 1) AND derivation = {row}",
    "names": "DELETE FROM build_job WHERE derivation = {row}",
    "counters": "UPDATE evaluation SET active_shared_builds = {number} - 1 WHERE id = {number}",
}


async def anything_wrong(world: World) -> bool:
    try:
        await world.check()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(i, marks=pytest.mark.full) for i in range(6, 60))]
)
async def test_whatever_was_scrambled_is_right_again(
    connection: Connection, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(consistency, "CHUNK", dice.choice((1, 2, 1000)))
    world = World(connection)
    await world.setup()
    walk = Walk(world, dice)
    rows = None
    while rows is None:
        for _ in range(40):
            await walk.step()
        rows = await world.value("SELECT array_agg(id ORDER BY id) FROM derivation")
    while not await anything_wrong(world):
        for _ in range(dice.choice((3, 10, 30))):
            column = COLUMNS[dice.choice(list(COLUMNS))]
            await run(
                world,
                column.format(
                    build="UPDATE derivation_build", row=dice.choice(rows), number=dice.choice((0, 1, 2, 5))
                ),
            )
    assert await check(world) != CLEAN
    await world.check()
    assert await check(world) == CLEAN
