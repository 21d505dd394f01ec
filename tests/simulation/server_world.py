"""A server without sockets: real PostgreSQL, writer, scheduler and sessions; workers are scripts that
speak the real protocol over memory streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import attrs
import trio
import trio.testing

from gradient.graph.access import ensure_first_rows, hash_token
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.moves import Moves
from gradient.graph.nar import CommitNars
from gradient.graph.pg import Connection
from gradient.graph.pg_pool import Pool
from gradient.graph.writer import GraphWriter
from gradient.model import BuildStatus, EntryPoint, EvaluationStatus, JobKind, Repository
from gradient.nar.grants import Grants
from gradient.passes.scheduler import Scheduler
from gradient.sessions.live import LiveHub
from gradient.sessions.queries import CacheSide
from gradient.sessions.sessions import Sessions
from gradient.settings.tables import Build
from gradient.wire import messages as wire
from gradient.wire.codec import Message
from gradient.wire.errors import WireError
from gradient.wire.greeting import introduce
from gradient.wire.transport import Link, accept, connect_over
from tests.graph.world import derivation, drv, nar, out
from tests.patience import PATIENCE

TOKEN = "t" * 64
M = TypeVar("M", bound=Message)


def _now() -> datetime:
    return datetime.now(UTC)


@attrs.define(eq=False)
class ServerWorld:
    """The server's parts, wired as `serve.py` wires them."""

    readers: Pool
    nursery: trio.Nursery
    writer: GraphWriter
    scheduler: Scheduler
    sessions: Sessions

    @classmethod
    @asynccontextmanager
    async def running(cls, url: str) -> AsyncIterator[ServerWorld]:
        async with await Connection.connect(url) as connection:
            first = await ensure_first_rows(connection, _now(), hash_token("a"), hash_token(TOKEN))
        async with Pool.open(url, 4) as readers, trio.open_nursery() as nursery:
            hub = LiveHub()
            parts: list[Callable[[Moves], None]] = []

            def publish(moves: Moves) -> None:
                for part in parts:
                    part(moves)

            writer = GraphWriter(url, publish, _now)
            scheduler = Scheduler(writer, readers, Build(), _now)
            side = CacheSide(first.cache, "/cache/main", "/api/v1/uploads", Grants(b"s" * 32), 60, _now)
            sessions = Sessions(readers, writer, scheduler, hub, side, _now)
            parts += [scheduler.moved, sessions.moved, hub.publish]
            await nursery.start(writer.run)
            # As in a drain: no pass and no session outlives the writer.
            async with trio.open_nursery() as serving:
                serving.start_soon(cls._pass, scheduler.builds_moved, scheduler.assign_builds)
                serving.start_soon(cls._pass, scheduler.evaluations_moved, scheduler.assign_queued_evals)
                serving.start_soon(cls._pass, scheduler.waiting_moved, scheduler.refresh_waiting_state)
                yield cls(readers, serving, writer, scheduler, sessions)
                serving.cancel_scope.cancel()
            nursery.cancel_scope.cancel()

    @staticmethod
    async def _pass(kick: Any, run: Any) -> None:
        while True:
            await kick.wait()
            await run()

    async def evaluation(self) -> int:
        return await self.writer.submit(CreateEvaluation("main", Repository("git+https://example.org/x")))

    async def commit(self, *paths: str) -> None:
        await self.writer.submit(CommitNars(1, tuple(nar(path) for path in paths)))

    async def value(self, query: str, *params: Any) -> Any:
        async with self.readers.connection() as connection:
            cursor = await connection.execute(query, params)
            row = await cursor.fetchone()
        return None if row is None else row[0]

    async def evaluation_status(self, evaluation: int) -> EvaluationStatus:
        return EvaluationStatus(await self.value("SELECT status FROM evaluation WHERE id = %s", evaluation))

    async def build_status(self, name: str) -> BuildStatus:
        found = "(SELECT id FROM derivation WHERE name = %s)"
        query = f"SELECT status FROM derivation_build WHERE derivation = {found}"
        return BuildStatus(await self.value(query, name))

    @asynccontextmanager
    async def worker(self, number: int = 1, *, name: str = "", **facts: Any) -> AsyncIterator[ScriptedWorker]:
        """A connected worker that has said what it can do."""
        ours, theirs = trio.testing.memory_stream_pair()

        async def serve() -> None:
            # One session's matter, as the listener has it.
            with suppress_wire_errors():
                async with accept(theirs) as link:
                    await self.sessions.serve(link)

        self.nursery.start_soon(serve)  # noqa: ASYNC113  # the stream pair buffers
        async with connect_over(ours) as link:
            tokens = [wire.PeerToken("*", TOKEN)]
            await introduce(link, str(UUID(int=number)), wire.Capabilities(), tokens, name)
            worker = ScriptedWorker(link, self)
            facts = {
                "architectures": ("x86_64-linux",),
                "system_features": (),
                "max_concurrent_builds": 2,
                "max_concurrent_evals": 1,
                "cpu_count": 2,
                "ram_total_mb": 1000,
                **facts,
            }
            await link.send(wire.WorkerCapabilities(**facts))
            yield worker


