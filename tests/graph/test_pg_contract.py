"""psycopg on trio, against a real PostgreSQL: one test for each private part that `pg.py` replaces."""

from __future__ import annotations

from typing import Self

import psycopg
import pytest
import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from gradient.graph import pg
from gradient.graph.pg import Connection
from gradient.graph.pg_errors import DATABASE_ERRORS, DatabaseDown, DatabaseGone
from tests.graph.conftest import Proxy
from tests.patience import PATIENCE

SLEEP = "SELECT pg_sleep(600)"


async def active_statements(connection: Connection) -> int:
    """How many other sessions of this database run something."""
    count: int = await pg.fetch_value(
        connection,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND state <> 'idle' AND pid <> pg_backend_pid()",
    )
    return count


async def running_statement(connection: Connection) -> None:
    """Wait until another session of this database runs something."""
    while not await active_statements(connection):
        pass


@pytest.fixture
async def other(database_url: str):
    """A second connection to this test's database."""
    async with await Connection.connect(database_url) as connection:
        yield connection


# --- connect --------------------------------------------------------------------------------------


async def test_every_address_is_tried(database_url: str) -> None:
    params = conninfo_to_dict(database_url)
    host, port = params["host"], params.get("port", "5432")
    url = make_conninfo(**{**params, "host": f"/nonexistent,{host}", "port": f"5432,{port}"})
    async with await Connection.connect(url) as connection:
        assert await pg.fetch_value(connection, "SELECT 1") == 1


async def test_an_unreachable_server_is_one_line() -> None:
    with pytest.raises(DatabaseDown) as caught:
        await Connection.connect("postgresql://me:secret@/ci?host=/nonexistent,/nowhere")
    text = str(caught.value)
    assert "database ci at /nonexistent,/nowhere" in text
    assert "\n" not in text
    assert "secret" not in text
    assert isinstance(caught.value, DATABASE_ERRORS)


async def test_an_unknown_host_is_one_line() -> None:
    with pytest.raises(DatabaseDown, match="failed to resolve host"):
        await Connection.connect("postgresql://host.invalid/ci")


async def test_a_server_that_accepts_and_says_nothing(proxy: Proxy) -> None:
    proxy.stall()
    with pytest.raises(DatabaseDown, match="no answer within"):
        await Connection.connect(proxy.url, connect_timeout="0.05")


async def test_a_cancelled_connect_leaves_nothing(proxy: Proxy) -> None:
    proxy.stall()
    with trio.move_on_after(0.05) as scope:
        await Connection.connect(proxy.url)
    assert scope.cancelled_caught


async def test_a_session_speaks_utc_and_keeps_the_options_of_the_dsn(database_url: str) -> None:
    options = "-c lock_timeout=1234"
    async with await Connection.connect(database_url, options=options) as connection:
        assert await pg.fetch_value(connection, "SHOW timezone") == "UTC"
        assert await pg.fetch_value(connection, "SHOW lock_timeout") == "1234ms"
        assert await pg.fetch_value(connection, "SHOW jit") == "off"


# --- wait -----------------------------------------------------------------------------------------


async def test_executemany_runs_each(connection: Connection) -> None:
    await pg.execute(connection, "CREATE TABLE t (a bigint)")
    await connection.cursor().executemany("INSERT INTO t VALUES (%s)", [(n,) for n in range(100)])
    assert await pg.fetch_value(connection, "SELECT sum(a) FROM t") == 4950


async def test_copy_in_and_out(connection: Connection) -> None:
    await pg.execute(connection, "CREATE TABLE t (a bigint, b text)")
    rows = [(n, f"row {n}") for n in range(1000)]
    async with connection.cursor().copy("COPY t FROM STDIN") as copy:
        for row in rows:
            await copy.write_row(row)
    async with connection.cursor().copy("COPY t TO STDOUT") as copy:
        copy.set_types(["int8", "text"])
        assert [row async for row in copy.rows()] == rows
    assert not connection.closed


async def test_an_error_within_copy_leaves_the_connection_usable(connection: Connection) -> None:
    await pg.execute(connection, "CREATE TABLE t (a bigint)")
    with pytest.raises(KeyError):
        async with connection.cursor().copy("COPY t FROM STDIN") as copy:
            await copy.write_row((1,))
            raise KeyError
    assert await pg.fetch_value(connection, "SELECT count(*) FROM t") == 0


