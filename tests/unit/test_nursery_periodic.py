"""periodic and Kick: cadence, budget, coalescing, and which failures a pass survives."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gradient.nursery.health import HealthTable, Moment, State
from gradient.nursery.kick import Kick
from gradient.nursery.periodic import periodic


async def settle(clock: MockClock, seconds: float = 0) -> None:
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


class Recorder:
    """A pass that notes when it ran and then does what it was told to."""

    def __init__(self) -> None:
        self.runs: list[float] = []
        self.raises: Exception | None = None
        self.hangs = False

    async def __call__(self) -> None:
        self.runs.append(trio.current_time())
        if self.hangs:
            await trio.sleep_forever()
        if self.raises is not None:
            raise self.raises


async def test_it_runs_at_once_and_then_after_each_interval(
    nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    pass_fn = Recorder()
    nursery.start_soon(partial(periodic, "p", 5, 120, pass_fn, health=HealthTable()))
    await settle(mock_clock)
    await settle(mock_clock, 4.9)
    assert pass_fn.runs == [0]
    await settle(mock_clock, 0.1)
    assert pass_fn.runs == [0, 5]
    nursery.cancel_scope.cancel()


async def test_over_its_budget_it_is_cancelled_in_place_and_ticks_again(
    nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    pass_fn, health = Recorder(), HealthTable()
    pass_fn.hangs = True
    nursery.start_soon(partial(periodic, "p", 5, 120, pass_fn, health=health))
    await settle(mock_clock)
    await settle(mock_clock, 119.9)
    assert health.snapshot()[0].last_error is None
    await settle(mock_clock, 0.1)
    assert health.snapshot()[0].last_error == "cancelled: over its budget of 120 s"
    pass_fn.hangs = False
    await settle(mock_clock, 5)
    assert pass_fn.runs == [0, 125]
    assert health.snapshot()[0].last_good is not None
    nursery.cancel_scope.cancel()


async def test_kicks_coalesce_and_one_during_a_run_leads_to_one_more(
    nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    kick, go = Kick(), trio.Semaphore(0)
    runs: list[float] = []

    async def pass_fn() -> None:
        runs.append(trio.current_time())
        await go.acquire()

    nursery.start_soon(partial(periodic, "p", 60, 120, pass_fn, health=HealthTable(), wake=kick))
    await settle(mock_clock)
    for _ in range(10):
        kick.set()
    await settle(mock_clock, 3)
    assert runs == [0], "a run is not interrupted"
    go.release()
    await wait_all_tasks_blocked()
    assert runs == [0, 3], "ten kicks, one run"
    go.release()
    await wait_all_tasks_blocked()
    assert runs == [0, 3]
    for _ in range(3):
        kick.set()
    await settle(mock_clock, 1)
    assert runs == [0, 3, 3], "a kick wakes a waiting pass at once"
    nursery.cancel_scope.cancel()


async def test_a_cancelled_wait_takes_no_kick(autojump_clock: MockClock) -> None:
    kick = Kick()
    kick.set()
    with trio.CancelScope() as scope:
        scope.cancel()
        await kick.wait()
    assert scope.cancelled_caught
    with trio.fail_after(1):
        await kick.wait()


async def test_recoverable_errors_are_recorded_and_others_raised(
    nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    pass_fn, health = Recorder(), HealthTable()
    pass_fn.raises = ExceptionGroup("g", [OSError("gone")])

    async def run() -> None:
        with pytest.RaisesGroup(ValueError):
            await periodic("p", 5, 120, pass_fn, health=health, recoverable=(OSError,))

    nursery.start_soon(run)
    await settle(mock_clock)
    (row,) = health.snapshot()
    assert (row.state, row.last_error, row.last_good) == (State.RUNNING, "OSError: gone", None)
    pass_fn.raises = ExceptionGroup("g", [OSError("gone"), ValueError("a bug")])
    await settle(mock_clock, 5)
    assert health.snapshot()[0].state is State.STOPPED


async def test_without_recoverable_errors_everything_is_raised() -> None:
    pass_fn = Recorder()
    pass_fn.raises = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        await periodic("p", 5, 120, pass_fn, health=HealthTable())


async def test_a_pass_that_never_waits_can_be_cancelled() -> None:
    kick = Kick()

    async def pass_fn() -> None:
        kick.set()
        scope.cancel()

    with trio.CancelScope() as scope:
        await periodic("p", 5, 120, pass_fn, health=HealthTable(), wake=kick)
    assert scope.cancelled_caught


def test_health_rows_are_values_of_the_clock_they_are_given() -> None:
    now = Moment(1.0, 1000.0)
    table = HealthTable(clock=lambda: now)
    child = table.child("writer")
    child.running()
    before = table.snapshot()
    now = Moment(4.0, 900.0)  # the wall clock was set back; ages still come out right
    child.good()
    child.failed("x" * 10_000)
    child.backing_off()
    (row,) = table.snapshot()
    assert row.last_good == row.last_error_at == row.since == now
    assert row.last_good.monotonic - before[0].since.monotonic == 3
    assert (before[0].last_good, before[0].restarts, row.restarts) == (None, 0, 1)
    assert len(row.last_error or "") == 500
    assert table.child("writer") is child
