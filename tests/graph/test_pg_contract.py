"""psycopg on trio, against a real PostgreSQL: one test for each private part that `pg.py` replaces."""

from __future__ import annotations

from gradient.graph import pg
from gradient.graph.pg import Connection, Pool


async def test_a_list_is_an_array(connection: Connection) -> None:
    query = "SELECT x FROM unnest(%(ids)s::bigint[]) AS x"
    assert await pg.fetch_all(connection, query, {"ids": [1, 2**40]}) == [(1,), (2**40,)]


async def test_a_pool_lends(pool: Pool) -> None:
    async with pool.connection() as connection:
        assert await pg.fetch_value(connection, "SELECT 1") == 1
