"""The real graph, driven as the writer drives it: messages in, one transaction around one or several.

`step` applies a message; between `open_shared` and `commit` messages share a transaction, as those that wait
in the writer's channel do, and evaluations get their verdict at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import attrs
from psycopg import Rollback

from gradient.graph.evaluation_end import finish_evaluations
from gradient.graph.moves import Moves
from gradient.graph.pg import Connection
from gradient.graph.transaction import Message, Transaction, graph_transaction

T = TypeVar("T")
START = datetime(2026, 1, 1, tzinfo=UTC)
# Ids of the tasks there are. One tries again what its own builder has failed.
TASKS = (1, 2)
RETRYING_TASK = 2

# Nothing refers to these from outside, so one statement empties the graph, and the numbers begin anew: an
# example is the same however many were run before it.
EMPTY = """
    TRUNCATE evaluation, derivation, cached_path, evaluation_shared_build_delta, dispatched_job, task
    RESTART IDENTITY CASCADE
"""


@attrs.define(eq=False)
class Graph:
    """A connection, the time, and the transaction that is open."""

    connection: Connection
    now: datetime = START
    _shared: AbstractAsyncContextManager[Transaction] | None = None
    _tx: Transaction | None = None

    @property
    def in_shared(self) -> bool:
        """Whether messages share a transaction now."""
        return self._tx is not None

    async def empty(self, upstream: bool = False) -> None:
        """As a new database, with one project, its tasks, and one cache, which may have an upstream cache."""
        self.now = START
        async with self.connection.transaction():
            await self.connection.execute(EMPTY)
            await self.connection.execute(
                "INSERT INTO project (name, created_at) VALUES ('main', now()) ON CONFLICT DO NOTHING"
            )
            await self.connection.execute(
                "INSERT INTO cache (name, created_at) VALUES ('main', now()) ON CONFLICT DO NOTHING"
            )
            await self.connection.execute(
                "INSERT INTO task (project, name, repository, retry_failed_builds, created_at)"
                " SELECT p.id, 't' || t, 'u', t = %s::integer, now()"
                " FROM project p, unnest(%s::integer[]) t ORDER BY t",
                [RETRYING_TASK, list(TASKS)],
            )
            await self.connection.execute("DELETE FROM cache_upstream")
            if upstream:
                await self.connection.execute(
                    "INSERT INTO cache_upstream (cache, url, public_key)"
                    " SELECT id, 'https://cache.example.org', 'key:k' FROM cache"
                )

    def pass_time(self, delta: timedelta = timedelta(seconds=1)) -> None:
        """Time moves between transactions only."""
        if not self.in_shared:
            self.now += delta

    async def apply(self, message: Message[T], saw: Callable[[Moves], None]) -> T:
        """Apply a message; `saw` gets what its transaction moved until here. A refusal rolls the message
        back and is raised."""
        if self._tx is not None:
            # As the writer does it once one message of several is refused.
            step = Transaction(self.connection, self._tx.now)
            async with self.connection.transaction():
                answer = await message.apply(step)
            self._tx.moves.merge(step.moves)
            saw(self._tx.moves)
            return answer
        async with graph_transaction(self.connection, self.now) as tx:
            answer = await message.apply(tx)
            await finish_evaluations(tx)
        saw(tx.moves)
        return answer

    async def open_shared(self) -> None:
        """The messages that follow share a transaction."""
        self._shared = graph_transaction(self.connection, self.now)
        self._tx = await self._shared.__aenter__()

    async def commit(self, saw: Callable[[Moves], None]) -> None:
        """End the shared transaction."""
        assert self._tx is not None
        assert self._shared is not None
        await finish_evaluations(self._tx)
        await self._shared.__aexit__(None, None, None)
        tx, self._tx = self._tx, None
        saw(tx.moves)

    async def roll_back(self) -> None:
        """Leave a shared transaction that a failed example left open."""
        if self._tx is not None and self._shared is not None:
            self._tx = None
            await self._shared.__aexit__(Rollback, Rollback(), None)
