"""The scheduler between the database and the workers: candidates read once, claims that fail or are lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import attrs
import psycopg
import pytest
import trio

from gradient.graph.assignments import ClaimBuild
from gradient.graph.demote import DemoteMissingNar
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.heal import Repair
from gradient.graph.pg import Connection
from gradient.graph.pg_pool import Pool
from gradient.graph.transaction import Message, Rejected, Transaction
from gradient.graph.writer import GraphWriter
from gradient.model import BuildStatus, EvaluationStatus, JobKind, Repository
from gradient.passes import scheduler as scheduler_module
from gradient.passes.pool import Worker
from gradient.passes.scheduler import Scheduler
from gradient.settings.tables import Build
from gradient.wire.messages import CandidateScore, Capabilities, WorkerCapabilities
from tests.graph.world import World, hash_part
from tests.patience import PATIENCE

INFO = WorkerCapabilities(("x86_64-linux",), (), 2, 1, 4, 1000)


@attrs.define(eq=False)
class Bench:
    world: World
    writer: GraphWriter
    scheduler: Scheduler
    readers: Pool

    def worker(self, number: int = 1) -> Worker:
        worker = Worker(UUID(int=number), f"w{number}", frozenset({"main"}), Capabilities(), NOW, INFO)
        worker.hungry |= set(JobKind)
        assert self.scheduler.pool.add(worker)
        return worker

    async def building(self, graph: dict[str, list[str]], entries: list[str]) -> int:
        """An evaluation in Building; its moves go through the writer only from here on."""
        evaluation = await self.world.evaluation()
        await self.world.record(evaluation, graph, entries=entries)
        await self.world.end_stream(evaluation)
        return evaluation

    @property
    def pending(self) -> list[str]:
        return [candidate.job_id for candidate in self.scheduler.candidates]


NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
async def bench(connection: Connection, database_url: str, nursery: trio.Nursery) -> AsyncIterator[Bench]:
    world = World(connection)
    await world.setup()
    async with Pool.open(database_url, 2) as readers:
        writer = GraphWriter(database_url, print, lambda: NOW)
        scheduler = Scheduler(writer, readers, Build(), lambda: NOW)
        writer.publish = scheduler.moved
        await nursery.start(writer.run)
        yield Bench(world, writer, scheduler, readers)


async def test_a_resync_finds_what_memory_lost_and_only_that(bench: Bench) -> None:
    await bench.building({"a": [], "b": ["a"], "c": []}, ["b", "c"])
    assert bench.pending == []
    for _ in range(2):
        await bench.scheduler.resync()
        await bench.scheduler.assign_builds()
        assert bench.pending == [f"build:{await bench.world.id(name)}" for name in ("a", "c")]
    await bench.world.claim("a")  # by a hand the scheduler does not know
    bench.scheduler.candidates.leave(f"build:{await bench.world.id('a')}")
    await bench.scheduler.resync()
    await bench.scheduler.assign_builds()
    assert bench.pending == [f"build:{await bench.world.id('c')}"]


async def test_more_than_one_slice_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "LOAD_SLICE", 2)
    await bench.building({name: [] for name in "abcde"}, list("abcde"))
    await bench.scheduler.resync()
    await bench.scheduler.assign_builds()
    assert len(bench.pending) == 5


async def test_a_build_that_moves_while_it_is_read_is_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read saw it assigned; the worker was lost before the read was taken in."""
    await bench.building({"a": []}, ["a"])
    derivation = await bench.world.id("a")
    read = scheduler_module.build_candidates

    async def raced(connection: Connection, ids: Any) -> Any:
        monkeypatch.undo()
        await bench.world.connection.execute("UPDATE derivation_build SET status = 2")
        found = await read(connection, ids)
        await bench.world.connection.execute("UPDATE derivation_build SET status = 1")
        bench.scheduler._unread[derivation] = None  # as `moved` does
        return found

    await bench.scheduler.resync()
    monkeypatch.setattr(scheduler_module, "build_candidates", raced)
    await bench.scheduler.assign_builds()
    assert bench.pending == [f"build:{derivation}"]


async def test_a_read_that_fails_reads_as_nothing_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.building({"a": []}, ["a"])

    async def away(*_: Any) -> Any:
        raise psycopg.OperationalError("the database is away")

    await bench.scheduler.resync()
    monkeypatch.setattr(scheduler_module, "build_candidates", away)
    with pytest.raises(psycopg.OperationalError):
        await bench.scheduler.assign_builds()
    monkeypatch.undo()
    await bench.scheduler.assign_builds()
    assert len(bench.pending) == 1


async def test_a_pending_job_wakes_hungry_workers_at_every_tick(bench: Bench) -> None:
    """One whose claim failed is asked again, though nothing has moved."""
    await bench.building({"a": []}, ["a"])
    await bench.scheduler.resync()
    await bench.scheduler.assign_builds()
    worker = bench.worker()
    await bench.scheduler.assign_builds()
    with trio.fail_after(PATIENCE):
        await worker.wake.wait()


# --- claims ---------------------------------------------------------------------------------------


