"""Python values as parameters, rows as attrs values."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import attrs
import psycopg
import pytest

from gradient.graph import pg
from gradient.graph.pg import Connection
from gradient.graph.pg_errors import DATABASE_ERRORS, is_content_error, is_retryable
from gradient.model import BuildStatus, JobKind

STRINGS = [
    "",
    "plain",
    "NULL",
    "null",
    'a "quoted" one',
    "back\\slash",
    "{,}",
    " space ",
    "naïve 𝛿",
    "line\nfeed",
    "\t",
]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bigint", 0),
        ("bigint", -(2**63)),
        ("bigint", 2**63 - 1),
        ("smallint", -1),
        ("numeric", 10**30),
        ("text", "it's"),
        ("boolean", True),
        ("double precision", 0.1),
        ("bytea", b"\0\\x\xff"),
        ("jsonb", {"a": [1, None, "x"]}),
        ("bigint[]", []),
        ("bigint[]", [1, 2**40, -1, None]),
        ("integer[]", [None, None]),
        ("smallint[]", [3]),
        ("text[]", STRINGS),
        ("text[]", [*STRINGS, None]),
        ("text[]", []),
        ("boolean[]", [True, False, None]),
        ("double precision[]", [0.5, 1e300]),
        ("bytea[]", [b"", b"\0\\\xff"]),
    ],
)
async def test_values_come_back_as_they_went(connection: Connection, kind: str, value: Any) -> None:
    assert await pg.fetch_value(connection, f"SELECT %(value)s::{kind}", {"value": value}) == value
    assert await pg.fetch_value(connection, f"SELECT %(value)s::{kind}", {"value": None}) is None


@pytest.mark.parametrize("value", [(2, 1), {1, 2}, frozenset({2, 1})])
async def test_other_collections_are_arrays(connection: Connection, value: Any) -> None:
    assert sorted(await pg.fetch_value(connection, "SELECT %(value)s::bigint[]", {"value": value})) == [1, 2]


async def test_enums_are_their_numbers(connection: Connection) -> None:
    query = "SELECT %(one)s::smallint, %(many)s::smallint[], %(mixed)s::bigint[]"
    values = {"one": BuildStatus.QUEUED, "many": list(BuildStatus), "mixed": [JobKind.BUILD, 7, None]}
    assert await pg.fetch_one(connection, query, values) == (1, list(range(11)), [1, 7, None])


async def test_times_come_back_in_utc(connection: Connection) -> None:
    time = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=2)))
    query = "SELECT %(time)s::timestamptz, %(times)s::timestamptz[], %(time)s - interval '1 hour'"
    one, many, earlier = await pg.fetch_one(connection, query, {"time": time, "times": [time]}) or ()
    assert one == many[0] == earlier + timedelta(hours=1) == time
    assert one.utcoffset() == timedelta(0)


@pytest.mark.parametrize("value", ["a\0b", ["a\0b"], [("x"), "\0"]])
async def test_a_nul_is_the_fault_of_the_content(connection: Connection, value: Any) -> None:
    with pytest.raises(psycopg.DataError) as caught:
        await pg.execute(connection, "SELECT %(value)s::text", {"value": value})
    assert is_content_error(caught.value)


async def test_a_statement_is_prepared_once_whatever_its_values(connection: Connection) -> None:
    await pg.execute(connection, "CREATE TABLE t (a bigint, b text, c smallint)")
    query = "SELECT a FROM t WHERE a = ANY(%(ids)s) AND b = %(name)s AND c = %(status)s"
    for ids in [[1], [2**40], [], [None], None, (5, -1)]:
        for status in [None, 1, BuildStatus.QUEUED]:
            await pg.execute(connection, query, {"ids": ids, "name": None if ids else "x", "status": status})
    found = await pg.fetch_all(
        connection,
        "SELECT generic_plans + custom_plans, parameter_types::text FROM pg_prepared_statements"
        " WHERE statement LIKE 'SELECT a FROM t%%'",
        {},
    )
    assert found == [(18 - pg.PREPARE_THRESHOLD, "{bigint[],text,smallint}")]


async def test_an_index_is_used_with_any(connection: Connection) -> None:
    await pg.execute(connection, "CREATE TABLE t (a bigint PRIMARY KEY)")
    await pg.execute(connection, "SET enable_seqscan = off")
    plan = await pg.fetch_all(connection, "EXPLAIN SELECT a FROM t WHERE a = ANY(%(ids)s)", {"ids": [1, 2]})
    assert "Index Cond: (a = ANY ('{1,2}'::bigint[]))" in str(plan)


@attrs.frozen
class Point:
    x: int
    y: int
    label: str = "none"


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("1 AS x, 2 AS y, 'a' AS label", Point(1, 2, "a")),
        ("'a' AS label, 2 AS y, 1 AS x", Point(1, 2, "a")),
        ("2 AS y, 1 AS x", Point(1, 2)),
    ],
)
async def test_columns_go_to_fields_by_name(connection: Connection, columns: str, expected: Point) -> None:
    assert await pg.fetch_as(connection, Point, f"SELECT {columns}") == [expected]


@pytest.mark.parametrize("columns", ["1 AS x", "1 AS x, 2 AS y, 3 AS z", "1 AS x, 2 AS y, 3 AS y"])
async def test_columns_that_are_not_fields_are_refused(connection: Connection, columns: str) -> None:
    with pytest.raises(psycopg.ProgrammingError, match="do not make a Point"):
        await pg.fetch_as(connection, Point, f"SELECT {columns}")


async def test_the_ways_to_ask(connection: Connection) -> None:
    await pg.execute(connection, "CREATE TABLE t (a bigint)")
    assert await pg.execute(connection, "INSERT INTO t SELECT generate_series(1, 3)") == 3
    assert await pg.fetch_all(connection, "SELECT a FROM t ORDER BY a") == [(1,), (2,), (3,)]
    assert await pg.fetch_one(connection, "SELECT a, -a FROM t ORDER BY a") == (1, -1)
    assert await pg.fetch_one(connection, "SELECT a FROM t WHERE a > 3") is None
    assert await pg.fetch_value(connection, "SELECT max(a) FROM t") == 3
    assert await pg.fetch_value(connection, "SELECT a FROM t WHERE a > 3") is None


async def test_which_errors_mean_what(connection: Connection) -> None:
    await pg.execute(connection, "CREATE TABLE t (a smallint PRIMARY KEY)")
    await pg.execute(connection, "INSERT INTO t VALUES (1)")
    for query in ["INSERT INTO t VALUES (1)", "INSERT INTO t VALUES (1000000)"]:
        with pytest.raises(psycopg.Error) as caught:
            await pg.execute(connection, query)
        assert is_content_error(caught.value)
        assert not is_retryable(caught.value)
    with pytest.raises(psycopg.Error) as caught:
        await pg.execute(connection, "SELEC")
    assert not is_content_error(caught.value)
    assert not isinstance(caught.value, DATABASE_ERRORS)
    assert is_retryable(psycopg.errors.DeadlockDetected())
