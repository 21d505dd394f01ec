"""Restarts a service on the errors that are expected of it, and on no others.

A database that went away comes back; a programming error does not get better by trying again. So
each service lists the errors it may have (database gone, socket gone), and anything else stops the
process loudly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import attrs
import structlog
import trio

from gradient.nursery.backoff import Backoff
from gradient.nursery.health import Child, HealthTable, describe

# A service that ran this long was well: its next failure is a new one, not more of the last.
HEALTHY_AFTER: Final = 300.0  # seconds

log = structlog.get_logger()


class ServiceReturned(RuntimeError):
    """A service runs until it is cancelled; this one returned."""


async def supervise(  # noqa: ASYNC128  # hands its task_status on
    name: str,
    service: Callable[..., Awaitable[None]],
    *,
    restart_on: tuple[type[Exception], ...],
    health: HealthTable,
    may_return: bool = False,
    task_status: trio.TaskStatus[Any] | None = None,
) -> None:
    """Run `service`, and again after each failure with an error of `restart_on`, without a limit.

    The pause is 1 s, doubling to 60 s, and 1 s again after a run of five minutes. Returns only when
    the service returned and `may_return` says that is an end; otherwise that is `ServiceReturned`.

    With `task_status` the service takes one too, and its first start is told; what keeps it from that is
    raised, whatever it is: whoever starts a service wants to know.

    Raises every other error of the service. Of an exception group, members of `restart_on` are taken
    out and what is left is raised. Cancellation passes through at once, also out of a pause.
    """
    child = health.child(name)
    backoff = Backoff()
    first = _FirstStart(task_status)
    run = service if task_status is None else partial(service, task_status=first)
    try:
        while await _failed(run, restart_on, child, backoff, first):
            await _pause(child, backoff)
    finally:
        child.stopped()
    if not may_return:
        raise ServiceReturned(f"{name} returned; a service runs until it is cancelled")


@attrs.define(eq=False)
class _FirstStart:
    """Tells of the first start of a service; a service that nobody waits for counts as started."""

    _waits: trio.TaskStatus[Any] | None

    @property
    def is_due(self) -> bool:
        return self._waits is not None

    def started(self, value: Any = None) -> None:
        """The service runs; later starts are no news."""
        waits, self._waits = self._waits, None
        if waits is not None:
            waits.started(value)


async def _failed(
    service: Callable[[], Awaitable[None]],
    restart_on: tuple[type[Exception], ...],
    child: Child,
    backoff: Backoff,
    first: _FirstStart,
) -> bool:
    """One run. True: it ended with an error that calls for another; False: it returned."""
    started = trio.current_time()
    child.running()
    failed = False
    try:
        await service()
    except* restart_on as group:
        if first.is_due:
            raise
        failed = True
        if trio.current_time() - started >= HEALTHY_AFTER:
            child.good()
            backoff.reset()
        child.failed(describe(group))
        # Listed errors come from outside: a traceback of ours would say nothing of them.
        log.warning("service failed", service=child.name, error=describe(group))
    return failed


async def _pause(child: Child, backoff: Backoff) -> None:
    child.backing_off()
    pause = backoff.next_pause()
    log.info("service restarts", service=child.name, pause=pause)
    await trio.sleep(pause)
