"""The registry of statements, and that PostgreSQL accepts every one of the program."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from gradient.graph import pg, statements
from gradient.graph.pg import Connection
from gradient.graph.statements import DuplicateStatement, Statement, all_statements


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Statement]]:
    """A registry of this test's own."""
    registry: dict[str, Statement] = {}
    monkeypatch.setattr(statements, "_REGISTRY", registry)
    return registry


def test_a_statement_knows_its_name_module_and_parameters(registry: dict[str, Statement]) -> None:
    statement = Statement("find", "\n    SELECT %(b)s, '100%%'\n      WHERE a = %(a)s OR b = %(b)s\n")
    assert registry == {"find": statement}
    assert statement.text == "SELECT %(b)s, '100%%'\n  WHERE a = %(a)s OR b = %(b)s"
    assert statement.parameters == ("b", "a")
    assert statement.numbered == "SELECT $1, '100%'\n  WHERE a = $2 OR b = $1"
    assert statement.module == __name__


def test_a_name_is_given_once(registry: dict[str, Statement]) -> None:
    Statement("find", "SELECT 1")
    with pytest.raises(DuplicateStatement, match="'find'"):
        Statement("find", "SELECT 2")
    assert registry["find"].text == "SELECT 1"


async def test_a_statement_runs_by_itself(connection: Connection, registry: dict[str, Statement]) -> None:
    statement = Statement("add", "SELECT %(a)s::bigint + %(b)s::bigint")
    assert await pg.fetch_value(connection, statement, {"a": 1, "b": 2}) == 3


async def refusal(connection: Connection, statement: Statement) -> str | None:
    """What PostgreSQL has against preparing and planning `statement`.

    With untyped parameters, which is how they are sent: so this is what production prepares.
    """
    name = f'"{statement.name}"'
    nulls = f"({', '.join(['NULL'] * len(statement.parameters))})" if statement.parameters else ""
    try:
        await pg.execute(connection, f"PREPARE {name} AS {statement.numbered}")
        await pg.execute(connection, f"EXPLAIN EXECUTE {name}{nulls}")
    except psycopg.Error as error:
        return str(error)
    return None


async def test_every_statement_is_accepted(connection: Connection) -> None:
    found = {statement.name: await refusal(connection, statement) for statement in all_statements()}
    assert {name: error for name, error in found.items() if error} == {}
    assert list(found) == sorted(found)
    assert "applied_migrations" in found


async def test_a_statement_that_is_not_accepted_is_found(
    connection: Connection, registry: dict[str, Statement]
) -> None:
    assert "does not exist" in (await refusal(connection, Statement("bad", "SELECT nothing FROM here")) or "")
    untyped = Statement("untyped", "SELECT unnest(%(ids)s)")
    assert "is not unique" in (await refusal(connection, untyped) or "")
