"""The processes of `gradient up`: real children that stand in for a worker, a server that is a stand-in."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from gradient.cli.faults import BadEnvironment, NotAuthorised
from gradient.cli.up_processes import Server, run_processes
from gradient.cli.worker_child import WorkerChild
from gradient.nursery.signals import Stop
from tests.patience import PATIENCE

# Says what it hears; ends on SIGTERM as it is told by its argument.
WORKER = """
import signal, sys
def stop(number, frame):
    print(f"signal {number}", file=sys.stderr, flush=True)
    if sys.argv[1] == "polite" or number == signal.SIGINT:
        sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("up", file=sys.stderr, flush=True)
for line in sys.stdin:
    print("told " + line.strip(), file=sys.stderr, flush=True)
print("leash", file=sys.stderr, flush=True)
"""
FAILS = """
import json, sys
print("loading")
print(json.dumps({"errors": [{"source": "gradient work", "message": "the token is wrong"}]}))
sys.exit(int(sys.argv[1]))
"""


@attrs.frozen
class FakeServing:
    http_url: str = "http://127.0.0.1:1"


@attrs.define(eq=False)
class Story:
    """What happened, in order."""

    events: list[str] = attrs.field(factory=list)
    _grew: trio.Event = attrs.field(factory=trio.Event)

    def add(self, event: str) -> None:
        self.events.append(event)
        self._grew.set()
        self._grew = trio.Event()

    async def until(self, event: str) -> None:
        while event not in self.events:
            await self._grew.wait()


async def serve(
    story: Story, stop: Stop, *, error: Exception | None = None, task_status: trio.TaskStatus[FakeServing]
) -> None:
    await trio.lowlevel.checkpoint()
    if error is not None:
        raise error
    task_status.started(FakeServing())
    story.add("server up")
    try:
        await stop.gently.wait()
        story.add("server drained")
    except trio.Cancelled:
        story.add("server cut off")
        raise


def child(story: Story, script: str, argument: str) -> WorkerChild:
    return WorkerChild((sys.executable, "-c", script, argument), story.add)


def server(story: Story, error: Exception | None = None) -> Server:
    return Server(partial(serve, story, error=error))  # type: ignore[arg-type]


@pytest.fixture
def story() -> Story:
    return Story()


async def test_the_worker_stops_first_then_the_server_drains(story: Story) -> None:
    worker = child(story, WORKER, "polite")

    async def job(one: Server) -> None:
        assert (await one.ready()).http_url == FakeServing().http_url
        await story.until("told http://127.0.0.1:1")
        story.add("job done")

    with trio.fail_after(PATIENCE):
        await run_processes(server(story), worker, Stop(), job)
    assert story.events[-3:] == ["job done", f"signal {signal.SIGTERM:d}", "server drained"]
    assert worker.fault is None


async def test_a_wish_to_stop_ends_the_job_and_drains(story: Story) -> None:
    stop = Stop()

    async def job(one: Server) -> None:
        await story.until("told http://127.0.0.1:1")
        stop.request(signal.SIGINT)
        await trio.sleep_forever()

    with trio.fail_after(PATIENCE):
        await run_processes(server(story), child(story, WORKER, "polite"), stop, job)
    assert story.events[-2:] == [f"signal {signal.SIGTERM:d}", "server drained"]


async def test_a_second_wish_stops_at_once(story: Story) -> None:
    """The worker ignores SIGTERM: only the second request gets it out of the way."""
    stop = Stop()

    async def again() -> None:
        await story.until(f"signal {signal.SIGTERM:d}")
        stop.request()

    async def job(one: Server) -> None:
        await story.until("told http://127.0.0.1:1")
        stop.request()
        await trio.sleep_forever()

    worker = child(story, WORKER, "stubborn")
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(again)
            await run_processes(server(story), worker, stop, job)
    assert "server cut off" in story.events
    assert worker.ended.is_set()


async def test_what_the_job_raises_comes_out_after_the_drain(story: Story) -> None:
    async def job(one: Server) -> None:
        await story.until("told http://127.0.0.1:1")
        raise BadEnvironment("no")

    with trio.fail_after(PATIENCE), pytest.RaisesGroup(pytest.RaisesExc(BadEnvironment, match="no")):
        await run_processes(server(story), child(story, WORKER, "polite"), Stop(), job)
    assert story.events[-1] == "server drained"


@pytest.mark.parametrize(("code", "kind"), [(3, BadEnvironment), (4, NotAuthorised)])
async def test_a_worker_that_ends_says_why(story: Story, code: int, kind: Callable[[str], Exception]) -> None:
    async def job(one: Server) -> None:
        await trio.sleep_forever()

    with trio.fail_after(PATIENCE), pytest.raises(kind, match="the token is wrong"):  # type: ignore[call-overload]
        await run_processes(server(story), child(story, FAILS, str(code)), Stop(), job)


async def test_a_worker_that_dies_without_a_word_is_told_by_its_code(story: Story) -> None:
    async def job(one: Server) -> None:
        await story.until("up")
        os.kill(worker._process.pid, signal.SIGKILL)
        await trio.sleep_forever()

    worker = child(story, WORKER, "polite")
    with trio.fail_after(PATIENCE), pytest.raises(BadEnvironment, match="exit code -9"):
        await run_processes(server(story), worker, Stop(), job)


async def test_a_server_that_cannot_start_ends_the_worker(story: Story) -> None:
    async def job(one: Server) -> None:
        await one.ready()

    worker = child(story, WORKER, "polite")
    with trio.fail_after(PATIENCE), pytest.RaisesGroup(BadEnvironment, flatten_subgroups=True):
        await run_processes(server(story, BadEnvironment("port in use")), worker, Stop(), job)
    assert worker.ended.is_set()
    assert worker._process.returncode is not None


async def test_a_worker_outlives_its_parent_by_a_moment_only(story: Story, tmp_path: Path) -> None:
    """The leash: the end of stdin. The parent here is killed, so nobody could have told the worker."""
    script = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WORKER!r}, "polite"], stdin=subprocess.PIPE)
print("ready", flush=True)
child.wait()
"""
    with trio.fail_after(PATIENCE):
        parent = await trio.lowlevel.open_process(
            [sys.executable, "-c", script], stdout=-1, stderr=-1, start_new_session=True
        )
        assert parent.stderr is not None
        heard = b""
        while b"up" not in heard:
            heard += await parent.stderr.receive_some()
        parent.kill()
        await parent.wait()
        while b"leash" not in heard:
            piece = await parent.stderr.receive_some()
            assert piece
            heard += piece
