"""A worker's session without sockets and without Nix: the server is the test, which speaks the real protocol
over memory streams; the work of jobs and the store are scripts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import attrs
import trio
import trio.testing

from gradient.model import BuildKind, BuildSpec, FlakeJob, FlakeStep
from gradient.wire import messages as wire
from gradient.wire.codec import Message
from gradient.wire.errors import LinkClosed
from gradient.wire.transport import Link, accept, connect_over
from gradient.worker.job import Job
from gradient.worker.session import Session

M = TypeVar("M", bound=Message)

BASE_URL = "http://server.test:3000"
CAPABILITIES = wire.WorkerCapabilities(("x86_64-linux",), (), 2, 1, 2, 1024)


def build(number: int, assignment: int = 1) -> wire.AssignJob:
    """The assignment of the build `build:<number>`."""
    drv = f"/nix/store/{number:032d}-b.drv"
    spec = BuildSpec(number, drv, BuildKind.BUILD, (), False, 60, 60, "x86_64-linux")
    return wire.AssignJob(f"build:{number}", assignment, build=spec)


def evaluation(number: int, assignment: int = 1) -> wire.AssignJob:
    """The assignment of the evaluation `eval:<number>`."""
    return wire.AssignJob(f"eval:{number}", assignment, flake=FlakeJob((FlakeStep.FETCH_FLAKE,)))


class Work:
    """What jobs do: by default each waits until it is released; a script may be given instead."""

    def __init__(self) -> None:
        self.scripts: dict[str, Callable[[Job], Awaitable[None]]] = {}
        self.released: defaultdict[str, trio.Event] = defaultdict(trio.Event)
        self.running: set[str] = set()

    async def __call__(self, job: Job, assign: wire.AssignJob, builds: int) -> None:
        self.running.add(job.job_id)
        try:
            script = self.scripts.get(job.job_id)
            await (script(job) if script else self.released[job.job_id].wait())
        finally:
            self.running.discard(job.job_id)


class Store:
    """A daemon pool in which the paths of `valid` are valid; `asked` are the questions."""

    def __init__(self) -> None:
        self.valid: set[str] = set()
        self.asked: list[list[str]] = []

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Store]:
        await trio.lowlevel.checkpoint()
        yield self

    async def query_valid_paths(self, paths: Iterable[str]) -> frozenset[str]:
        await trio.lowlevel.checkpoint()
        self.asked.append(list(paths))
        return frozenset(self.valid.intersection(self.asked[-1]))


@attrs.define(eq=False)
class World:
    """The server's end, and the session at the other."""

    link: Link
    session: Session
    work: Work
    store: Store
    ended: trio.Event

    async def take(self, kind: type[M]) -> M:
        """The worker's next message, which must be a `kind`; heartbeats are passed over."""
        with trio.fail_after(1000):
            message = await self.link.receive()
            while isinstance(message, wire.WorkerMetrics) and kind is not wire.WorkerMetrics:
                message = await self.link.receive()
        assert isinstance(message, kind), message
        return message

    async def begin(self) -> None:
        """Take what every session begins with."""
        await self.take(wire.WorkerCapabilities)
        await self.take(wire.RequestJobList)
        await self.take(wire.RequestJob)
        await self.take(wire.RequestJob)

    async def assign(self, assign: wire.AssignJob) -> None:
        """Assign a job and have it accepted."""
        await self.link.send(assign)
        response = await self.take(wire.AssignJobResponse)
        assert (response.job_id, response.accepted) == (assign.job_id, True)
        await trio.testing.wait_all_tasks_blocked()

    async def silent(self) -> None:
        """Make sure that the worker says nothing more."""

        async def heard() -> None:
            raise AssertionError(await self.link.receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(heard)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def session_world(**options: Any) -> AsyncIterator[World]:
    """A session that has begun, on a worker with two build slots and one for evaluations."""
    near, far = trio.testing.memory_stream_pair()
    work, store, ended = Work(), Store(), trio.Event()

    async def worker(*, task_status: trio.TaskStatus[Session]) -> None:
        async with connect_over(near) as link:
            link.trust()
            session = Session(link, BASE_URL, options.get("capabilities", CAPABILITIES), store, work)  # type: ignore[arg-type]
            task_status.started(session)
            try:
                await session.run()
            except* LinkClosed:
                ended.set()

    to_test, opened = trio.open_memory_channel[Link](1)

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        async with accept(far) as link:
            link.trust()
            await to_test.send(link)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        session = await nursery.start(worker)
        world = World(await opened.receive(), session, work, store, ended)
        await world.begin()
        yield world
        nursery.cancel_scope.cancel()
