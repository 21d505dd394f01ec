"""The graph writer: one transaction for many messages, each failing for itself; retries, restarts, stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import attrs
import psycopg
import pytest
import trio

from gradient.graph import writer as writer_module
from gradient.graph.evaluation_end import finish_evaluations
from gradient.graph.moves import Moves
from gradient.graph.pg import Connection, execute, fetch_all, fetch_value
from gradient.graph.pg_errors import DATABASE_ERRORS
from gradient.graph.transaction import Alone, Rejected, Transaction
from gradient.graph.writer import GraphWriter, WriterStopped
from tests.graph.conftest import Proxy, Sweep

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Act = Callable[[Transaction], Awaitable[Any]]


@attrs.define
class Add:
    """Adds a project called `name`, then does `act`; counts how often it was applied."""

    name: str
    act: Act | None = None
    applied: int = 0

    async def apply(self, tx: Transaction) -> Any:
        self.applied += 1
        await execute(
            tx.connection,
            "INSERT INTO project (name, created_at) VALUES (%(name)s, %(now)s)",
            {"name": self.name, "now": tx.now},
        )
        tx.moves.returned.add(self.name)
        return await self.act(tx) if self.act else self.name


async def transaction_id(tx: Transaction) -> Any:
    return await fetch_value(tx.connection, "SELECT txid_current()")


async def refuse(tx: Transaction) -> None:
    raise Rejected("not like this")


def failing(times: int, sqlstate: str) -> Act:
    """Fails the first `times` times with an error of PostgreSQL's."""
    left = [times]

    async def act(tx: Transaction) -> str:
        if left[0]:
            left[0] -= 1
            await execute(tx.connection, f"DO $$ BEGIN RAISE SQLSTATE '{sqlstate}'; END $$")
        return "at last"

    return act


async def projects(connection: Connection) -> list[str]:
    return [name for (name,) in await fetch_all(connection, "SELECT name FROM project ORDER BY id")]


@attrs.define(eq=False)
class Bench:
    """A writer and what it published."""

    writer: GraphWriter
    published: list[Moves]


@pytest.fixture
def bench(database_url: str) -> Bench:
    published: list[Moves] = []
    return Bench(GraphWriter(database_url, published.append, lambda: NOW), published)


@pytest.fixture
async def running(bench: Bench, nursery: trio.Nursery) -> Bench:
    await nursery.start(bench.writer.run)
    return bench


async def test_messages_that_wait_together_share_a_transaction_in_order(
    running: Bench, connection: Connection
) -> None:
    posted = [running.writer.post(Add(f"p{i}", transaction_id)) for i in range(5)]
    assert len({await reply.result() for reply in posted}) == 1
    assert await projects(connection) == [f"p{i}" for i in range(5)]
    assert [moves.returned for moves in running.published] == [{f"p{i}" for i in range(5)}]
    later = await running.writer.submit(Add("later", transaction_id))
    assert later != await posted[0].result()


async def test_more_than_one_transaction_takes_keeps_the_order(
    running: Bench, connection: Connection
) -> None:
    count = writer_module.SHARED_MESSAGES + 5
    posted = [running.writer.post(Add(f"p{i}", transaction_id)) for i in range(count)]
    assert len({await reply.result() for reply in posted}) == 2
    assert await projects(connection) == [f"p{i}" for i in range(count)]


async def test_it_is_busy_until_all_is_committed(running: Bench) -> None:
    async def look(tx: Transaction) -> bool:
        return running.writer.busy

    assert not running.writer.busy
    posted = running.writer.post(Add("p", look))
    assert running.writer.busy
    assert await posted.result()
    assert not running.writer.busy


@attrs.define
class AddAlone(Add, Alone):
    """Has a transaction to itself."""