async def test_a_pipeline_answers_in_order(connection: Connection) -> None:
    async with connection.pipeline():
        cursors = [await connection.execute("SELECT %s::bigint", [n]) for n in range(50)]
        assert [await cursor.fetchone() for cursor in cursors] == [(n,) for n in range(50)]
    assert await pg.fetch_value(connection, "SELECT 1") == 1


async def test_notifications_arrive(connection: Connection, other: Connection) -> None:
    await pg.execute(connection, "LISTEN news")
    await pg.execute(other, "NOTIFY news, 'hello'")
    found = [notice.payload async for notice in connection.notifies(timeout=PATIENCE, stop_after=1)]
    assert found == ["hello"]


async def test_notifies_ends_at_its_timeout(connection: Connection) -> None:
    assert [notice async for notice in connection.notifies(timeout=0.01)] == []
    assert await pg.fetch_value(connection, "SELECT 1") == 1


async def test_more_than_the_socket_buffers_hold_both_ways(connection: Connection) -> None:
    text = "x" * 20_000_000
    assert await pg.fetch_value(connection, "SELECT %(text)s::text", {"text": text}) == text


async def test_tasks_take_turns_on_one_connection(connection: Connection) -> None:
    found = []

    async def ask(number: int) -> None:
        found.append(await pg.fetch_value(connection, "SELECT %(n)s::bigint", {"n": number}))

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(ask, number)
    assert sorted(found) == list(range(20))


async def test_what_never_blocks_lets_others_run(connection: Connection) -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    def finished():
        return
        yield

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        for _ in range(100):
            await connection.wait(finished())
        assert turns > 50
        nursery.cancel_scope.cancel()


async def test_a_terminated_session_is_an_error_of_the_database(
    connection: Connection, other: Connection
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(terminate_when_running, other)
        with pytest.raises(DATABASE_ERRORS) as caught:
            await pg.execute(connection, SLEEP)
    assert isinstance(caught.value, psycopg.errors.AdminShutdown)
    assert connection.broken
    with pytest.raises(DATABASE_ERRORS):
        await pg.execute(connection, "SELECT 1")
    assert await pg.fetch_value(other, "SELECT 1") == 1


async def terminate_when_running(other: Connection) -> None:
    await running_statement(other)
    await pg.execute(
        other,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )


async def test_a_cut_connection_is_an_error_of_the_database(proxy: Proxy, connection: Connection) -> None:
    async with await Connection.connect(proxy.url) as victim, trio.open_nursery() as nursery:
        nursery.start_soon(cut_when_running, proxy, connection)
        with pytest.raises(DATABASE_ERRORS):
            await pg.execute(victim, SLEEP)
        assert victim.broken


async def cut_when_running(proxy: Proxy, other: Connection) -> None:
    await running_statement(other)
    proxy.cut()


async def test_close_wakes_who_waits_for_the_socket(connection: Connection, other: Connection) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(close_when_running, connection, other)
        with trio.fail_after(PATIENCE), pytest.raises(DatabaseGone):
            await pg.execute(connection, SLEEP)


async def close_when_running(connection: Connection, other: Connection) -> None:
    await running_statement(other)
    await connection.close()


async def test_stream_is_refused(connection: Connection) -> None:
    with pytest.raises(psycopg.NotSupportedError):
        connection.cursor().stream("SELECT 1")


async def test_leaving_the_block_closes_and_rolls_back(database_url: str, other: Connection) -> None:
    await pg.execute(other, "CREATE TABLE t (a bigint)")
    async with await Connection.connect(database_url) as connection:
        await pg.execute(connection, "BEGIN")
        await pg.execute(connection, "INSERT INTO t VALUES (1)")
    assert connection.closed
    assert await pg.fetch_value(other, "SELECT count(*) FROM t") == 0


# --- cancellation ---------------------------------------------------------------------------------


async def test_a_cancelled_statement_is_cancelled_in_postgresql(
    connection: Connection, other: Connection
) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pg.execute, connection, SLEEP)
            await running_statement(other)
            scope.cancel()
    assert not connection.closed
    assert await active_statements(other) == 0
    assert await pg.fetch_value(connection, "SELECT 1") == 1


