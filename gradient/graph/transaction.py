"""One transaction of the graph writer, as the functions of this package see it.

Everything in `graph/` that changes the graph takes a `Transaction`: the connection, the time as an
argument, and the `Moves` it adds to. `graph_transaction` makes one, under the graph lock: counters that
are moved by transitions are right in a serial order of transitions only (docs/adr/0023).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

import attrs

from gradient.graph.moves import Moves
from gradient.graph.pg import Connection, execute, fetch_all, fetch_value
from gradient.graph.pg_errors import GraphError
from gradient.graph.statements import Statement

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# The advisory lock of whoever moves the graph; 640 is the fold's, 641 the server's.
GRAPH_LOCK: Final = 642
TAKE_GRAPH_LOCK: Final = Statement("take_graph_lock", f"SELECT pg_advisory_xact_lock({GRAPH_LOCK})")
# In one round trip with the token that a transaction is known by after a lost connection (docs/adr/0022).
LEAVE_TOKEN: Final = Statement(
    "leave_commit_token",
    f"""
    WITH alone AS MATERIALIZED (SELECT pg_advisory_xact_lock({GRAPH_LOCK}))
    UPDATE writer_commit SET token = %(token)s FROM alone
    """,
)


class Rejected(GraphError):
    """A message cannot be applied as it is: it alone fails, and its sender gets the reason in words."""


class Message(Protocol[T_co]):
    """What the writer's channel carries: a value that knows how to apply itself."""

    async def apply(self, tx: Transaction) -> T_co:
        """Change the graph. May be run again from the start: the writer retries, and after a lost
        connection it cannot know whether the commit arrived."""
        ...


class Alone:
    """A message that has a transaction to itself: it is about a large part of the graph. Nobody's row locks
    are held while it reads that, and its own are gone as soon as it is done."""

    __slots__ = ()


class Submit(Protocol):
    """`GraphWriter.submit`: the result of a message once it is committed."""

    def __call__(self, message: Message[T]) -> Awaitable[T]: ...


@attrs.define(eq=False)
class Transaction:
    """A running transaction. `now` is the one time every statement in it uses."""

    connection: Connection
    now: datetime
    moves: Moves = attrs.field(factory=Moves)

    async def rows(self, statement: Statement, **params: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        return await fetch_all(self.connection, statement, params)

    async def ids(self, statement: Statement, **params: Any) -> list[int]:
        """The first column of every row."""
        return [row[0] for row in await fetch_all(self.connection, statement, params)]

    async def value(self, statement: Statement, **params: Any) -> Any:
        """The first column of the first row, None without a row."""
        return await fetch_value(self.connection, statement, params)

    async def run(self, statement: Statement, **params: Any) -> int:
        """Run a statement for its effect; how many rows it touched."""
        return await execute(self.connection, statement, params)


def ordered(ids: Iterable[int]) -> list[int]:
    """Ids as every statement wants them: distinct and in lock order."""
    return sorted(set(ids))


@asynccontextmanager
async def graph_transaction(
    connection: Connection, now: datetime, token: UUID | None = None
) -> AsyncIterator[Transaction]:
    """A transaction that moves the graph, alone: another one, on whatever connection, waits for its end.

    Also one that a lost writer has left behind in the server. Take no other lock before it. `token` is left
    in `writer_commit` when it commits.
    """
    async with connection.transaction():
        if token is None:
            await execute(connection, TAKE_GRAPH_LOCK)
        else:
            await execute(connection, LEAVE_TOKEN, {"token": token})
        yield Transaction(connection, now)
