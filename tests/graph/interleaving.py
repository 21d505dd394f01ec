"""Two connections stepped statement by statement.

A session stands before each of its statements and before its commit. One that waits for a lock of the other
is seen in PostgreSQL's own list of who blocks whom. Each order starts from the same rows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
from psycopg.transaction import AsyncTransaction

from gradient.graph.pg import Connection, _Cursor, execute, fetch_all, fetch_value
from tests.turns import Order, Outcome, Side, play

# What one session does, on the connection it is given.
Act: TypeAlias = Callable[[Connection], Awaitable[Any]]


class SteppedCursor(_Cursor):
    """A cursor that waits for its turn."""

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        await self._conn.session.turn()  # type: ignore[attr-defined]
        return await super().execute(*args, **kwargs)


class SteppedConnection(Connection):
    """A connection whose statements, and commits, wait for their turn."""

    session: Session

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncIterator[AsyncTransaction]:
        """As ever, and the commit is a step of its own."""
        async with super().transaction(savepoint_name, force_rollback) as transaction:
            yield transaction
            await self.session.turn()


@attrs.define(eq=False)
class Session(Side):
    """What one connection does."""

    connection: SteppedConnection
    monitor: Connection
    do: Act

    def __attrs_post_init__(self) -> None:
        self.connection.session = self

    async def act(self) -> Any:
        return await self.do(self.connection)

    async def stands(self) -> bool:
        query = f"SELECT cardinality(pg_blocking_pids({self.connection.info.backend_pid})) > 0"
        while not self.standing.is_set():
            if await fetch_value(self.monitor, query) and not self.standing.is_set():
                return False
        return True


@attrs.define(eq=False)
class Table:
    """Where orders are played: two connections, a third that watches them, the rows they start from."""

    monitor: Connection
    connections: tuple[SteppedConnection, SteppedConnection]
    # Brings the rows back to what they were.
    _restore: str

    @classmethod
    @asynccontextmanager
    async def laid(cls, url: str) -> AsyncIterator[Table]:
        """With the rows that the database at `url` has now."""
        async with (
            await Connection.connect(url) as monitor,
            await SteppedConnection.connect(url, cursor_factory=SteppedCursor) as one,
            await SteppedConnection.connect(url, cursor_factory=SteppedCursor) as two,
        ):
            yield cls(monitor, (one, two), await _save(monitor))

    async def play(self, acts: tuple[Act, Act], order: Order) -> Outcome:
        """Run both in this order, each then to its end."""
        await execute(self.monitor, self._restore)
        one, two = (Session(c, self.monitor, act) for c, act in zip(self.connections, acts, strict=True))
        return await play(one, two, order)


async def _save(connection: Connection) -> str:
    """Copy every table, and say how the copies come back: in the order the tables were made, which is that of
    their references. What triggers write meanwhile goes."""
    tables = (
        "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
    )
    found = [name for (name,) in await fetch_all(connection, f"{tables} ORDER BY oid")]
    await execute(connection, "CREATE SCHEMA saved")
    for name in found:
        await execute(connection, f"CREATE TABLE saved.{name} AS TABLE {name}")
    last = "evaluation_shared_build_delta"
    refill = [
        f"INSERT INTO {name} OVERRIDING SYSTEM VALUE TABLE saved.{name}" for name in found if name != last
    ]
    sequences = "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'public'"
    reset = [
        f"SELECT setval('{name}', {value or 1}, {value is not None})"
        for name, value in await fetch_all(connection, sequences)
    ]
    return ";".join(
        [
            "BEGIN",
            *(f"DELETE FROM {name}" for name in reversed(found)),
            *refill,
            f"DELETE FROM {last}",
            f"INSERT INTO {last} OVERRIDING SYSTEM VALUE TABLE saved.{last}",
            *reset,
            "COMMIT",
        ]
    )
