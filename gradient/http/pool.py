"""Connections kept for the next request, a few for each origin. No requests here."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Final

import attrs
import trio

from gradient.http.connection import Connection
from gradient.http.dial import dial
from gradient.http.url import Origin

# As many as a worker uploads at once; more would be closed by the server before they are used.
IDLE_PER_ORIGIN: Final = 16
# Servers close idle connections after 5 s (hypercorn) to 75 s (nginx); an older one is a bet.
IDLE_LIMIT: Final = 30.0  # seconds


@attrs.frozen
class _Idle:
    connection: Connection
    since: float


class Pool:
    """Idle connections by origin, newest last. Synchronous state: trio runs nothing in between."""

    def __init__(self, tls: Callable[[], ssl.SSLContext]) -> None:
        self._tls = tls
        self._idle: dict[Origin, list[_Idle]] = {}
        self._closed = False

    async def take(self, origin: Origin) -> Connection | None:
        """The most recently used connection that still looks well; None when there is none."""
        waiting = self._idle.get(origin, [])
        while waiting:
            idle = waiting.pop()
            if trio.current_time() - idle.since < IDLE_LIMIT and idle.connection.quiet():
                return idle.connection
            await idle.connection.aclose()
        return None

    async def open(self, origin: Origin) -> Connection:
        """A new connection; raises ConnectFailed."""
        return Connection(await dial(origin, self._tls), origin)

    async def give_back(self, connection: Connection) -> None:
        """Keep `connection` for the next request if it can carry one, close it otherwise."""
        waiting = self._idle.setdefault(connection.origin, [])
        if self._closed or len(waiting) >= IDLE_PER_ORIGIN or not connection.next_request():
            await connection.aclose()
        else:
            waiting.append(_Idle(connection, trio.current_time()))

    async def aclose(self) -> None:
        """Close every idle connection, and from now on those that come back."""
        self._closed = True
        idle, self._idle = self._idle, {}
        for waiting in idle.values():
            for entry in waiting:
                await entry.connection.aclose()
