"""Drain: a sequence of named phases, each with a deadline.

A server's phases are: stop accepting, tell the peers, wait for them up to a deadline, cancel what is
left, let the graph writer empty its queue, stop the database. A phase that fails or overruns never
keeps the later ones from running: they are what makes the next start clean.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import attrs
import structlog
import trio

# Long enough that a quick drain says nothing, short enough that a slow one is understood.
SAY_EVERY: Final = 5.0  # seconds

log = structlog.get_logger()


def _nothing_to_say() -> str:
    return ""


@attrs.frozen
class Phase:
    """One step of a drain: `action` gets `deadline` seconds and is then cancelled.

    `waiting_for` says in words what it still waits for (`3 sessions`); it is called while it runs.
    """

    name: str
    action: Callable[[], Awaitable[None]]
    deadline: float
    waiting_for: Callable[[], str] = _nothing_to_say


async def drain(phases: Sequence[Phase]) -> tuple[str, ...]:
    """Run the phases in order; returns the names of those that were cut off at their deadline.

    Raises an exception group of what the phases raised, after the last one. Cancelling the drain ends
    it at once: that is what a second signal does.
    """
    overran = []
    errors = []
    for phase in phases:
        try:
            if not await _run(phase):
                overran.append(phase.name)
        except Exception as error:  # the later phases must run whatever this one did
            log.error("drain phase failed", phase=phase.name, exc_info=error)
            errors.append(error)
    if errors:
        raise ExceptionGroup("the drain did not go through", errors)
    return tuple(overran)


async def _run(phase: Phase) -> bool:
    """One phase; False when its deadline cut it off."""
    log.info("drain", phase=phase.name)
    scope = trio.CancelScope()
    scope.deadline = trio.current_time() + phase.deadline
    with scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_say, phase)
            await phase.action()
            nursery.cancel_scope.cancel()
    if scope.cancelled_caught:
        log.warning("drain phase cut off", phase=phase.name, waiting_for=phase.waiting_for())
    return not scope.cancelled_caught


async def _say(phase: Phase) -> None:
    while True:
        await trio.sleep(SAY_EVERY)
        log.info("drain waits", phase=phase.name, waiting_for=phase.waiting_for())