async def test_the_best_job_is_claimed_and_on_the_worker(bench: Bench) -> None:
    await bench.building({"cold": [], "warm": []}, ["cold", "warm"])
    await bench.scheduler.resync()
    await bench.scheduler.assign_builds()
    worker, ids = bench.worker(), {name: await bench.world.id(name) for name in ("cold", "warm")}
    cold = f"build:{ids['cold']}"
    worker.scores[cold] = CandidateScore(cold, 9, 2**31, False)
    job = await bench.scheduler.next_job(worker, JobKind.BUILD)
    assert job is not None
    assert job.build is not None
    assert job.job_id == f"build:{ids['warm']}"
    assert (job.build.build_id, job.build.timeout_secs) == (ids["warm"], 14400)
    assert list(worker.jobs) == [job.job_id]
    assert worker.hungry == set(JobKind)  # a second slot is free
    assert await bench.scheduler.next_job(worker, JobKind.BUILD) is not None
    assert worker.hungry == {JobKind.EVAL}
    assert bench.pending == []
    assert worker.scores == {}
    assert await bench.scheduler.next_job(worker, JobKind.BUILD) is None


async def test_a_claim_lost_to_another_goes_to_the_next_job(bench: Bench) -> None:
    await bench.building({"a": [], "b": []}, ["a", "b"])
    await bench.scheduler.resync()
    await bench.scheduler.assign_builds()
    await bench.world.claim("a")
    job = await bench.scheduler.next_job(bench.worker(), JobKind.BUILD)
    assert job is not None
    assert job.job_id == f"build:{await bench.world.id('b')}"
    assert bench.pending == []


async def test_at_most_three_claims_are_lost_for_one_request(bench: Bench) -> None:
    names = list("abcde")
    await bench.building({name: [] for name in names}, names)
    await bench.scheduler.resync()
    await bench.scheduler.assign_builds()
    in_order = {await bench.world.id(name): name for name in names}
    for derivation in sorted(in_order)[:4]:
        await bench.world.claim(in_order[derivation])
    worker = bench.worker()
    assert await bench.scheduler.next_job(worker, JobKind.BUILD) is None
    assert await bench.scheduler.next_job(worker, JobKind.BUILD) is not None


@attrs.frozen
class FailingWriter:
    """A writer that can record nothing."""

    error: Exception

    async def submit(self, message: Message[Any]) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [psycopg.OperationalError("away"), TimeoutError("late")])
async def test_a_claim_that_fails_leaves_the_job_pending(bench: Bench, error: Exception) -> None:
    await bench.building({"a": []}, ["a"])
    await bench.scheduler.resync()
    await bench.scheduler.assign_builds()
    worker, before = bench.worker(), bench.pending
    bench.scheduler.writer = FailingWriter(error)  # type: ignore[assignment]
    with pytest.raises(type(error)):
        await bench.scheduler.next_job(worker, JobKind.BUILD)
    bench.scheduler.writer = bench.writer
    assert bench.pending == before
    assert worker.jobs == {}
    assert await bench.scheduler.next_job(worker, JobKind.BUILD) is not None


async def test_nothing_is_handed_out_while_the_server_drains(bench: Bench) -> None:
    await bench.building({"a": []}, ["a"])
    await bench.scheduler.resync()
    await bench.scheduler.assign_builds()
    bench.scheduler.draining = True
    assert await bench.scheduler.next_job(bench.worker(), JobKind.BUILD) is None
    assert len(bench.pending) == 1


async def test_an_abort_takes_pending_jobs_away(bench: Bench) -> None:
    evaluation = await bench.building({"a": []}, ["a"])
    queued = await bench.writer.submit(CreateEvaluation("main", Repository("git+https://example.org/y")))
    await bench.scheduler.resync()
    await bench.scheduler.assign_builds()
    await bench.scheduler.assign_queued_evals()
    await bench.scheduler.assign_queued_evals()
    assert bench.pending == [f"build:{await bench.world.id('a')}", f"eval:{queued}"]
    for ended in (evaluation, queued):
        await bench.writer.submit(AbortEvaluation(ended, "by a person"))
    assert bench.pending == []


async def test_a_claimed_evaluation_is_a_combined_job(bench: Bench) -> None:
    evaluation = await bench.writer.submit(CreateEvaluation("main", Repository("git+https://example.org/y")))
    await bench.scheduler.assign_queued_evals()
    worker = bench.worker()
    job = await bench.scheduler.next_job(worker, JobKind.EVAL)
    assert job is not None
    assert job.flake is not None
    assert (job.job_id, job.flake.repository) == (
        f"eval:{evaluation}",
        Repository("git+https://example.org/y"),
    )
    await bench.scheduler.assign_queued_evals()  # it is assigned: no candidate any more
    assert bench.pending == []


# --- the waiting pass -----------------------------------------------------------------------------


async def test_drifted_counters_do_not_keep_an_evaluation_from_its_end(bench: Bench) -> None:
    evaluation = await bench.building({"a": []}, ["a"])
    await bench.world.connection.execute(
        "UPDATE evaluation SET active_shared_builds = active_shared_builds + 1"
    )
    await bench.world.build("a")
    assert await bench.world.evaluation_status(evaluation) is EvaluationStatus.BUILDING
    await bench.scheduler.refresh_waiting_state()
    assert await bench.world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED


