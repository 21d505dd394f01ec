"""Abort and retry of a build, from the message to the worker and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from gradient.graph.evaluation_build import AbortBuild, BuildRefused, Refusal, RetryBuild
from gradient.graph.unconfirmed import AbandonUnconfirmed
from gradient.model import BuildStatus, EvaluationStatus, FailureKind, JobKind
from gradient.wire import messages as wire
from tests.graph.world import out
from tests.simulation.server_world import ServerWorld, until

CHAIN = {"top": ["mid"], "mid": ["bad"], "bad": []}


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[ServerWorld]:
    async with ServerWorld.running(database_url) as server:
        yield server


async def build_id(server: ServerWorld, name: str) -> int:
    return int(await server.value("SELECT id FROM derivation WHERE name = %s", name))


async def test_an_aborted_build_is_stopped_and_its_retry_waits_for_the_worker(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate(CHAIN, ["top"])
        await worker.report(job, wire.JobCompleted)
        build = await worker.take(JobKind.BUILD)
        assert build.build is not None
        await worker.report(build, wire.Building, build_id=build.build.build_id)
        bad = await build_id(server, "bad")
        await until(lambda: _is(server, "bad", BuildStatus.BUILDING))

        await server.writer.submit(AbortBuild(bad, evaluation, "a person"))
        abort = await worker.expect(wire.AbortJob)
        assert (abort.job_id, abort.reason) == (build.job_id, "bad was aborted by a person")
        assert await server.evaluation_status(evaluation) is EvaluationStatus.FAILED
        assert await server.build_status("top") is BuildStatus.DEPENDENCY_FAILED

        with pytest.raises(BuildRefused) as refused:
            await server.writer.submit(RetryBuild(bad, evaluation, "a person"))
        assert refused.value.refusal is Refusal.WORKER_STILL_STOPPING
        await worker.report(build, wire.JobFailed, error="aborted by server", kind=FailureKind.ABORTED)
        await until(lambda: server.value("SELECT count(*) = 0 FROM dispatched_job WHERE finished_at IS NULL"))
        retried = await server.writer.submit(RetryBuild(bad, evaluation, "a person"))
        assert retried.reopened
        assert [await worker.build() for _ in range(3)] == ["bad", "mid", "top"]
        await until(lambda: _ended(server, evaluation, EvaluationStatus.COMPLETED))
    outcomes = await server.value("SELECT array_agg(outcome ORDER BY id) FROM build_attempt")
    assert outcomes == [4, 1, 1, 1]


async def test_a_worker_that_never_confirms_is_not_waited_for(server: ServerWorld) -> None:
    """Its slot counts as free, and what it reports later is stale."""
    evaluation = await server.evaluation()
    async with server.worker(max_concurrent_builds=1) as worker:
        await worker.evaluate(CHAIN, ["top"])
        build = await worker.take(JobKind.BUILD)
        bad = await build_id(server, "bad")
        await server.writer.submit(AbortBuild(bad, evaluation, "a person"))
        await worker.expect(wire.AbortJob)
        assert await server.writer.submit(AbandonUnconfirmed(timedelta(0))) == 1
        await server.writer.submit(RetryBuild(bad, evaluation, "a person"))
        again = await worker.take(JobKind.BUILD)
        assert again.assignment_id != build.assignment_id
        await worker.report(build, wire.JobFailed, error="aborted", kind=FailureKind.ABORTED)
        await server.commit(out("bad"))
        await worker.report(again, wire.JobCompleted)
        await until(lambda: _is(server, "bad", BuildStatus.COMPLETED))


async def test_a_building_report_of_an_aborted_claim_is_answered_with_the_abort(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        await worker.evaluate(CHAIN, ["top"])
        build = await worker.take(JobKind.BUILD)
        assert build.build is not None
        await server.writer.submit(AbortBuild(await build_id(server, "bad"), evaluation, "a person"))
        await worker.expect(wire.AbortJob)
        await worker.report(build, wire.Building, build_id=build.build.build_id)
        assert (await worker.expect(wire.AbortJob)).reason == "it was aborted before it started"


async def test_an_aborted_build_is_offered_no_more(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        await worker.evaluate({"a": [], "b": []}, ["a", "b"])
        await until(lambda: _pending(server, 2))
        await server.writer.submit(AbortBuild(await build_id(server, "a"), evaluation, "a person"))
        await until(lambda: _pending(server, 1))
        assert await worker.build() == "b"


async def _pending(server: ServerWorld, count: int) -> bool:
    return len(list(server.scheduler.candidates)) == count


async def _is(server: ServerWorld, name: str, status: BuildStatus) -> bool:
    return await server.build_status(name) is status


async def _ended(server: ServerWorld, evaluation: int, status: EvaluationStatus) -> bool:
    return await server.evaluation_status(evaluation) is status