async def test_cancelled_in_a_transaction_it_is_rolled_back(
    connection: Connection, other: Connection
) -> None:
    await pg.execute(connection, "CREATE TABLE t (a bigint)")

    async def scenario() -> None:
        async with connection.transaction():
            await pg.execute(connection, "INSERT INTO t VALUES (1)")
            await pg.execute(connection, SLEEP)

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scenario)
            await running_statement(other)
            while (
                await pg.fetch_value(other, "SELECT count(*) FROM pg_stat_activity WHERE query = %s", [SLEEP])
                == 0
            ):
                pass
            scope.cancel()
    assert connection.pgconn.transaction_status == TransactionStatus.IDLE
    assert await pg.fetch_value(connection, "SELECT count(*) FROM t") == 0


async def test_cancel_safe_cancels_from_another_task(connection: Connection, other: Connection) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_when_running, connection, other)
        with pytest.raises(psycopg.errors.QueryCanceled):
            await pg.execute(connection, SLEEP)
    assert not connection.closed


async def cancel_when_running(connection: Connection, other: Connection) -> None:
    await running_statement(other)
    await connection.cancel_safe()


async def test_a_server_that_does_not_obey_is_left(
    proxy: Proxy, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg, "CLEANUP_LIMIT", 0.05)
    async with await Connection.connect(proxy.url) as victim:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pg.execute, victim, SLEEP)
                await running_statement(connection)
                proxy.stall()
                scope.cancel()
        assert scope.cancelled_caught
        assert victim.broken


async def test_a_commit_that_is_not_answered_ends_with_the_limit(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg, "CLEANUP_LIMIT", 0.05)
    async with await Connection.connect(proxy.url) as victim:
        with (
            trio.CancelScope() as scope,
            pytest.raises(DatabaseGone, match="did not end the transaction"),
        ):
            async with victim.transaction():
                await pg.execute(victim, "SELECT 1")
                proxy.stall()
                scope.cancel()
        assert victim.broken


async def test_a_cancel_request_that_is_not_answered(proxy: Proxy, connection: Connection) -> None:
    async with await Connection.connect(proxy.url) as victim, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_when_stalled, proxy, victim, connection)
        with pytest.raises(DatabaseGone):
            await pg.execute(victim, SLEEP)


async def cancel_when_stalled(proxy: Proxy, victim: Connection, other: Connection) -> None:
    await running_statement(other)
    proxy.stall()
    with pytest.raises(psycopg.errors.CancellationTimeout):
        await victim.cancel_safe(timeout=0.05)
    victim.abandon()


@pytest.fixture
async def table(other: Connection) -> None:
    await pg.execute(other, "CREATE TABLE t (a bigint)")


class Attempts:
    """Connections that a swept scenario uses one after another, and what each must leave behind."""

    def __init__(self, url: str, other: Connection, rows: set[int]) -> None:
        self.url, self.other, self.rows = url, other, rows
        self.connection: Connection | None = None
        self.closed = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.connection is not None:
            self.connection.abandon()

    async def open(self) -> Connection:
        if self.connection is None or self.connection.closed:
            with trio.CancelScope(shield=True):
                self.connection = await Connection.connect(self.url)
        return self.connection

    async def check(self) -> None:
        """The connection is at rest or closed, and all or nothing was written."""
        assert self.connection is not None
        if self.connection.closed:
            self.closed += 1
            await self.session_ended()
        else:
            assert self.connection.pgconn.transaction_status == TransactionStatus.IDLE
            assert await pg.fetch_value(self.connection, "SELECT 1") == 1
        assert await pg.fetch_value(self.other, "SELECT count(*) FROM t") in self.rows
        await pg.execute(self.other, "DELETE FROM t")

    async def session_ended(self) -> None:
        """Wait until PostgreSQL has noticed that the connection is closed, and done with it."""
        query = (
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND pid <> pg_backend_pid())"
        )
        while await pg.fetch_value(self.other, query):
            pass


