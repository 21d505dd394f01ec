"""supervise: what it restarts, what it lets through, and how long it waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from gradient.nursery.backoff import Backoff
from gradient.nursery.health import HealthTable, State
from gradient.nursery.supervise import ServiceReturned, supervise


class Gone(Exception):
    """An error that the service under test lists."""


async def settle(clock: MockClock, seconds: float = 0) -> None:
    """Jump, then let every task run until it waits."""
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


def failing_service(starts: list[float]) -> Callable[[], Awaitable[None]]:
    async def service() -> None:
        starts.append(trio.current_time())
        raise Gone("no database")

    return service


def test_backoff_doubles_to_its_cap_and_resets() -> None:
    backoff = Backoff()
    assert [backoff.next_pause() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    backoff.reset()
    assert backoff.next_pause() == 1


async def test_a_listed_error_is_one_line(nursery: trio.Nursery, mock_clock: MockClock) -> None:
    async def service() -> None:
        await trio.lowlevel.checkpoint()
        raise Gone("no room\nHINT:  Check free disk space.")

    with capture_logs() as logged:
        nursery.start_soon(partial(supervise, "s", service, restart_on=(Gone,), health=HealthTable()))
        await settle(mock_clock)
    assert logged[0] == {
        "event": "service failed",
        "log_level": "warning",
        "service": "s",
        "error": "Gone: no room HINT: Check free disk space.",
    }


async def test_listed_errors_restart_with_doubling_pauses(
    nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    health, starts = HealthTable(), []
    run = failing_service(starts)
    nursery.start_soon(lambda: supervise("db", run, restart_on=(Gone,), health=health))
    await settle(mock_clock)
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        before = len(starts)
        await settle(mock_clock, pause - 0.01)
        assert len(starts) == before, "it must not come back early"
        await settle(mock_clock, 0.01)
        assert len(starts) == before + 1
    (row,) = health.snapshot()
    assert (row.restarts, row.state, row.last_error) == (9, State.BACKING_OFF, "Gone: no database")
    nursery.cancel_scope.cancel()


async def test_five_healthy_minutes_reset_the_pause(nursery: trio.Nursery, mock_clock: MockClock) -> None:
    health = HealthTable()
    starts: list[float] = []
    fail = trio.Event()

    async def service() -> None:
        nonlocal fail
        starts.append(trio.current_time())
        await fail.wait()
        fail = trio.Event()
        raise Gone

    nursery.start_soon(lambda: supervise("db", service, restart_on=(Gone,), health=health))
    await settle(mock_clock)
    for healthy, pause in ((0, 1), (299, 2), (300, 1), (0, 2)):
        await settle(mock_clock, healthy)
        fail.set()
        await settle(mock_clock)
        began = trio.current_time()
        await settle(mock_clock, pause)
        assert starts[-1] - began == pytest.approx(pause)
    nursery.cancel_scope.cancel()


async def test_an_unlisted_error_passes() -> None:
    async def service() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        await supervise("s", service, restart_on=(Gone,), health=HealthTable())


async def test_a_mixed_group_loses_its_listed_members_and_is_raised() -> None:
    async def service() -> None:
        raise ExceptionGroup("both", [Gone("x"), ExceptionGroup("deep", [KeyError("bug"), Gone("y")])])

    health = HealthTable()
    with pytest.RaisesGroup(pytest.RaisesGroup(KeyError)):
        await supervise("s", service, restart_on=(Gone,), health=health)
    (row,) = health.snapshot()
    assert row.state is State.STOPPED
    assert row.last_error == "Gone: x; Gone: y"


async def test_a_group_of_listed_errors_restarts(nursery: trio.Nursery, mock_clock: MockClock) -> None:
    starts: list[float] = []

    async def service() -> None:
        starts.append(trio.current_time())
        async with trio.open_nursery() as inner:
            inner.start_soon(failing_service([]))
            await trio.sleep_forever()

    nursery.start_soon(lambda: supervise("s", service, restart_on=(Gone,), health=HealthTable()))
    await settle(mock_clock)
    await settle(mock_clock, 1)
    assert starts == [0, 1]
    nursery.cancel_scope.cancel()


async def test_cancellation_is_not_swallowed_while_running_or_pausing(mock_clock: MockClock) -> None:
    for service in (trio.sleep_forever, failing_service([])):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(
                    lambda s=service: supervise("s", s, restart_on=(Gone,), health=HealthTable())
                )
                await settle(mock_clock)
                scope.cancel()
        assert scope.cancelled_caught


async def test_a_failure_while_being_cancelled_does_not_restart() -> None:
    starts = 0

    async def service() -> None:
        nonlocal starts
        starts += 1
        try:
            await trio.sleep_forever()
        finally:
            raise Gone("the socket was closed under us")

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as inner:
            inner.start_soon(lambda: supervise("s", service, restart_on=(Gone,), health=HealthTable()))
            await wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    assert starts == 1


async def test_a_service_that_returns_is_a_mistake_unless_it_may() -> None:
    async def service() -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(ServiceReturned, match="mail returned"):
        await supervise("mail", service, restart_on=(Gone,), health=HealthTable())
    await supervise("mail", service, restart_on=(Gone,), health=HealthTable(), may_return=True)


# --- a service that says when it has started ------------------------------------------------------


async def test_the_first_start_is_told_and_later_ones_are_not(
    nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    starts = []

    async def service(*, task_status: trio.TaskStatus[str]) -> None:
        starts.append(trio.current_time())
        task_status.started(f"start {len(starts)}")
        await trio.sleep(10)
        raise Gone("no database")

    run = partial(supervise, "db", service, restart_on=(Gone,), health=HealthTable())
    assert await nursery.start(run) == "start 1"
    await settle(mock_clock, 10)
    await settle(mock_clock, 1)
    assert starts == [0, 11]
    nursery.cancel_scope.cancel()


async def test_what_keeps_a_service_from_its_first_start_is_raised(nursery: trio.Nursery) -> None:
    async def service(*, task_status: trio.TaskStatus[None]) -> None:
        raise Gone("no database")

    with pytest.RaisesGroup(Gone, flatten_subgroups=True):
        await nursery.start(partial(supervise, "db", service, restart_on=(Gone,), health=HealthTable()))
