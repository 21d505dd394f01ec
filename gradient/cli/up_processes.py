"""The processes of `gradient up`: a server in this one, a worker in a child, and the order they stop in.

The child is started first, so that its interpreter loads while the server starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from gradient.cli.run import cancel_when
from gradient.cli.worker_child import WorkerChild
from gradient.nursery.signals import Stop
from gradient.settings import Settings

if TYPE_CHECKING:
    from gradient.serve import Serving


class Serve(Protocol):
    """`gradient.serve.serve`, its settings given."""

    async def __call__(self, stop: Stop, *, task_status: trio.TaskStatus[Serving]) -> None:
        """Serve until `stop`, started once it listens."""


async def real_server(  # noqa: ASYNC128  # hands its task_status on
    settings: Settings, stop: Stop, *, task_status: trio.TaskStatus[Serving]
) -> None:
    """The real one. Its modules take longest to load: the worker's process is running by now."""
    from gradient.serve import serve

    await serve(settings, stop, task_status=task_status)


@attrs.define(eq=False)
class Server:
    """The server as a task whose start and end can be waited for."""

    serve: Serve
    stop: Stop = attrs.field(factory=Stop, init=False)
    ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    _serving: Serving | None = attrs.field(default=None, init=False)
    _listens: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def ready(self) -> Serving:
        """Wait until it listens. Cancelled by `run_processes` when that will never be."""
        await self._listens.wait()
        assert self._serving is not None
        return self._serving

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve until stopped. Raises what `serve` raises, in a group."""
        try:
            async with trio.open_nursery() as nursery:
                self._serving = await nursery.start(self.serve, self.stop)
                self._listens.set()
                task_status.started()
        finally:
            self.ended.set()


# What is done while both run.
Job = Callable[[Server], Awaitable[None]]


async def run_processes(server: Server, worker: WorkerChild, stop: Stop, job: Job) -> None:
    """Start both and run `job` until it returns, `stop` is requested, or the worker ends by itself; then
    stop the worker, then drain the server.

    `job` begins at once, beside the starts. A second request of `stop` ends everything at once. Raises,
    after the drain and in a group, what `job` raised, why the worker ended, and what `serve` raises."""
    failure: Exception | None = None
    async with trio.open_nursery() as root:
        root.start_soon(cancel_when, stop.at_once, root.cancel_scope)
        await root.start(worker.run)
        try:
            async with trio.open_nursery() as during:
                during.start_soon(cancel_when, stop.gently, during.cancel_scope)
                during.start_soon(cancel_when, worker.ended, during.cancel_scope)
                during.start_soon(_start, root, server, worker)
                await job(server)
                during.cancel_scope.cancel()
        except Exception as error:  # whatever it is: the drain comes first
            failure = error
        await worker.stop()
        server.stop.request()
        await server.ended.wait()
        root.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if worker.fault is not None:
        raise worker.fault


async def _start(root: trio.Nursery, server: Server, worker: WorkerChild) -> None:
    """Start the server in `root`, where it outlives the job, and tell the worker where it is."""
    await root.start(server.run)
    await worker.tell((await server.ready()).http_url)