async def test_a_large_message_has_a_transaction_to_itself(running: Bench, connection: Connection) -> None:
    kinds = (Add, Add, AddAlone, AddAlone, Add, AddAlone, Add, Add)
    posted = [running.writer.post(kind(f"p{number}", transaction_id)) for number, kind in enumerate(kinds)]
    before, same, large, larger, between, last, after, same_after = [await reply.result() for reply in posted]
    assert (before, after) == (same, same_after)
    assert len({before, large, larger, between, last, after}) == 6
    assert await projects(connection) == [f"p{number}" for number in range(len(kinds))]


async def test_a_large_message_waits_behind_those_that_are_tried_again(
    bench: Bench, connection: Connection
) -> None:
    """Also over a restart, and when the channel is closed meanwhile."""
    posted = [
        bench.writer.post(message)
        for message in (Add("first", failing(3, "40P01")), AddAlone("large"), Add("last"))
    ]
    with pytest.raises(psycopg.errors.DeadlockDetected):
        await bench.writer.run()
    await run_to_its_end(bench)
    assert [await reply.result() for reply in posted] == ["at last", "large", "last"]
    assert await projects(connection) == ["first", "large", "last"]


async def test_who_waits_for_a_large_message_is_told_of_the_stop(bench: Bench) -> None:
    posted = [
        bench.writer.post(message) for message in (Add("first", failing(3, "40P01")), AddAlone("large"))
    ]
    with pytest.raises(psycopg.errors.DeadlockDetected):
        await bench.writer.run()
    bench.writer.stop()
    for reply in posted:
        with pytest.raises(WriterStopped):
            await reply.result()


async def test_a_refused_message_fails_alone_and_leaves_nothing(
    running: Bench, connection: Connection
) -> None:
    posted = [
        running.writer.post(Add(name, act)) for name, act in (("a", None), ("bad", refuse), ("b", None))
    ]
    twice = running.writer.post(Add("a"))  # against a constraint
    long = running.writer.post(Add("x" * 9000 + "".join(map(chr, range(0x4E00, 0x6000)))))  # no index row
    nul = running.writer.post(Add("n\0"))
    last = running.writer.post(Add("c"))
    assert await posted[0].result() == "a"
    with pytest.raises(Rejected, match="not like this"):
        await posted[1].result()
    assert await posted[2].result() == "b"
    for refused, error in (
        (twice, psycopg.IntegrityError),
        (long, psycopg.errors.ProgramLimitExceeded),
        (nul, psycopg.DataError),
    ):
        with pytest.raises(error):
            await refused.result()
    assert await last.result() == "c"
    assert await projects(connection) == ["a", "b", "c"]
    assert [moves.returned for moves in running.published] == [{"a", "b", "c"}]


@pytest.mark.parametrize("sqlstate", ["40P01", "40001"])
async def test_a_conflict_tries_the_whole_transaction_again(
    running: Bench, connection: Connection, sqlstate: str
) -> None:
    first, second = Add("first"), Add("second", failing(2, sqlstate))
    posted = [running.writer.post(first), running.writer.post(second)]
    assert [await reply.result() for reply in posted] == ["first", "at last"]
    assert first.applied == second.applied == 3
    assert await projects(connection) == ["first", "second"]
    assert len(running.published) == 1


async def test_a_conflict_without_end_is_the_supervisors_matter(bench: Bench, connection: Connection) -> None:
    reply = bench.writer.post(Add("stubborn", failing(3, "40P01")))
    with pytest.raises(psycopg.errors.DeadlockDetected):
        await bench.writer.run()
    await run_to_its_end(bench)
    assert await reply.result() == "at last"
    assert await projects(connection) == ["stubborn"]


async def run_to_its_end(bench: Bench) -> None:
    bench.writer.close()
    await bench.writer.run()