async def test_a_transaction_cancelled_anywhere(
    sweep, table: None, database_url: str, other: Connection
) -> None:
    async with Attempts(database_url, other, {0, 2}) as attempts:

        async def scenario() -> None:
            connection = await attempts.open()
            async with connection.transaction():
                await pg.execute(connection, "INSERT INTO t VALUES (1)")
                async with connection.transaction():
                    await pg.execute(connection, "INSERT INTO t VALUES (2)")

        assert await sweep(scenario, attempts.check) > 5
        assert attempts.closed == 0


async def test_a_failing_transaction_cancelled_anywhere(
    sweep, table: None, database_url: str, other: Connection
) -> None:
    async with Attempts(database_url, other, {0}) as attempts:

        async def scenario() -> None:
            connection = await attempts.open()
            with pytest.raises(psycopg.errors.DivisionByZero):
                async with connection.transaction():
                    await pg.execute(connection, "INSERT INTO t VALUES (1)")
                    await pg.execute(connection, "SELECT 1 / 0")

        assert await sweep(scenario, attempts.check) > 3
        assert attempts.closed == 0


async def test_a_copy_cancelled_anywhere(sweep, table: None, database_url: str, other: Connection) -> None:
    async with Attempts(database_url, other, {0, 3}) as attempts:

        async def scenario() -> None:
            connection = await attempts.open()
            async with connection.cursor().copy("COPY t FROM STDIN") as copy:
                for number in range(3):
                    await copy.write_row((number,))

        assert await sweep(scenario, attempts.check) > 3
        assert attempts.closed > 0


async def test_a_copy_out_cancelled_anywhere(
    sweep, table: None, database_url: str, other: Connection
) -> None:
    async with Attempts(database_url, other, {0}) as attempts:

        async def scenario() -> None:
            connection = await attempts.open()
            query = "COPY (SELECT repeat('x', 1000) FROM generate_series(1, 5)) TO STDOUT"
            async with connection.cursor().copy(query) as copy:
                while await copy.read():  # noqa: ASYNC110
                    await trio.lowlevel.checkpoint()

        assert await sweep(scenario, attempts.check) > 3
        assert attempts.closed > 0


async def test_a_pipeline_cancelled_anywhere(
    sweep, table: None, database_url: str, other: Connection
) -> None:
    async with Attempts(database_url, other, {0, 2}) as attempts:

        async def scenario() -> None:
            connection = await attempts.open()
            async with connection.pipeline(), connection.transaction():
                await connection.execute("INSERT INTO t VALUES (1)")
                await connection.execute("INSERT INTO t VALUES (2)")

        assert await sweep(scenario, attempts.check) > 3
        assert attempts.closed > 0


async def test_a_pipeline_with_answers_outstanding_cancelled_anywhere(
    sweep, table: None, database_url: str, other: Connection
) -> None:
    async with Attempts(database_url, other, {0, 2}) as attempts:

        async def scenario() -> None:
            connection = await attempts.open()
            async with connection.pipeline():
                await connection.execute("INSERT INTO t VALUES (1)")
                await connection.execute("INSERT INTO t VALUES (2)")

        assert await sweep(scenario, attempts.check) > 3
        assert attempts.closed > 0


async def test_executemany_cancelled_anywhere(
    sweep, table: None, database_url: str, other: Connection
) -> None:
    async with Attempts(database_url, other, {0, 2}) as attempts:

        async def scenario() -> None:
            connection = await attempts.open()
            async with connection.transaction():
                await connection.cursor().executemany("INSERT INTO t VALUES (%s)", [(1,), (2,)])

        assert await sweep(scenario, attempts.check) > 3


async def test_a_transaction_that_cannot_begin_counts_nothing(connection: Connection) -> None:
    with pytest.raises(KeyError):
        async with connection.transaction():
            with pytest.raises(psycopg.errors.DivisionByZero):
                await pg.execute(connection, "SELECT 1 / 0")
            assert connection.is_broken_transaction()
            with pytest.raises(psycopg.errors.InFailedSqlTransaction):
                async with connection.transaction():
                    pass
            raise KeyError
    async with connection.transaction():
        assert await pg.fetch_value(connection, "SELECT 1") == 1
        assert not connection.is_broken_transaction()
