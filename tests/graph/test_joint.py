"""Messages of a crowd of builds, applied together: as if they had come one after the other."""

from __future__ import annotations

import math
import random
from typing import Any

import attrs
import pytest
import trio

from gradient.graph.assignments import ClaimBuild
from gradient.graph.build_outputs import StoreBuildOutput
from gradient.graph.builds import BuildCompleted, BuildStarted
from gradient.graph.moves import Moves
from gradient.graph.nar import CommitNars
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.record import Record
from gradient.graph.writer import GraphWriter, Reply
from gradient.model import (
    EVALUATION_TERMINAL,
    TERMINAL_SUCCESS,
    BuildMetrics,
    BuildProduct,
    BuildStatus,
    BuiltOutput,
    EntryPoint,
    EvaluationStatus,
)
from tests.graph.universe import Universe
from tests.graph.world import LIMITS, START, WORKER, World, derivation, drv, nar, out

SIZE = 40
CALLERS = 8


@attrs.define(eq=False)
class Crowd:
    """A world whose builds are made by several callers through a graph writer. `queued` ends with the
    evaluation."""

    world: World
    writer: GraphWriter
    queued: trio.MemoryReceiveChannel[int]

    async def recorded(self, records: dict[str, Any]) -> int:
        """An evaluation of these derivations, its stream ended."""
        evaluation = await self.world.evaluation()
        points = tuple(EntryPoint(name, drv(name)) for name in records)
        await self.writer.submit(CommitNars(1, tuple(nar(drv(name)) for name in records)))
        await self.writer.submit(Record(evaluation, tuple(records.values()), points))
        await self.world.end_stream(evaluation)
        return evaluation

    async def names(self) -> dict[int, str]:
        return dict(await fetch_all(self.world.connection, "SELECT id, name FROM derivation"))

    async def claim(self, name: str) -> int:
        assignment = await self.writer.submit(ClaimBuild(await self.world.id(name), False, WORKER, "w"))
        assert assignment is not None
        return assignment


@pytest.fixture
async def crowd(database_url: str, connection: Connection, nursery: trio.Nursery) -> Crowd:
    world = World(connection)
    await world.setup()
    send, receive = trio.open_memory_channel[int](math.inf)

    def publish(moves: Moves) -> None:
        for build in moves.queued:
            send.send_nowait(build)
        if any(status in EVALUATION_TERMINAL for status in moves.evaluations.values()):
            send.close()

    writer = GraphWriter(database_url, publish, lambda: START)
    await nursery.start(writer.run)
    return Crowd(world, writer, receive)


@pytest.mark.parametrize("seed", range(3))
async def test_a_crowd_of_callers_builds_everything(crowd: Crowd, seed: int) -> None:
    universe = Universe.of(random.Random(seed), SIZE)
    evaluation = await crowd.recorded({name: universe.record(name) for name in universe.inputs})
    names = await crowd.names()
    submit, post = crowd.writer.submit, crowd.writer.post

    async def caller() -> None:
        async for build in crowd.queued:
            assignment = await submit(ClaimBuild(build, False, WORKER, "w"))
            if assignment is None:
                continue
            assert await submit(BuildStarted(assignment))
            for output in universe.outputs[names[build]]:
                await submit(CommitNars(1, (nar(output.path, universe.references[output.path]),)))
            # A session posts both without waiting for the first.
            post(StoreBuildOutput(assignment, (), False, BuildMetrics(1)))
            assert await post(BuildCompleted(assignment, LIMITS)).result()

    async with trio.open_nursery() as callers:
        for _ in range(CALLERS):
            callers.start_soon(caller)
    await crowd.world.check()
    assert set((await crowd.world.statuses()).values()) <= TERMINAL_SUCCESS
    assert await crowd.world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED
    assert await crowd.world.value("SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL") == 0
    assert await crowd.world.value("SELECT count(*) FROM derivation_metric") == await crowd.world.value(
        "SELECT count(*) FROM build_attempt"
    )