async def test_a_lost_connection_keeps_the_messages_for_the_next_run(
    bench: Bench, connection: Connection
) -> None:
    async def cut(tx: Transaction) -> str:
        if add.applied == 1:
            pid = tx.connection.info.backend_pid
            await execute(connection, f"SELECT pg_terminate_backend({pid})")
            await execute(tx.connection, "SELECT 1")
        return "again"

    add = Add("cut", cut)
    posted = [bench.writer.post(Add("before")), bench.writer.post(add), bench.writer.post(Add("after"))]
    with pytest.raises(DATABASE_ERRORS):
        await bench.writer.run()
    assert await projects(connection) == []
    late = bench.writer.post(Add("late"))
    await run_to_its_end(bench)
    assert [await reply.result() for reply in (*posted, late)] == ["before", "again", "after", "late"]
    assert await projects(connection) == ["before", "cut", "after", "late"]
    assert len(bench.published) == 1


@pytest.mark.parametrize("arrives", [True, False], ids=["arrived", "lost on its way"])
async def test_a_connection_lost_at_commit_applies_nothing_twice(
    proxy: Proxy, bench: Bench, connection: Connection, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    """Neither lost nor applied again: a message with no key of its own would be there twice."""
    committing = trio.Event()

    async def at_commit(tx: Transaction) -> None:
        await finish_evaluations(tx)
        proxy.hold_answers() if arrives else proxy.stall()
        committing.set()

    monkeypatch.setattr(writer_module, "finish_evaluations", at_commit)
    writer = GraphWriter(proxy.url, bench.published.append, lambda: NOW)
    add = Add("once", transaction_id)
    reply = writer.post(add)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_runs_into_a_cut, writer)
        await committing.wait()
        if arrives:
            await fetch_value(connection, writer_module.LAST_TOKEN)  # waits for the end of the transaction
            assert await projects(connection) == ["once"]
        assert bench.published == []
        proxy.cut()
    monkeypatch.undo()
    proxy.open()
    late = writer.post(Add("late"))
    writer.close()
    await writer.run()
    await reply.result()
    assert await late.result() == "late"
    assert await projects(connection) == ["once", "late"]
    assert add.applied == (1 if arrives else 2)
    assert [moves.returned for moves in bench.published] == (
        [{"once"}, {"late"}] if arrives else [{"once", "late"}]
    )


async def _runs_into_a_cut(writer: GraphWriter) -> None:
    with pytest.raises(DATABASE_ERRORS):
        await writer.run()


async def test_nothing_is_told_before_the_commit(bench: Bench, connection: Connection) -> None:
    async def peek(tx: Transaction) -> None:
        seen.append(await projects(connection))

    seen: list[list[str]] = []
    told: list[bool] = []
    reply = bench.writer.post(Add("quiet", peek))
    bench.writer.publish = lambda moves: told.append(reply._request.done.is_set())
    await run_to_its_end(bench)
    assert seen == [[]]
    assert told == [False]
    assert await projects(connection) == ["quiet"]


async def test_what_moves_nothing_publishes_nothing(running: Bench) -> None:
    @attrs.frozen
    class Nothing:
        async def apply(self, tx: Transaction) -> int:
            return 7

    assert await running.writer.submit(Nothing()) == 7
    assert running.published == []


async def test_closing_applies_what_waits_and_refuses_the_rest(bench: Bench, connection: Connection) -> None:
    reply = bench.writer.post(Add("last"))
    await run_to_its_end(bench)
    assert await reply.result() == "last"
    with pytest.raises(WriterStopped):
        await bench.writer.submit(Add("too late"))
    assert await projects(connection) == ["last"]


async def test_cancelling_the_writer_tells_whoever_waits(bench: Bench, connection: Connection) -> None:
    entered = trio.Event()

    async def hang(tx: Transaction) -> None:
        entered.set()
        await execute(tx.connection, "SELECT pg_sleep(60)")

    replies = [bench.writer.post(Add("hangs", hang)), bench.writer.post(Add("behind"))]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.writer.run)
        await entered.wait()
        nursery.cancel_scope.cancel()
    for reply in replies:
        with pytest.raises(WriterStopped):
            await reply.result()
    with pytest.raises(WriterStopped):
        bench.writer.post(Add("too late"))
    assert await projects(connection) == []


