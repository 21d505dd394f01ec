"""Runs a pass again and again, each time inside a budget.

A pass that hangs must not take its successors with it: over its budget it is cancelled where it is,
which is logged, and the pass ticks again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from gradient.nursery.health import Child, HealthTable, describe
from gradient.nursery.kick import Kick

log = structlog.get_logger()


async def periodic(
    name: str,
    interval: float,
    budget: float,
    pass_fn: Callable[[], Awaitable[None]],
    *,
    health: HealthTable,
    wake: Kick | None = None,
    recoverable: tuple[type[Exception], ...] = (),
) -> None:
    """Run `pass_fn` now and then `interval` seconds after each run ended, or as soon as `wake` is kicked.

    Kicks that come during a run lead to one more run. A run longer than `budget` seconds is cancelled,
    one that fails with an error of `recoverable` is recorded; both tick again. Any other error is
    raised, also the rest of a group. Runs until cancelled.
    """
    child = health.child(name)
    child.running()
    try:
        while True:
            await _run_once(pass_fn, budget, recoverable, child)
            await _tick(interval, wake)
    finally:
        child.stopped()


async def _run_once(
    pass_fn: Callable[[], Awaitable[None]],
    budget: float,
    recoverable: tuple[type[Exception], ...],
    child: Child,
) -> None:
    failed = False
    scope = trio.CancelScope()
    scope.deadline = trio.current_time() + budget
    try:
        with scope:
            await pass_fn()
    except* recoverable as group:
        failed = True
        child.failed(describe(group))
        log.warning("pass failed", service=child.name, error=describe(group))
    if scope.cancelled_caught:
        child.failed(f"cancelled: over its budget of {budget:g} s")
        log.warning("pass over its budget", service=child.name, budget=budget)
    elif not failed:
        child.good()


async def _tick(interval: float, wake: Kick | None) -> None:
    if wake is None:
        await trio.sleep(interval)
    else:
        with trio.move_on_after(interval):
            await wake.wait()
