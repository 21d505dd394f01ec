"""The pool of readers: what is lent is whole, and no slot is ever lost."""

from __future__ import annotations

import pytest
import trio
from psycopg.pq import TransactionStatus

from gradient.graph import pg, pg_pool
from gradient.graph.pg import Connection
from gradient.graph.pg_errors import DATABASE_ERRORS, DatabaseDown
from gradient.graph.pg_pool import Pool
from tests.graph.conftest import Proxy
from tests.patience import PATIENCE

DOWN = "postgresql://nobody@/nothing?host=/nonexistent"


async def backend(connection: Connection) -> int:
    pid: int = await pg.fetch_value(connection, "SELECT pg_backend_pid()")
    return pid


async def test_an_idle_connection_is_lent_again(database_url: str) -> None:
    async with Pool.open(database_url, size=1) as pool:
        async with pool.connection() as connection:
            first = await backend(connection)
        async with pool.connection() as connection:
            assert await backend(connection) == first


async def test_the_last_used_is_lent_first(database_url: str) -> None:
    async with Pool.open(database_url, size=3) as pool:
        async with pool.connection():
            async with pool.connection() as connection:
                second = await backend(connection)
            for _ in range(2):
                async with pool.connection() as connection:
                    assert await backend(connection) == second
        async with pool.connection() as connection:
            first = await backend(connection)
        assert first != second
        async with pool.connection() as connection:
            assert await backend(connection) == first


async def test_no_more_are_lent_than_there_are(database_url: str) -> None:
    async with Pool.open(database_url, size=2) as pool:
        async with pool.connection() as one, pool.connection() as two:
            assert await backend(one) != await backend(two)
            with trio.move_on_after(0.01) as scope:
                async with pool.connection():
                    pass
            assert scope.cancelled_caught
        async with pool.connection(), pool.connection():
            pass


async def test_a_broken_one_is_replaced(database_url: str) -> None:
    async with Pool.open(database_url, size=1) as pool:
        async with pool.connection() as connection:
            first = await backend(connection)
            with pytest.raises(DATABASE_ERRORS):
                await pg.execute(connection, "SELECT pg_terminate_backend(pg_backend_pid())")
        async with pool.connection() as connection:
            assert await backend(connection) != first


async def test_one_that_broke_while_idle_is_not_lent(database_url: str, connection: Connection) -> None:
    async with Pool.open(database_url, size=1) as pool:
        async with pool.connection() as lent:
            first = await backend(lent)
        await pg.execute(connection, "SELECT pg_terminate_backend(%(pid)s, 5000)", {"pid": first})
        async with pool.connection() as lent:
            assert await backend(lent) != first


async def test_an_open_transaction_is_not_lent_on(database_url: str) -> None:
    async with Pool.open(database_url, size=1) as pool:
        async with pool.connection() as connection:
            await pg.execute(connection, "BEGIN")
        assert connection.closed
        async with pool.connection() as connection:
            assert connection.pgconn.transaction_status == TransactionStatus.IDLE


async def test_a_server_that_is_down_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pg_pool, "RECONNECT_PAUSES", (0.0, 0.0))
    async with Pool.open(DOWN, size=1) as pool:
        for _ in range(3):
            with pytest.raises(DatabaseDown):
                async with pool.connection():
                    pass


async def test_a_server_that_comes_back_is_waited_for(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pg_pool, "RECONNECT_PAUSES", (0.0,))
    tries = []
    connect = Connection.connect

    async def connect_at_second_try(url: str) -> Connection:
        tries.append(url)
        return await connect(url if len(tries) > 1 else DOWN)

    monkeypatch.setattr(Connection, "connect", connect_at_second_try)
    async with Pool.open(proxy.url, size=1) as pool, pool.connection() as connection:
        assert await pg.fetch_value(connection, "SELECT 1") == 1
    assert len(tries) == 2


async def test_cancelled_anywhere_no_slot_is_lost(sweep, database_url: str) -> None:
    async with Pool.open(database_url, size=1) as pool:

        async def scenario() -> None:
            async with pool.connection() as connection:
                await pg.execute(connection, "SELECT 1")
                # So that each run makes a new one, and is cancelled in that too.
                connection.abandon()

        async def check() -> None:
            with trio.fail_after(PATIENCE):
                async with pool.connection() as connection:
                    assert await pg.fetch_value(connection, "SELECT 1") == 1
                    connection.abandon()

        assert await sweep(scenario, check) >= 3


async def test_closing_closes_what_is_idle_and_what_comes_back(database_url: str) -> None:
    async with Pool.open(database_url, size=2) as pool:
        async with pool.connection() as idle:
            pass
        loan = pool.connection()
        lent = await loan.__aenter__()
    assert idle.closed or lent is idle
    await loan.__aexit__(None, None, None)
    assert lent.closed
