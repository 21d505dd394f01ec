"""The composition root of a process: start its tasks, wait for a stop, drain, cancel.

`serve.py` and `work.py` give one function that starts every long-lived task of the process and
returns the phases of its drain; everything else about a life and its end is here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import attrs
import structlog
import trio

from gradient.nursery.drain import Phase, drain
from gradient.nursery.signals import Stop

log = structlog.get_logger()

StartTree = Callable[[trio.Nursery], Awaitable[Sequence[Phase]]]


async def run_root(start: StartTree, stop: Stop) -> None:
    """Run the tasks that `start` puts into the root nursery, until `stop`.

    The first request cancels a start that is still going on, or runs the drain phases that `start`
    returned; then everything left is cancelled. A second request cancels at once. An error of any
    task cancels the others and is raised, in a group.
    """
    async with trio.open_nursery() as root:
        root.start_soon(_cancel_at_once, stop, root.cancel_scope)
        phases = await _start_unless_stopped(start, root, stop)
        if phases is not None:
            await stop.gently.wait()
            await drain(phases)
        root.cancel_scope.cancel()


async def _start_unless_stopped(start: StartTree, root: trio.Nursery, stop: Stop) -> Sequence[Phase] | None:
    """The phases, or None when a stop came before everything was up."""
    phases = None
    async with trio.open_nursery() as starting:
        starting.start_soon(_cancel_when, stop.gently, starting.cancel_scope)
        phases = await start(root)
        starting.cancel_scope.cancel()
    return phases


async def _cancel_at_once(stop: Stop, scope: trio.CancelScope) -> None:
    await stop.at_once.wait()
    log.warning("stopping at once")
    scope.cancel()


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@attrs.define(eq=False)
class Task:
    """A child of the root nursery that a drain phase can stop by itself."""

    name: str
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def run(self, service: Callable[[], Awaitable[None]]) -> None:
        """Run the service inside this task's scope; give this to the nursery, once."""
        try:
            with self._scope:
                await service()
        finally:
            self._ended.set()

    async def serve(  # noqa: ASYNC128  # the service itself says when it has started
        self, service: Callable[..., Awaitable[None]], *, task_status: trio.TaskStatus[Any]
    ) -> None:
        """The same for a service that says when it has started; for `nursery.start`."""
        await self.run(partial(service, task_status=task_status))

    async def stop(self) -> None:
        """Cancel the service and wait until it has cleaned up."""
        self._scope.cancel()
        await self._ended.wait()

    async def wait(self) -> None:
        """Wait until the service has ended by itself."""
        await self._ended.wait()
