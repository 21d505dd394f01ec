"""The readers' connections: a pool, each lent to one task at a time. Layer: graph."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import attrs
import trio

from gradient.graph.pg import Connection
from gradient.graph.pg_errors import DatabaseDown

# Seconds between the attempts of a pool to replace a broken connection; then the caller is told.
# Together three seconds, as long as a restart of PostgreSQL takes.
RECONNECT_PAUSES: Final = (0.1, 0.2, 0.4, 0.8, 1.6)


@attrs.define(eq=False)
class Pool:
    """At most `size` connections, lent one at a time. Made by `Pool.open`."""

    url: str
    _permits: trio.Semaphore
    # The last used at the end, and lent first: it has its statements prepared and its catalog read, and
    # where one is enough no other is made.
    _idle: list[Connection] = attrs.field(factory=list, init=False)
    # Once closed, what comes back is not kept.
    _closed: bool = attrs.field(default=False, init=False)

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, size: int) -> AsyncIterator[Pool]:
        """A pool of up to `size` connections to `url`; none is made before it is needed."""
        pool = cls(url, trio.Semaphore(size, max_value=size))
        try:
            yield pool
        finally:
            pool.close()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Borrow a connection; waits while all are lent. A broken one is replaced.

        Raises `DatabaseDown` when the server has not answered for `RECONNECT_PAUSES`. What is given
        back closed, or with a transaction open, is not lent again.
        """
        async with self._permits:
            connection = self._idle.pop() if self._idle else None
            try:
                if connection is None or not connection.is_idle():
                    if connection is not None:
                        connection.abandon()
                    connection = await self._connect()
                yield connection
            finally:
                self._put(connection)

    async def _connect(self) -> Connection:
        for pause in RECONNECT_PAUSES:
            with suppress(DatabaseDown):
                return await Connection.connect(self.url)
            await trio.sleep(pause)
        return await Connection.connect(self.url)

    def _put(self, connection: Connection | None) -> None:
        if connection is None:
            return
        if self._closed or not connection.is_idle():
            connection.abandon()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections, and each lent one as it comes back. Closing twice is fine."""
        self._closed = True
        while self._idle:
            self._idle.pop().abandon()
