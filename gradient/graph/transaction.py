"""One transaction of the graph writer, as the functions of this package see it.

Everything in `graph/` that changes the graph takes a `Transaction`: the connection, the time as an
argument, and the `Moves` it adds to. Only the writer, startup recovery and tests make one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar

import attrs

from gradient.graph.moves import Moves
from gradient.graph.pg import Connection
from gradient.graph.statements import Statement

T_co = TypeVar("T_co", covariant=True)


class GraphError(Exception):
    """The content of a message cannot be applied: it fails that message alone, in words for its sender."""


class Message(Protocol[T_co]):
    """What the writer's channel carries: a value that knows how to apply itself."""

    async def apply(self, tx: Transaction) -> T_co:
        """Change the graph. Must be safe to run again from the start (the writer retries)."""
        ...


@attrs.define(eq=False)
class Transaction:
    """A running transaction. `now` is the one time every statement in it uses."""

    connection: Connection
    now: datetime
    moves: Moves = attrs.field(factory=Moves)

    async def rows(self, statement: Statement, **params: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        cursor = await self.connection.execute(statement.text, params)
        return await cursor.fetchall()

    async def ids(self, statement: Statement, **params: Any) -> list[int]:
        """The first column of every row."""
        return [row[0] for row in await self.rows(statement, **params)]

    async def value(self, statement: Statement, **params: Any) -> Any:
        """The first column of the first row, None without a row."""
        cursor = await self.connection.execute(statement.text, params)
        row = await cursor.fetchone()
        return None if row is None else row[0]

    async def run(self, statement: Statement, **params: Any) -> int:
        """Run a statement for its effect; how many rows it touched."""
        cursor = await self.connection.execute(statement.text, params)
        return cursor.rowcount


def ordered(ids: Iterable[int]) -> Sequence[int]:
    """Ids as every statement wants them: distinct and in lock order."""
    return sorted(set(ids))
