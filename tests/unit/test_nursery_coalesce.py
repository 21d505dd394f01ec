"""Coalescer: one run for everybody, never a run that began before the call, no caller left behind."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gradient.nursery.coalesce import Coalescer
from tests.patience import PATIENCE


class Disk:
    """What is written becomes durable when a sync that began after it ends."""

    def __init__(self) -> None:
        self.written: set[str] = set()
        self.durable: set[str] = set()
        self.syncs = 0

    async def sync(self) -> None:
        self.syncs += 1
        seen = set(self.written)
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        self.durable |= seen


async def save(disk: Disk, sync: Coalescer, name: str) -> None:
    disk.written.add(name)
    await sync()
    assert name in disk.durable


async def test_everybody_who_waits_shares_a_run() -> None:
    disk = Disk()
    sync = Coalescer(disk.sync)
    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(save, disk, sync, str(number))
    assert len(disk.durable) == 50
    assert disk.syncs <= 2


async def test_a_caller_during_a_run_gets_a_later_one() -> None:
    started, finish = trio.Event(), trio.Event()
    runs = 0

    async def operation() -> None:
        nonlocal runs
        runs += 1
        started.set()
        await finish.wait()

    run = Coalescer(operation)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await started.wait()
        nursery.start_soon(run)
        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        finish.set()
    assert runs == 2


async def test_an_error_reaches_every_caller_of_its_run_and_no_other() -> None:
    gate, failed = trio.Event(), []
    runs = 0

    async def operation() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            await gate.wait()
        if runs == 2:
            raise OSError("EIO")

    run = Coalescer(operation)

    async def call(name: str) -> None:
        try:
            await run()
        except OSError:
            failed.append(name)

    async with trio.open_nursery() as nursery:
        for name in ("first", "a", "b"):
            nursery.start_soon(call, name)
            await wait_all_tasks_blocked()
        gate.set()
    assert sorted(failed) == ["a", "b"]
    assert runs == 2, "a failed sync must not be tried again for those it failed"
    await run()


class CancelAfter(trio.abc.Instrument):
    """Cancels `scope` after the given number of steps of `task`."""

    def __init__(self, task: trio.lowlevel.Task, steps: int, scope: trio.CancelScope) -> None:
        self.task, self.left, self.scope = task, steps, scope

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_a_caller_cancelled_at_any_step_leaves_nobody_behind(victim: int) -> None:
    for steps in range(1, 12):
        disk = Disk()
        sync = Coalescer(disk.sync)
        scope = trio.CancelScope()

        async def cancelled_one(scope: trio.CancelScope, disk: Disk, sync: Coalescer, steps: int) -> None:
            watcher = CancelAfter(trio.lowlevel.current_task(), steps, scope)
            trio.lowlevel.add_instrument(watcher)
            with scope:
                await save(disk, sync, "victim")
            trio.lowlevel.remove_instrument(watcher)

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    if number == victim:
                        nursery.start_soon(cancelled_one, scope, disk, sync, steps)
                    else:
                        nursery.start_soon(save, disk, sync, str(number))
        assert len(disk.durable - {"victim"}) == 2
