"""Two connections stepped statement by statement, through every order with at most two switches.

A session stops before each of its statements and before its commit, and goes on by one when it is told to.
One that waits for a lock of the other is seen in PostgreSQL's own list of who blocks whom. Each order starts
from the same rows.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
import trio
from psycopg.transaction import AsyncTransaction

from gradient.graph.pg import Connection, _Cursor, execute, fetch_all, fetch_value

# What one session does, on the connection it is given.
Act: TypeAlias = Callable[[Connection], Awaitable[Any]]
# Seconds for one order: two sessions that block each other are told so by PostgreSQL after one.
LIMIT = 30


class SteppedCursor(_Cursor):
    """A cursor that waits for its turn."""

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        await self._conn.turn()  # type: ignore[attr-defined]
        return await super().execute(*args, **kwargs)


class SteppedConnection(Connection):
    """A connection whose statements, and commits, wait for their turn."""

    standing: trio.Event
    told: trio.Event

    async def turn(self) -> None:
        """Stand still until told to go on."""
        self.standing.set()
        await self.told.wait()
        self.told = trio.Event()

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncIterator[AsyncTransaction]:
        """As ever, and the commit is a step of its own."""
        async with super().transaction(savepoint_name, force_rollback) as transaction:
            yield transaction
            await self.turn()


@attrs.define(eq=False)
class Session:
    """One of the two. Between two steps it stands before a statement, waits for a lock, or is done."""

    connection: SteppedConnection
    monitor: Connection
    act: Act
    answer: Any = None
    error: Exception | None = None
    done: bool = False

    def __attrs_post_init__(self) -> None:
        self.connection.standing, self.connection.told = trio.Event(), trio.Event()

    async def run(self) -> None:
        try:
            self.answer = await self.act(self.connection)
        except Exception as error:
            self.error = error
        self.done = True
        self.connection.standing.set()

    async def stands(self) -> bool:
        """Wait until it has done its step; False when it waits for a lock."""
        query = f"SELECT cardinality(pg_blocking_pids({self.connection.info.backend_pid})) > 0"
        while not self.connection.standing.is_set():
            if await fetch_value(self.monitor, query) and not self.connection.standing.is_set():
                return False
        return True

    async def step(self) -> bool:
        """One statement; False when it cannot: done, or waiting for a lock."""
        if not await self.stands() or self.done:
            return False
        self.connection.standing = trio.Event()
        self.connection.told.set()
        await self.stands()
        return True


@attrs.frozen
class Order:
    """Who begins, with how many statements, and with how many the other interrupts it."""

    second_begins: bool
    before: int
    between: int


@attrs.frozen
class Outcome:
    """How one order went."""

    order: Order
    # The first was done before it had made its steps; the other was, or waited for the first.
    first_ended: bool
    other_stopped: bool
    answers: tuple[Any, Any]
    errors: tuple[Exception | None, Exception | None]


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
        first, other = (two, one) if order.second_begins else (one, two)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.run)
            nursery.start_soon(two.run)
            with trio.fail_after(LIMIT):
                first_ended = await _advance(first, order.before)
                other_stopped = await _advance(other, order.between)
                for session in itertools.cycle((first, other)):
                    while await session.step():
                        pass
                    if first.done and other.done:
                        break
        return Outcome(order, first_ended, other_stopped, (one.answer, two.answer), (one.error, two.error))


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


async def _advance(session: Session, steps: int) -> bool:
    """So many steps; whether it can make no more: it is done, or waits for a lock."""
    for _ in range(steps):
        if not await session.step():
            break
    return session.done or not await session.stands()


async def every_order(play: Callable[[Order], Awaitable[Outcome]]) -> None:
    """Try every order with at most two switches, found as it goes: nobody knows how many steps there are."""
    for second_begins in (False, True):
        await _orders_begun_by(second_begins, play)


async def _orders_begun_by(second_begins: bool, play: Callable[[Order], Awaitable[Outcome]]) -> None:
    for before in itertools.count(1):
        for between in itertools.count(1):
            outcome = await play(Order(second_begins, before, between))
            if outcome.first_ended:
                return
            if outcome.other_stopped:
                break