@attrs.define(eq=False)
class ScriptedWorker:
    """The worker's end, one step at a time."""

    link: Link
    server: ServerWorld

    async def expect(self, kind: type[M]) -> M:
        """The next message of this kind; offers on the way are scored as missing nothing."""
        while True:
            with trio.fail_after(PATIENCE):
                message = await self.link.receive()
            if isinstance(message, wire.JobOffer):
                scores = tuple(wire.CandidateScore(c.job_id, 0, 0, False) for c in message.candidates)
                await self.link.send(wire.RequestJobChunk(scores, True))
            if isinstance(message, kind):
                return message

    async def take(self, kind: JobKind) -> wire.AssignJob:
        await self.link.send(wire.RequestJob(kind))
        job = await self.expect(wire.AssignJob)
        await self.link.send(wire.AssignJobResponse(job.job_id, job.assignment_id, True))
        return job

    async def evaluate(self, graph: dict[str, list[str]], entries: list[str]) -> wire.AssignJob:
        """Take an evaluation and report `graph`, as one batch; the job is not completed."""
        job = await self.take(JobKind.EVAL)
        report = partial(self.report, job)
        await report(wire.Fetching)
        await report(wire.EvaluatingFlake)
        await report(wire.EvaluatingDerivations)
        await self.server.commit(*map(drv, graph))
        await report(
            wire.EvalResult,
            derivations=tuple(derivation(name, inputs) for name, inputs in graph.items()),
            entry_points=tuple(EntryPoint(name, drv(name)) for name in entries),
        )
        return job

    async def build(self) -> str:
        """Take a build and finish it; the name of its derivation."""
        job = await self.take(JobKind.BUILD)
        assert job.build is not None
        name = job.build.drv_path.removesuffix(".drv").split("-", 1)[1]
        await self.report(job, wire.Building, build_id=job.build.build_id)
        await self.server.commit(out(name))
        await self.report(job, wire.BuildOutput, build_id=job.build.build_id, outputs=(), substituted=False)
        await self.report(job, wire.JobCompleted)
        return name

    async def report(self, job: wire.AssignJob, report: Any, /, **fields: Any) -> None:
        await self.link.send(report(job.job_id, job.assignment_id, **fields))


@contextmanager
def suppress_wire_errors() -> Iterator[None]:
    """Also in a group; anything else leaves."""
    try:
        yield
    except* WireError:
        pass


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Wait for something in the database: real time, bounded, one look each 10 ms."""
    with trio.fail_after(PATIENCE):
        while not await condition():  # noqa: ASYNC110  # PostgreSQL tells nobody
            await trio.sleep(0.01)