async def outcome(reply: Reply[Any]) -> Any:
    """A reply, or the error that it is."""
    try:
        return await reply.result()
    except Exception as error:
        return error


async def test_each_of_a_group_gets_its_own_answer(crowd: Crowd) -> None:
    """One built, one without its outputs, one whose assignment is closed, one that was never given out."""
    await crowd.recorded({name: derivation(name) for name in "abc"})
    a, b, c = [await crowd.claim(name) for name in "abc"]
    assert [await outcome(crowd.writer.post(BuildStarted(i))) for i in (a, b, c)] == [True] * 3
    await crowd.writer.submit(CommitNars(1, (nar(out("a")), nar(out("c")))))
    assert await crowd.writer.submit(BuildCompleted(c, LIMITS))
    messages = [BuildCompleted(i, LIMITS) for i in (c, b, a, a + 1000)]
    replies = [crowd.writer.post(message) for message in messages]
    assert [await outcome(reply) for reply in replies] == [False, False, True, False]
    statuses = await crowd.world.statuses()
    assert statuses == {
        "a": BuildStatus.COMPLETED,
        "b": BuildStatus.FAILED_TRANSIENT,
        "c": BuildStatus.COMPLETED,
    }
    await crowd.world.check()


async def test_one_build_is_claimed_once_in_a_group(crowd: Crowd) -> None:
    await crowd.recorded({name: derivation(name) for name in "ab"})
    a, b = await crowd.world.id("a"), await crowd.world.id("b")
    claims = [ClaimBuild(build, False, WORKER, f"w{n}") for n, build in enumerate((a, b, a, b))]
    replies = [crowd.writer.post(claim) for claim in (*claims, ClaimBuild(b, True, WORKER, "w4"))]
    answers = [await outcome(reply) for reply in replies]
    assert answers[2:] == [None, None, None]
    rows = await fetch_all(
        crowd.world.connection, "SELECT id, worker_name FROM dispatched_job WHERE kind = 1"
    )
    assert dict(rows) == {answers[0]: "w0", answers[1]: "w1"}
    await crowd.world.check()


async def test_a_bad_one_of_a_group_fails_alone(crowd: Crowd) -> None:
    await crowd.recorded({name: derivation(name) for name in "ab"})
    a, b = [await crowd.claim(name) for name in "ab"]
    products = (BuildProduct("file", "doc", "f", "/p", 1),)
    replies = [
        crowd.writer.post(message)
        for message in (
            StoreBuildOutput(a, (BuiltOutput("out", out("a"), 7, products=products),), False),
            CommitNars(1, (nar(out("a")),)),
            StoreBuildOutput(b, (BuiltOutput("out", out("b"), 2**64),), False),
            CommitNars(1, (nar("/nix/store/short"),)),
            BuildCompleted(a, LIMITS),
        )
    ]
    outcomes = [await outcome(reply) for reply in replies]
    assert [isinstance(one, Exception) for one in outcomes] == [False, False, True, True, False]
    assert await crowd.world.status("a") is BuildStatus.COMPLETED
    assert await crowd.world.value("SELECT count(*) FROM build_product") == 1
    await crowd.world.check()


async def test_of_two_uploads_of_one_path_the_first_counts(crowd: Crowd) -> None:
    await crowd.recorded({"a": derivation("a")})
    second = attrs.evolve(nar(out("a"), [out("b")]), signature="key:other")
    replies = [crowd.writer.post(CommitNars(1, (signed,))) for signed in (nar(out("a")), second)]
    assert [await outcome(reply) for reply in replies] == [None, None]
    query = 'SELECT cardinality(p."references"), s.signature FROM cached_path p JOIN cached_path_signature s'
    query += " ON s.cached_path = p.id WHERE p.package = 'a'"
    assert await fetch_all(crowd.world.connection, query) == [(0, "key:signature")]
    await crowd.world.check()
