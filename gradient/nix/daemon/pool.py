"""A few connections shared by many questions, and dedicated ones for builds. Layer: rank 1."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final

import attrs
import trio

from gradient.nix.daemon.address import DaemonAddress
from gradient.nix.daemon.connection import DEFAULT_OPTIONS, DaemonConnection, connect
from gradient.nix.daemon.options import DaemonOptions
from gradient.nix.daemon.transport import CLOSE_LIMIT

# Everything that was built or added through a connection is kept from garbage collection until it closes:
# long enough for what follows a build, short enough for a store that fills up.
MAX_AGE: Final = 600.0  # seconds


@attrs.define(eq=False)
class DaemonPool:
    """At most `limit` shared connections to one daemon, opened as needed, all with the same options.

    Use it as a context manager: leaving it closes the idle connections. Borrowers still inside then
    close theirs when they give them back. A connection older than MAX_AGE is not used again; where
    nobody borrows any more, `sweep` closes it.
    """

    address: DaemonAddress
    limit: int
    options: DaemonOptions = DEFAULT_OPTIONS
    _permits: trio.Semaphore = attrs.field(init=False)
    # Usable connections that nobody holds, the last used at the end.
    _idle: list[DaemonConnection] = attrs.field(factory=list, init=False)
    # When each open connection was opened.
    _opened: dict[DaemonConnection, float] = attrs.field(factory=dict, init=False)
    _closed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._permits = trio.Semaphore(self.limit)

    async def __aenter__(self) -> DaemonPool:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._closed = True
        with trio.move_on_after(CLOSE_LIMIT, shield=True):
            async with trio.open_nursery() as nursery:
                for connection in self._idle:
                    nursery.start_soon(connection.aclose)
        self._idle.clear()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[DaemonConnection]:
        """Borrow a connection, waiting while all are out. Raises what `connect` raises.

        A temporary root lives as long as its connection: take a dedicated one for those.
        """
        async with self._permits:
            connection = await self._take()
            try:
                yield connection
            finally:
                with trio.move_on_after(CLOSE_LIMIT, shield=True):
                    await self._give_back(connection)

    async def sweep(self) -> None:
        """Close the idle connections that will not be used again."""
        old = [connection for connection in self._idle if not self._is_good(connection)]
        for connection in old:
            self._idle.remove(connection)
        for connection in old:
            await self._close(connection)

    @asynccontextmanager
    async def dedicated(self, options: DaemonOptions | None = None) -> AsyncIterator[DaemonConnection]:
        """A new connection outside the limit, closed at the end of the block: for a build."""
        async with await connect(self.address, options or self.options) as connection:
            yield connection

    async def _take(self) -> DaemonConnection:
        while self._idle:
            connection = self._idle.pop()
            if self._is_good(connection):
                return connection
            await self._close(connection)
        connection = await connect(self.address, self.options)
        self._opened[connection] = trio.current_time()
        return connection

    async def _give_back(self, connection: DaemonConnection) -> None:
        if self._is_good(connection) and not self._closed:
            self._idle.append(connection)
        else:
            await self._close(connection)

    def _is_good(self, connection: DaemonConnection) -> bool:
        return connection.is_usable and trio.current_time() - self._opened[connection] < MAX_AGE

    async def _close(self, connection: DaemonConnection) -> None:
        del self._opened[connection]
        await connection.aclose()
