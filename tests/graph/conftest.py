"""What the tests of the graph share: cancellation at every checkpoint, and a server that stops answering."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import attrs
import pytest
import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

Step: TypeAlias = Callable[[], Awaitable[None]]
Sweep: TypeAlias = Callable[[Step, Step], Awaitable[int]]


class CancelAt(trio.abc.Instrument):
    """Cancel `scope` after `task` has made `left` more steps."""

    def __init__(self, task: trio.lowlevel.Task, left: int, scope: trio.CancelScope) -> None:
        self.task, self.left, self.scope = task, left, scope

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


@pytest.fixture
def sweep() -> Sweep:
    """Run a scenario again and again, cancelled after its 1st, 2nd, ... step, until it gets to its end.

    `sweep(scenario, check)` calls `check` after each run, and gives the number of cancelled runs.
    """

    async def run(scenario: Step, check: Step) -> int:
        for cancelled_runs in itertools.count():
            with trio.CancelScope() as scope:
                instrument = CancelAt(trio.lowlevel.current_task(), cancelled_runs + 1, scope)
                trio.lowlevel.add_instrument(instrument)
                try:
                    await scenario()
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            await check()
            if not scope.cancelled_caught:
                return cancelled_runs
        raise AssertionError("unreachable")

    return run


@attrs.define(eq=False)
class Proxy:
    """Stands between a client and PostgreSQL, and can hold back or cut what passes."""

    url: str
    _target: str
    _nursery: trio.Nursery
    # Set while bytes pass; a stalled proxy still accepts connections, as a stopped server's kernel does.
    _open: trio.Event
    # Set while the server's answers pass; the questions do all the same.
    _answers: trio.Event
    _streams: list[trio.SocketStream] = attrs.field(factory=list)

    def stall(self) -> None:
        """From now on nothing passes, in either direction."""
        self._open = trio.Event()

    def hold_answers(self) -> None:
        """From now on the server hears the client, and the client does not hear the server."""
        self._answers = trio.Event()

    def open(self) -> None:
        """Everything passes again, for new connections."""
        self._open.set()
        self._answers.set()

    def cut(self) -> None:
        """Close all connections at once, without a word."""
        for stream in self._streams:
            stream.socket.close()
        self._streams.clear()

    async def serve(self, listener: trio.SocketListener) -> None:
        await trio.serve_listeners(self._relay, [listener], handler_nursery=self._nursery)

    async def _relay(self, client: trio.SocketStream) -> None:
        server = await _connect(self._target)
        self._streams += [client, server]
        async with client, server, trio.open_nursery() as nursery:
            nursery.start_soon(self._pass, client, server, False)
            nursery.start_soon(self._pass, server, client, True)

    async def _pass(self, source: trio.SocketStream, sink: trio.SocketStream, answers: bool) -> None:
        try:
            async for data in source:
                await (self._answers if answers else self._open).wait()
                await self._open.wait()
                await sink.send_all(data)
            await sink.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


async def _connect(url: str) -> trio.SocketStream:
    params = conninfo_to_dict(url)
    host, port = str(params["host"]), int(params.get("port") or 5432)
    if host.startswith("/"):
        return await trio.open_unix_socket(f"{host}/.s.PGSQL.{port}")
    return await trio.open_tcp_stream(host, port)


@pytest.fixture
async def proxy(database_url: str, tmp_path: Path) -> AsyncIterator[Proxy]:
    """A proxy to this test's database."""
    socket = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await socket.bind(str(tmp_path / ".s.PGSQL.5432"))
    socket.listen()
    url = make_conninfo(**{**conninfo_to_dict(database_url), "host": str(tmp_path), "port": 5432})
    passing = trio.Event()
    passing.set()
    async with trio.open_nursery() as nursery:
        proxy = Proxy(url, database_url, nursery, passing, passing)
        nursery.start_soon(proxy.serve, trio.SocketListener(socket))
        yield proxy
        nursery.cancel_scope.cancel()