async def test_stopping_between_two_runs_tells_whoever_waits(bench: Bench) -> None:
    reply = bench.writer.post(Add("never"))
    bench.writer.stop()
    bench.writer.stop()
    with pytest.raises(WriterStopped):
        await reply.result()


async def test_a_cancelled_caller_does_not_undo_its_message(running: Bench, connection: Connection) -> None:
    with trio.move_on_after(0) as scope:
        await running.writer.submit(Add("left alone"))
    assert scope.cancelled_caught
    await running.writer.submit(Add("next"))
    assert await projects(connection) == ["left alone", "next"]


@pytest.mark.parametrize("company", [False, True], ids=["alone", "before another"])
async def test_a_swallowed_error_is_never_a_silent_rollback(
    bench: Bench, connection: Connection, company: bool
) -> None:
    async def swallow(tx: Transaction) -> str:
        with suppress(psycopg.Error):
            await execute(tx.connection, "SELECT 1 / 0")
        return "all well"

    replies = [bench.writer.post(Add("lost", swallow))]
    if company:
        replies.append(bench.writer.post(Add("next")))
    with pytest.raises((writer_module.TransactionLost, psycopg.InternalError)):
        await bench.writer.run()
    for reply in replies:
        with pytest.raises(WriterStopped):
            await reply.result()
    assert await projects(connection) == []


async def test_a_bug_stops_the_writer_loudly(bench: Bench, connection: Connection) -> None:
    async def bug(tx: Transaction) -> None:
        raise KeyError("nobody thought of this")

    replies = [bench.writer.post(Add("fine")), bench.writer.post(Add("bug", bug))]
    with pytest.raises(KeyError):
        await bench.writer.run()
    for reply in replies:
        with pytest.raises(WriterStopped):
            await reply.result()
    assert await projects(connection) == []


async def test_a_transaction_over_its_budget_is_given_up(
    running: Bench, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(tx: Transaction) -> None:
        await execute(tx.connection, "SELECT pg_sleep(60)")

    monkeypatch.setattr(writer_module, "TRANSACTION_BUDGET", 0.1)
    with pytest.raises(TimeoutError):
        await running.writer.submit(Add("slow", slow))
    monkeypatch.undo()
    assert await running.writer.submit(Add("next")) == "next"
    assert await projects(connection) == ["next"]


async def test_cancelled_anywhere_it_is_done_and_answered_or_neither(
    database_url: str, connection: Connection, sweep: Sweep
) -> None:
    numbers = iter(range(1000))
    name = ""
    replies: list[Any] = []

    async def scenario() -> None:
        nonlocal name
        name = f"p{next(numbers)}"
        writer = GraphWriter(database_url, lambda moves: None, lambda: NOW)
        replies[:] = [writer.post(Add(name)), writer.post(Add("bad" + name, refuse))]
        writer.close()
        await writer.run()

    async def check() -> None:
        done = name in await projects(connection)
        outcomes = []
        for reply in replies:
            try:
                outcomes.append(await reply.result())
            except (WriterStopped, Rejected) as error:
                outcomes.append(type(error))
        assert outcomes == ([name, Rejected] if done else [WriterStopped, WriterStopped])

    assert await sweep(scenario, check) > 10


async def test_the_time_of_a_transaction_is_the_clocks(running: Bench, connection: Connection) -> None:
    await running.writer.submit(Add("timed"))
    assert await fetch_value(connection, "SELECT created_at FROM project") == NOW


async def test_many_callers_wait_at_once(running: Bench, connection: Connection) -> None:
    async with trio.open_nursery() as nursery:
        for i in range(100):
            nursery.start_soon(partial(running.writer.submit, Add(f"p{i}")))
    assert len(await projects(connection)) == 100