async def test_the_waiting_pass_begins_with_a_fold(bench: Bench) -> None:
    await bench.building({"a": [], "b": ["a"]}, ["b"])
    assert await bench.world.value("SELECT count(*) FROM evaluation_shared_build_delta") > 0
    await bench.scheduler.refresh_waiting_state()
    assert await bench.world.value("SELECT count(*) FROM evaluation_shared_build_delta") == 0
    assert await bench.world.value("SELECT active_shared_builds FROM evaluation") == 2


async def test_an_unbuildable_evaluation_is_aborted_with_a_warning(bench: Bench) -> None:
    evaluation = await bench.world.evaluation()
    await bench.world.record(evaluation, {"a": []}, entries=["a"], architecture="riscv64-linux")
    await bench.world.end_stream(evaluation)
    worker = bench.worker()
    await bench.scheduler.refresh_waiting_state()
    assert await bench.world.evaluation_status(evaluation) is EvaluationStatus.WAITING
    bench.scheduler.pool.remove(worker)  # the pool changes, the need does not
    await bench.scheduler.refresh_waiting_state()
    bench.scheduler.clock = lambda: NOW + timedelta(seconds=300)
    await bench.scheduler.refresh_waiting_state()
    assert await bench.world.evaluation_status(evaluation) is EvaluationStatus.ABORTED
    warning = await bench.world.value("SELECT message FROM evaluation_message WHERE level = 1")
    assert "riscv64-linux (1 build, such as a)" in warning


async def test_a_running_claim_is_not_taken_for_a_stuck_graph(bench: Bench) -> None:
    evaluation = await bench.building({"a": [], "b": ["a"]}, ["b"])
    bench.worker()
    await bench.writer.submit(ClaimBuild(await bench.world.id("a"), False, UUID(int=1), "w"))
    await bench.scheduler.refresh_waiting_state()
    assert await bench.world.evaluation_status(evaluation) is EvaluationStatus.BUILDING


# --- the graph-stuck heal -------------------------------------------------------------------------

CHAIN = {"top": ["mid"], "mid": ["bad"], "bad": []}
STUCK = {"kind": "graph_stuck", "pending_shared_builds": 3}


async def lost_place(bench: Bench) -> int:
    """An evaluation whose only startable build lost its place in the queue: no event gives it back."""
    evaluation = await bench.building(CHAIN, ["top"])
    bench.worker()
    query = "UPDATE derivation_build SET status = 0 WHERE derivation = %s"
    await bench.world.connection.execute(query, (await bench.world.id("bad"),))
    return evaluation


async def test_a_stuck_evaluation_is_healed_before_it_is_parked(bench: Bench) -> None:
    evaluation = await lost_place(bench)
    await bench.scheduler.refresh_waiting_state()
    assert await bench.world.evaluation_status(evaluation) is EvaluationStatus.BUILDING
    assert await bench.world.status("bad") is BuildStatus.QUEUED
    phases = "SELECT array_agg(status ORDER BY id) FROM phase_event"
    assert EvaluationStatus.WAITING not in await bench.world.value(phases)


async def test_what_stays_stuck_is_parked_and_healed_again_from_time_to_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = await lost_place(bench)
    healed = []

    async def cannot(self: Repair, tx: Transaction) -> None:
        healed.append(self.evaluation)
        raise Rejected("a step failed")

    with monkeypatch.context() as patch:
        patch.setattr(Repair, "apply", cannot)
        await bench.scheduler.refresh_waiting_state()
        assert await bench.world.value("SELECT waiting_reason FROM evaluation") == STUCK
        tries = len(healed)
        await bench.scheduler.refresh_waiting_state()  # it is parked, and nothing has changed
        assert len(healed) == tries
    await bench.scheduler.reheal_stuck()
    assert await bench.world.status("bad") is BuildStatus.QUEUED
    await bench.scheduler.refresh_waiting_state()
    assert await bench.world.evaluation_status(evaluation) is EvaluationStatus.BUILDING


async def test_a_lost_drv_is_walked_again_by_another_evaluation(bench: Bench) -> None:
    evaluation = await bench.building({"a": []}, ["a"])
    bench.worker()
    await bench.writer.submit(DemoteMissingNar((hash_part("a.drv"),)))
    await bench.scheduler.refresh_waiting_state()
    assert await bench.world.evaluation_status(evaluation) is EvaluationStatus.WAITING
    await bench.scheduler.recover_drv_stuck_evals()
    assert await bench.world.value("SELECT count(*) FROM evaluation") == 1  # it may come yet
    bench.writer.clock = lambda: NOW + timedelta(minutes=2)
    await bench.scheduler.recover_drv_stuck_evals()
    await bench.scheduler.assign_queued_evals()
    recovery = await bench.world.value("SELECT id FROM evaluation WHERE recovers = %s", evaluation)
    assert bench.pending == [f"eval:{recovery}"]
