"""The server's end of the protocol against scripted workers: offers, claims, reports, losses, aborts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import attrs
import pytest

from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.failure import RetryLimits
from gradient.graph.requeue import RetryTransient
from gradient.graph.transaction import Transaction
from gradient.model import JOBS_PER_SLOT, BuildStage, BuildStatus, EvaluationStatus, FailureKind, JobKind
from gradient.wire import messages as wire
from gradient.wire.errors import HandshakeRefused
from tests.graph.world import drv, out
from tests.simulation.server_world import ServerWorld, until

DIAMOND = {"d": ["b", "c"], "b": ["a"], "c": ["a"], "a": []}


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[ServerWorld]:
    async with ServerWorld.running(database_url) as server:
        yield server


async def reached(server: ServerWorld, evaluation: int, status: EvaluationStatus) -> None:
    async def there() -> bool:
        return await server.evaluation_status(evaluation) is status

    await until(there)


async def built(server: ServerWorld, name: str, status: BuildStatus) -> None:
    async def there() -> bool:
        return await server.build_status(name) is status

    await until(there)


async def no_open_assignment(server: ServerWorld) -> None:
    await until(lambda: server.value("SELECT count(*) = 0 FROM dispatched_job WHERE finished_at IS NULL"))


async def test_one_worker_evaluates_and_builds_a_diamond(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate(DIAMOND, ["d"])
        first = await worker.build()  # while the evaluation still runs
        await worker.report(job, wire.JobCompleted)
        rest = [await worker.build() for _ in range(3)]
        await reached(server, evaluation, EvaluationStatus.COMPLETED)
    assert first == "a"
    assert sorted(rest[:2]) == ["b", "c"]
    assert rest[2] == "d"


async def test_a_hungry_worker_is_given_what_comes_later(server: ServerWorld) -> None:
    async with server.worker() as worker:
        await worker.link.send(wire.RequestJob(JobKind.EVAL))
        evaluation = await server.evaluation()
        job = await worker.expect(wire.AssignJob)
    assert job.job_id == f"eval:{evaluation}"
    assert job.flake is not None
    assert job.flake.repository is not None


async def test_a_worker_gets_the_next_build_while_the_last_one_uploads(server: ServerWorld) -> None:
    await server.evaluation()
    async with server.worker(max_concurrent_builds=1) as worker:
        names = [f"n{number}" for number in range(JOBS_PER_SLOT + 1)]
        await worker.evaluate({name: [] for name in names}, names)
        uploading = []
        for _ in range(JOBS_PER_SLOT):
            uploading.append(await worker.take(JobKind.BUILD))
            await worker.report(uploading[-1], wire.Stage, stage=BuildStage.UPLOAD)
        await worker.link.send(wire.RequestJob(JobKind.BUILD))  # but as many uploads as it may have are open
        await worker.report(uploading[0], wire.JobFailed, error="no", kind=FailureKind.PERMANENT)
        last = await worker.expect(wire.AssignJob)
    assert len({job.job_id for job in (*uploading, last)}) == JOBS_PER_SLOT + 1
    ended = "SELECT finished_at FROM dispatched_job WHERE id = %s"
    begun = "SELECT dispatched_at FROM dispatched_job WHERE id = %s"
    assert await server.value(begun, last.assignment_id) >= await server.value(
        ended, uploading[0].assignment_id
    )


async def test_a_lost_worker_gives_its_jobs_to_the_next(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        await worker.report(job, wire.JobCompleted)
        build = await worker.take(JobKind.BUILD)
        assert build.build is not None
        await worker.report(build, wire.Building, build_id=build.build.build_id)
        await built(server, "a", BuildStatus.BUILDING)
    async with server.worker(number=2) as worker:
        assert await worker.build() == "a"
        await reached(server, evaluation, EvaluationStatus.COMPLETED)
    outcomes = await server.value("SELECT array_agg(outcome ORDER BY id) FROM build_attempt")
    assert outcomes == [4, 1]  # aborted with the worker, then built


async def test_a_canceled_job_is_queued_again_without_an_attempt(server: ServerWorld) -> None:
    await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        await worker.report(job, wire.JobCompleted)
        build = await worker.take(JobKind.BUILD)
        await worker.report(build, wire.JobFailed, error="stopping", kind=FailureKind.CANCELED)
        assert await worker.build() == "a"
    assert await server.value("SELECT attempt FROM derivation_build") == 0


async def test_aborting_an_evaluation_tells_the_worker(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        build = await worker.take(JobKind.BUILD)
        await built(server, "a", BuildStatus.QUEUED)
        assert await server.writer.submit(AbortEvaluation(evaluation, "by a person"))
        aborted = {(await worker.expect(wire.AbortJob)).job_id for _ in range(2)}
        assert aborted == {job.job_id, build.job_id}
        for stopped in (job, build):
            await worker.report(stopped, wire.JobFailed, error="aborted", kind=FailureKind.ABORTED)
        await no_open_assignment(server)
    assert await server.build_status("a") is BuildStatus.ABORTED
    assert await server.evaluation_status(evaluation) is EvaluationStatus.ABORTED


async def test_stale_reports_are_dropped(server: ServerWorld) -> None:
    await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        await worker.link.send(wire.JobCompleted(job.job_id, job.assignment_id + 1))
        await worker.link.send(wire.JobCompleted("build:7", 99))
        assert await worker.build() == "a"
        await built(server, "a", BuildStatus.COMPLETED)
        assert await server.value("SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL") == 1


async def test_an_evaluation_waits_for_a_worker_in_words(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    await reached(server, evaluation, EvaluationStatus.WAITING)
    reason = await server.value("SELECT waiting_reason FROM evaluation WHERE id = %s", evaluation)
    assert reason == {"kind": "eval_workers", "capability": "fetch", "connected_workers": 0}
    async with server.worker() as worker:
        assert (await worker.take(JobKind.EVAL)).job_id == f"eval:{evaluation}"


async def test_a_build_for_a_system_nobody_has_parks_its_evaluation(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    async with server.worker(architectures=("riscv64-linux",)) as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        await worker.report(job, wire.JobCompleted)
        await reached(server, evaluation, EvaluationStatus.WAITING)
        # Before the worker leaves: then it waits for more.
        reason = await server.value("SELECT waiting_reason FROM evaluation WHERE id = %s", evaluation)
    assert reason["unmet"][0]["architecture"] == "x86_64-linux"
    assert reason["available_architectures"] == ["riscv64-linux"]


async def test_queries_answer_what_is_held_and_what_is_known(server: ServerWorld) -> None:
    await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate(DIAMOND, ["d"])
        held, other = drv("a"), drv("nobody")
        await worker.link.send(wire.CacheQuery(job.job_id, 1, (held, other), wire.QueryMode.PUSH))
        status = await worker.expect(wire.CacheStatus)
        assert {info.path: info.cached for info in status.cached} == {held: True, other: False}
        assert status.upload is not None
        await worker.link.send(wire.CacheQuery(job.job_id, 2, (held, other), wire.QueryMode.PULL))
        pulled = await worker.expect(wire.CacheStatus)
        assert [info.url is not None for info in pulled.cached] == [True, False]
        await until(lambda: server.value("SELECT count(*) = 4 FROM derivation WHERE walked"))
        await worker.link.send(wire.QueryKnownDerivations(job.job_id, 3, (drv("d"), other)))
        assert (await worker.expect(wire.KnownDerivations)).known == (drv("d"),)


async def test_a_second_worker_with_the_same_id_is_refused(server: ServerWorld) -> None:
    async with server.worker():
        with pytest.raises(HandshakeRefused, match="connected already"):
            async with server.worker():
                pass


async def test_an_input_that_the_cache_cannot_give_is_built_again_and_waited_for(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({"app": ["lib"], "lib": []}, ["app"])
        await worker.report(job, wire.JobCompleted)
        assert await worker.build() == "lib"
        app = await worker.take(JobKind.BUILD)
        await worker.report(
            app,
            wire.JobFailed,
            error="HTTP 404",
            kind=FailureKind.INPUTS_UNAVAILABLE,
            missing_paths=(out("lib"), "/etc/passwd"),
        )
        assert await worker.build() == "lib"
        assert await server.build_status("app") is BuildStatus.FAILED_TRANSIENT
        # Its backoff is over.
        await server.writer.submit(RetryTransient(RetryLimits(retry_backoff_secs=0)))
        assert await worker.build() == "app"
        await reached(server, evaluation, EvaluationStatus.COMPLETED)


async def test_what_a_worker_is_told_is_kept_for_it(server: ServerWorld) -> None:
    """Old rows: the answer is a promise, made through the graph writer."""
    await server.evaluation()
    async with server.worker() as worker:
        await worker.evaluate({"old": []}, ["old"])
        for table in ("cached_path", "derivation"):
            await server.writer.submit(Age(table))
        await worker.link.send(wire.CacheQuery("j", 1, (drv("old"), drv("new")), wire.QueryMode.PUSH))
        held = await worker.expect(wire.CacheStatus)
        assert [(info.path, info.cached) for info in held.cached] == [(drv("old"), True), (drv("new"), False)]
        await worker.link.send(wire.QueryKnownDerivations("j", 2, (drv("old"), drv("new"))))
        assert (await worker.expect(wire.KnownDerivations)).known == (drv("old"),)
    for table in ("cached_path", "derivation"):
        assert await server.value(f"SELECT promised_at > created_at FROM {table}")


@attrs.frozen
class Age:
    """All rows of a table came a month ago."""

    table: str

    async def apply(self, tx: Transaction) -> None:
        await tx.connection.execute(
            f"UPDATE {self.table} SET created_at = created_at - interval '30 days'".encode()
        )
