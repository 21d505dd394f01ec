"""The log lane: chunks in order, in large pieces, through a database that goes away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import attrs
import psycopg
import pytest
import trio
import trio.testing

from gradient.graph.assignments import ClaimBuild
from gradient.graph.pg import Connection
from gradient.graph.pg_pool import Pool
from gradient.sessions import log_lane
from gradient.sessions.log_lane import FLUSH_BYTES, KEEP_BYTES, LogLane
from tests.graph.world import WORKER, World


@attrs.define(eq=False)
class Bench:
    """A lane, what it showed, and the log of its one build."""

    lane: LogLane
    shown: list[tuple[int, bytes]]
    connection: Connection
    assignment: int

    async def write(self, data: bytes) -> None:
        await self.lane.write(self.assignment, 7, data)

    async def chunks(self) -> list[bytes]:
        cursor = await self.connection.execute("SELECT data FROM build_log_chunk ORDER BY chunk_index")
        return [bytes(data) for (data,) in await cursor.fetchall()]


@pytest.fixture
async def bench(connection: Connection, database_url: str) -> AsyncIterator[Bench]:
    world = World(connection)
    await world.setup()
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    assignment = await world.apply(ClaimBuild(await world.id("a"), False, WORKER, "w"))
    assert assignment is not None
    shown: list[tuple[int, bytes]] = []
    async with Pool.open(database_url, 2) as readers:
        lane = LogLane(readers, lambda build, data: shown.append((build, data)))
        yield Bench(lane, shown, connection, assignment)


async def test_pieces_are_shown_at_once_and_written_together(bench: Bench) -> None:
    for line in (b"one\n", b"two\n", b"\xff\0three"):
        await bench.write(line)
    assert bench.shown == [(7, b"one\n"), (7, b"two\n"), (7, b"\xff\0three")]
    assert await bench.chunks() == []
    await bench.lane.flush()
    await bench.lane.flush()
    assert await bench.chunks() == [b"one\ntwo\n\xff\0three"]


async def test_much_text_is_written_without_waiting_for_the_flush(bench: Bench) -> None:
    piece = b"x" * (FLUSH_BYTES // 2)
    await bench.write(piece)
    assert await bench.chunks() == []
    await bench.write(piece)
    assert await bench.chunks() == [piece * 2]


async def test_the_rest_is_written_when_the_job_ends(bench: Bench) -> None:
    await bench.write(b"first")
    await bench.lane.flush()
    await bench.write(b"last")
    await bench.lane.finish(bench.assignment)
    await bench.lane.finish(bench.assignment)
    assert await bench.chunks() == [b"first", b"last"]
    await bench.lane.flush()
    assert await bench.chunks() == [b"first", b"last"]


async def test_the_flush_of_every_second_and_a_full_buffer_may_meet(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes second writes what the first left, under the next number."""
    gate, append = trio.Event(), log_lane.append_log

    async def held_back(*args: Any) -> None:
        await gate.wait()
        await append(*args)

    monkeypatch.setattr(log_lane, "append_log", held_back)
    await bench.write(b"first ")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.lane.flush)
        await trio.testing.wait_all_tasks_blocked(0.05)
        nursery.start_soon(bench.write, b"x" * FLUSH_BYTES)
        await trio.testing.wait_all_tasks_blocked(0.05)
        gate.set()
    await bench.write(b" last")
    await bench.lane.finish(bench.assignment)
    assert await bench.chunks() == [b"first ", b"x" * FLUSH_BYTES, b" last"]


async def test_what_the_database_did_not_take_is_written_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise psycopg.OperationalError("the database is away")

    monkeypatch.setattr(log_lane, "append_log", away)
    await bench.write(b"kept ")
    await bench.lane.flush()
    await bench.write(b"in order")
    monkeypatch.undo()
    await bench.lane.flush()
    assert await bench.chunks() == [b"kept in order"]


async def test_a_log_nobody_takes_is_kept_up_to_a_limit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise psycopg.OperationalError("the database is away")

    monkeypatch.setattr(log_lane, "append_log", away)
    for _ in range(KEEP_BYTES // FLUSH_BYTES + 5):
        await bench.write(b"x" * FLUSH_BYTES)
    monkeypatch.undo()
    await bench.lane.finish(bench.assignment)
    assert sum(map(len, await bench.chunks())) == KEEP_BYTES


async def test_a_log_of_no_attempt_is_dropped(bench: Bench) -> None:
    await bench.lane.write(10**9, 7, b"nobody's")
    await bench.lane.flush()
    assert await bench.chunks() == []
