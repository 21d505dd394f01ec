"""The end of a process: signals, drain phases, the stop window, the root nursery."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gradient.nursery.drain import Phase, drain
from gradient.nursery.root import Task, run_root
from gradient.nursery.signals import Stop, listen
from gradient.nursery.stop_window import StopWindow
from tests.patience import PATIENCE


async def settle(clock: MockClock, seconds: float = 0) -> None:
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains_and_the_second_stops_at_once(
    nursery: trio.Nursery, first: signal.Signals
) -> None:
    stop = Stop()
    await nursery.start(listen, stop)
    os.kill(os.getpid(), first)
    with trio.fail_after(PATIENCE):
        await stop.gently.wait()
    assert stop.signal is first
    assert not stop.at_once.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    with trio.fail_after(PATIENCE):
        await stop.at_once.wait()
    assert stop.signal is first, "the exit code follows from the first one"
    nursery.cancel_scope.cancel()


# --- drain ----------------------------------------------------------------------------------------


async def test_phases_run_in_order_and_each_within_its_deadline(
    nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    seen: list[tuple[str, float]] = []

    async def quick() -> None:
        seen.append(("quick", trio.current_time()))
        await trio.sleep(1)

    async def slow() -> None:
        seen.append(("slow", trio.current_time()))
        await trio.sleep_forever()

    async def last() -> None:
        seen.append(("last", trio.current_time()))

    result: tuple[str, ...] | None = None

    async def run() -> None:
        nonlocal result
        result = await drain(
            [Phase("quick", quick, 5), Phase("slow", slow, 20, lambda: "3 sessions"), Phase("last", last, 5)]
        )

    nursery.start_soon(run)
    await settle(mock_clock, 1)
    await settle(mock_clock, 19.9)
    assert seen == [("quick", 0), ("slow", 1)]
    await settle(mock_clock, 0.1)
    assert seen[2] == ("last", 21)
    assert result == ("slow",)


async def test_a_phase_that_fails_does_not_keep_the_later_ones_from_running() -> None:
    ran = []

    async def fails() -> None:
        raise OSError("disk full")

    async def runs() -> None:
        ran.append(True)

    with pytest.RaisesGroup(OSError, flatten_subgroups=True):
        await drain([Phase("fails", fails, 5), Phase("runs", runs, 5)])
    assert ran == [True]


async def test_a_cancelled_drain_ends_at_once() -> None:
    ran = []

    async def never() -> None:
        ran.append(True)

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as inner:
            inner.start_soon(drain, [Phase("waits", trio.sleep_forever, 20), Phase("never", never, 20)])
            await wait_all_tasks_blocked()
            scope.cancel()
    assert ran == []


# --- the stop window ------------------------------------------------------------------------------


async def run_job(window: StopWindow, name: str, report_takes: float, reports: list[str]) -> None:
    with window.job(name) as scope:
        with scope:
            await trio.sleep_forever()
        await trio.sleep(report_takes)
        reports.append(name)


async def test_cancelled_jobs_report_within_exactly_five_seconds(
    nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    window, reports = StopWindow(), []
    for name, takes in (("a", 0), ("b", 4.9), ("c", 5.1)):
        nursery.start_soon(run_job, window, name, takes, reports)
    await settle(mock_clock)
    unreported: list[tuple[str, ...]] = []

    async def close() -> None:
        unreported.append(await window.close())

    nursery.start_soon(close)
    await settle(mock_clock, 4.9)
    assert reports == ["a", "b"]
    assert unreported == []
    await settle(mock_clock, 0.1)
    assert unreported == [("c",)]
    nursery.cancel_scope.cancel()


async def test_the_window_closes_as_soon_as_everybody_has_reported(mock_clock: MockClock) -> None:
    window, reports = StopWindow(), []
    async with trio.open_nursery() as jobs:
        jobs.start_soon(run_job, window, "a", 0, reports)
        await wait_all_tasks_blocked()
        assert window.running == ("a",)
        assert await window.close() == ()
    assert trio.current_time() == 0
    assert reports == ["a"]


async def test_a_job_that_begins_while_closing_is_cancelled_before_it_works() -> None:
    window = StopWindow()
    await window.close()
    with window.job("late") as scope:
        with scope:
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_one_job_can_be_aborted() -> None:
    window, reports = StopWindow(), []
    async with trio.open_nursery() as jobs:
        jobs.start_soon(run_job, window, "a", 0, reports)
        jobs.start_soon(run_job, window, "b", 0, reports)
        await wait_all_tasks_blocked()
        assert window.abort("a")
        await wait_all_tasks_blocked()
        assert (reports, window.running) == (["a"], ("b",))
        assert not window.abort("a")
        jobs.cancel_scope.cancel()
    assert window.running == ()
    await window.wait_empty()


# --- the root nursery -----------------------------------------------------------------------------


class Tree:
    """Two services and a drain that stops one, waits, then stops the other; `events` tells the order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sessions, self.writer = Task("sessions"), Task("writer")
        self.gate = trio.Event()

    async def serve(self, name: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.events.append(f"{name} ended")

    async def start(self, root: trio.Nursery) -> Sequence[Phase]:
        root.start_soon(self.sessions.run, lambda: self.serve("sessions"))
        root.start_soon(self.writer.run, lambda: self.serve("writer"))
        return [
            Phase("sessions", self.sessions.stop, 5),
            Phase("wait", self.gate.wait, 20),
            Phase("writer", self.writer.stop, 5),
        ]


async def test_a_stop_drains_in_order(nursery: trio.Nursery) -> None:
    tree, stop = Tree(), Stop()
    nursery.start_soon(run_root, tree.start, stop)
    await wait_all_tasks_blocked()
    stop.request()
    await wait_all_tasks_blocked()
    assert tree.events == ["sessions ended"]
    tree.gate.set()
    await wait_all_tasks_blocked()
    assert tree.events == ["sessions ended", "writer ended"]
    assert not nursery.child_tasks - {trio.lowlevel.current_task()}


async def test_a_second_request_ends_a_drain_that_waits(autojump_clock: MockClock) -> None:
    tree, stop = Tree(), Stop()
    async with trio.open_nursery() as inner:
        inner.start_soon(run_root, tree.start, stop)
        await wait_all_tasks_blocked()
        stop.request()
        await wait_all_tasks_blocked()
        stop.request()
    assert trio.current_time() == 0
    assert tree.events == ["sessions ended", "writer ended"]


async def test_a_stop_during_the_start_cancels_what_is_up() -> None:
    events = []
    tree, stop = Tree(), Stop()

    async def start(root: trio.Nursery) -> Sequence[Phase]:
        root.start_soon(tree.serve, "first")
        await trio.sleep_forever()
        events.append("never")
        return []

    async with trio.open_nursery() as inner:
        inner.start_soon(run_root, start, stop)
        await wait_all_tasks_blocked()
        stop.request()
    assert (tree.events, events) == (["first ended"], [])


async def test_an_error_of_one_task_ends_the_others_loudly() -> None:
    tree = Tree()

    async def breaks() -> None:
        raise KeyError("a bug")

    async def start(root: trio.Nursery) -> Sequence[Phase]:
        root.start_soon(tree.serve, "other")
        root.start_soon(breaks)
        return []

    with pytest.RaisesGroup(KeyError, flatten_subgroups=True):
        await run_root(start, Stop())
    assert tree.events == ["other ended"]
