"""An evaluation on the graph writer, as sessions of workers make it: reported, then built."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import attrs
import trio

from bench.graph.shape import Graph, base_name
from bench.product import BenchFailed
from gradient.graph.assignments import ClaimBuild, ClaimEvaluation
from gradient.graph.build_outputs import StoreBuildOutput
from gradient.graph.builds import BuildCompleted
from gradient.graph.counters import fold_shared_build_deltas
from gradient.graph.evaluation_reports import EvalStreamCompleted, EvaluationPhase
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.failure import RetryLimits
from gradient.graph.moves import Moves
from gradient.graph.nar import CommitNars, Signed
from gradient.graph.pg import Connection, fetch_all, fetch_value
from gradient.graph.pg_pool import Pool
from gradient.graph.writer import GraphWriter
from gradient.model import (
    EVALUATION_TERMINAL,
    BuildMetrics,
    BuiltOutput,
    EvaluationStatus,
    JobKind,
    NarRecord,
    Repository,
)
from gradient.nix.store_path import HASH_PART_LENGTH
from gradient.passes.pool import ActiveJob, Worker
from gradient.sessions.live import LiveHub
from gradient.sessions.log_lane import LogLane
from gradient.sessions.reports import REPORT_QUEUE, Received, ReportApplier
from gradient.wire.messages import Capabilities, EvalResult

CALLERS: Final = 32
# NARs of one upload; `.drv` files are small and come in bundles.
BUNDLE: Final = 128
# Seconds between two waiting passes, which begin with folding the counters.
WAITING_PASS: Final = 5.0
WORKER: Final = UUID(int=1)
LIMITS: Final = RetryLimits()
METRICS: Final = BuildMetrics(1000, 100, 900, 90.0, 10**6, 10**6)
CACHE: Final = 1


@attrs.define(eq=False)
class Server:
    """The graph writer of the database at `url`, and what it has queued."""

    url: str
    pool: Pool
    writer: GraphWriter = attrs.field(init=False)
    queued: trio.MemoryReceiveChannel[int] = attrs.field(init=False)
    _announce: trio.MemorySendChannel[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.writer = GraphWriter(self.url, self._moved)
        self._open_queue()

    def _open_queue(self) -> None:
        self._announce, self.queued = trio.open_memory_channel[int](math.inf)

    def _moved(self, moves: Moves) -> None:
        for derivation in moves.queued:
            self._announce.send_nowait(derivation)
        if any(status in EVALUATION_TERMINAL for status in moves.evaluations.values()):
            # Who waits for a queued build ends; the next evaluation has a queue of its own.
            self._announce.close()
            self._open_queue()

    # --- an evaluation ------------------------------------------------------------------------------

    async def upload_derivations(self, graph: Graph) -> None:
        """Commit the NAR of every `.drv`: a worker publishes them before it reports what they say."""
        paths = list(graph.derivations)
        for start in range(0, len(paths), BUNDLE):
            nars = tuple(signed(path) for path in paths[start : start + BUNDLE])
            await self.writer.submit(CommitNars(CACHE, nars))

    async def begin(self) -> ActiveJob:
        """A new evaluation that is evaluating on a worker: its flake job."""
        evaluation = await self.writer.submit(
            CreateEvaluation("main", Repository("git+https://example.org/packages"))
        )
        assignment = await self.writer.submit(ClaimEvaluation(evaluation, WORKER, "bench"))
        assert assignment is not None
        phase = EvaluationStatus.EVALUATING_DERIVATION
        assert await self.writer.submit(EvaluationPhase(assignment, phase))
        job_id = f"eval:{evaluation}"
        return ActiveJob(job_id, assignment, JobKind.EVAL, evaluation, job_id, datetime.now(UTC))

    async def report(self, job: ActiveJob, graph: Graph) -> float:
        """Send the whole graph through the report queue of a session; the seconds until all of it is
        committed."""
        worker = Worker(WORKER, "bench", frozenset({"main"}), Capabilities(), datetime.now(UTC))
        worker.jobs[job.job_id] = job
        job_key = (job.job_id, job.assignment)
        refused: list[str] = []
        logs = LogLane(self.pool, lambda build, data: None)
        applier = ReportApplier(worker, self.writer, LiveHub(), logs, LIMITS)
        reports = [
            EvalResult(*job_key, tuple(read.record for read in batch.derivations), batch.entry_points)
            for batch in graph.batches()
        ]
        send, receive = trio.open_memory_channel[Received](REPORT_QUEUE)
        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(applier.run, receive, lambda _, why: refused.append(why), lambda request: None)
            async with send:
                for report in reports:
                    await send.send(Received(job, report))
        seconds = time.perf_counter() - start
        if refused:
            raise BenchFailed(refused[0])
        return seconds

    async def end(self, job: ActiveJob) -> None:
        """The flake job has reported everything."""
        await self.writer.submit(EvalStreamCompleted(job.assignment))

    # --- its builds ---------------------------------------------------------------------------------

    async def build(self, graph: Graph, callers_at_once: int = CALLERS) -> float:
        """Build everything that gets queued, by callers who each wait for every reply; the seconds."""
        building = _Building(self, graph, await self._paths(graph), self.queued)
        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._fold_now_and_then)
            async with trio.open_nursery() as callers:
                for _ in range(callers_at_once):
                    callers.start_soon(building.call)
            seconds = time.perf_counter() - start
            nursery.cancel_scope.cancel()
        return seconds

    async def _paths(self, graph: Graph) -> dict[int, str]:
        """The derivations by their ids in the database."""
        by_hash = {base_name(path)[:HASH_PART_LENGTH]: path for path in graph.derivations}
        query = "SELECT id, hash FROM derivation WHERE hash = ANY(%(hashes)s)"
        async with self.pool.connection() as connection:
            rows = await fetch_all(connection, query, {"hashes": list(by_hash)})
        return {i: by_hash[hash_part] for i, hash_part in rows}

    async def _fold_now_and_then(self) -> None:
        while True:
            async with self.pool.connection() as connection:
                await fold_shared_build_deltas(connection)
            await trio.sleep(WAITING_PASS)


@attrs.define(eq=False)
class _Building:
    """The builds of one evaluation."""

    server: Server
    graph: Graph
    paths: dict[int, str]
    queued: trio.MemoryReceiveChannel[int]

    async def call(self) -> None:
        """Build one after the other, each message for itself and after the reply to the one before."""
        async for derivation in self.queued:
            await self._build(derivation)

    async def _build(self, derivation: int) -> None:
        submit = self.server.writer.submit
        drv = self.paths[derivation]
        assignment = await submit(ClaimBuild(derivation, False, WORKER, "bench"))
        if assignment is None:
            return  # another derivation of the same output was faster
        outputs = self.graph.derivations[drv].outputs
        references = self.graph.references(drv)
        for output in outputs:
            await submit(CommitNars(CACHE, (signed(output.path, references, base_name(drv)),)))
        built = tuple(BuiltOutput(output.name, output.path, 1000) for output in outputs)
        await submit(StoreBuildOutput(assignment, built, substituted=False, metrics=METRICS))
        if not await submit(BuildCompleted(assignment, LIMITS)):
            raise BenchFailed(f"{drv} is not complete")


def signed(path: str, references: tuple[str, ...] = (), deriver: str | None = None) -> Signed:
    """A committed NAR of that path."""
    name = base_name(path)
    nar_hash, file_hash = f"sha256:{name[:32]}{'0' * 20}", f"sha256:{name[:32]}{'1' * 20}"
    return Signed(NarRecord(path, nar_hash, 1000, file_hash, 500, references, deriver), "bench:signature")


@asynccontextmanager
async def serving(url: str) -> AsyncIterator[Server]:
    """A server's graph writer on a database."""
    async with Pool.open(url, 4) as pool, trio.open_nursery() as nursery:
        server = Server(url, pool)
        await nursery.start(server.writer.run)
        yield server
        server.writer.close()


async def reported(server: Server, graph: Graph) -> float:
    """The graph imported as an evaluation, to the end of its stream; the seconds that its reports took."""
    await server.upload_derivations(graph)
    job = await server.begin()
    seconds = await server.report(job, graph)
    await server.end(job)
    return seconds


async def built(server: Server, graph: Graph) -> float:
    """Everything built; the seconds. Raises BenchFailed unless the newest evaluation is Completed by it."""
    seconds = await server.build(graph)
    async with await Connection.connect(server.url) as connection:
        status = await fetch_value(connection, "SELECT status FROM evaluation ORDER BY id DESC LIMIT 1")
    if status != EvaluationStatus.COMPLETED:
        raise BenchFailed(f"the evaluation is {EvaluationStatus(status).label}")
    return seconds
