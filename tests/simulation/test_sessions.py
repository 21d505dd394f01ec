"""Sessions under stress: hostile workers, full queues, refused and declined jobs, losses, the drain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
import trio
import trio.testing

from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.pg import Connection
from gradient.model import (
    BuildMetrics,
    BuildStatus,
    BuiltOutput,
    EntryPoint,
    EvaluationStatus,
    FailureKind,
    JobKind,
    MessageLevel,
    Repository,
    Span,
)
from gradient.sessions.reports import REPORT_QUEUE
from gradient.sessions.session import MAX_IMPORTS, MAX_QUESTIONS
from gradient.wire import messages as wire
from gradient.wire.errors import HandshakeRefused, LinkClosed
from gradient.wire.greeting import introduce
from gradient.wire.transport import accept, connect_over
from tests.graph.world import derivation, drv, out
from tests.patience import PATIENCE
from tests.simulation.server_world import (
    TOKEN,
    ScriptedWorker,
    ServerWorld,
    suppress_wire_errors,
    until,
)

BIG = 2**64 - 1


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[ServerWorld]:
    async with ServerWorld.running(database_url) as server:
        yield server


async def reached(server: ServerWorld, evaluation: int, status: EvaluationStatus) -> None:
    async def there() -> bool:
        return await server.evaluation_status(evaluation) is status

    await until(there)


async def nobody_connected(server: ServerWorld) -> None:
    with trio.fail_after(PATIENCE):
        while len(server.scheduler.pool):  # noqa: ASYNC110
            await trio.sleep(0.01)


async def nothing_open(server: ServerWorld) -> None:
    await until(lambda: server.value("SELECT count(*) = 0 FROM dispatched_job WHERE finished_at IS NULL"))


async def closed(worker: ScriptedWorker) -> LinkClosed:
    """How the server ended the link."""
    with pytest.raises(LinkClosed) as end, trio.fail_after(PATIENCE):
        while True:
            await worker.link.receive()
    return end.value


@asynccontextmanager
async def row_locked(url: str, table: str) -> AsyncIterator[None]:
    """Hold every row of a table: whoever changes one waits."""
    async with await Connection.connect(url) as connection, connection.transaction():
        await connection.execute(f"SELECT FROM {table} FOR UPDATE".encode())
        yield


async def writer_waits(server: ServerWorld) -> None:
    """Until what it writes now waits for `row_locked`."""
    mine = "datname = current_database() AND wait_event_type = 'Lock'"
    await until(lambda: server.value(f"SELECT count(*) = 1 FROM pg_stat_activity WHERE {mine}"))


# --- hostile reports ------------------------------------------------------------------------------

BAD_EVAL_REPORTS: dict[str, Any] = {
    "a batch with a bad path": (wire.EvalResult, {"derivations": (derivation("../a"),)}),
    "a derivation without outputs": (wire.EvalResult, {"derivations": (derivation("a", outputs=()),)}),
    "an edge to itself": (wire.EvalResult, {"derivations": (derivation("a", ["a"]),)}),
    "a circle": (wire.EvalResult, {"derivations": (derivation("b", ["a"]), derivation("a", ["b"]))}),
    "NUL in a system": (wire.EvalResult, {"derivations": (derivation("a", architecture="x\0"),)}),
    "an entry point never sent": (wire.EvalResult, {"entry_points": (EntryPoint("a", drv("a")),)}),
    "numbers beyond PostgreSQL": (
        wire.EvalStats,
        {"attributes": BIG, "derivations": 1, "failed_attributes": 1},
    ),
    "NUL in its timeline": (wire.JobCompleted, {"spans": (Span("\0", 0, 1),)}),
}


@pytest.mark.parametrize("name", BAD_EVAL_REPORTS)
async def test_a_bad_report_fails_its_evaluation_alone(server: ServerWorld, name: str) -> None:
    report, fields = BAD_EVAL_REPORTS[name]
    bad = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({}, [])
        good = await server.evaluation()
        await worker.report(job, report, **fields)
        abort = await worker.expect(wire.AbortJob)
        assert abort.job_id == job.job_id
        assert "could not record" in abort.reason
        await reached(server, bad, EvaluationStatus.FAILED)
        if report is wire.EvalResult and "derivations" in fields:
            said = await server.value("SELECT message FROM evaluation_message WHERE evaluation = %s", bad)
            assert any(bad_one.drv_path in said for bad_one in fields["derivations"])
            assert await server.value("SELECT count(*) FROM derivation") == 0
        await worker.report(job, wire.JobFailed, error="aborted", kind=FailureKind.ABORTED)
        again = await worker.evaluate({"a": []}, ["a"])
        assert again.job_id == f"eval:{good}"
        await worker.report(again, wire.JobCompleted)
        await worker.build()
        await reached(server, good, EvaluationStatus.COMPLETED)
    source = await server.value("SELECT source FROM evaluation_message WHERE evaluation = %s", bad)
    assert source == "db-insert"


BAD_BUILD_REPORTS: dict[str, Any] = {
    "a size beyond 64 bits": (
        wire.BuildOutput,
        {"outputs": (BuiltOutput("out", "", BIG),), "substituted": False},
    ),
    "metrics beyond 32 bits": (
        wire.BuildOutput,
        {"outputs": (), "substituted": False, "metrics": BuildMetrics(BIG)},
    ),
    "NUL in its timeline": (wire.JobCompleted, {"spans": (Span("\0", 0, 1),)}),
    "NUL in the timeline of a failure": (
        wire.JobFailed,
        {"error": "x", "kind": FailureKind.PERMANENT, "spans": (Span("\0", 0, BIG),)},
    ),
}


@pytest.mark.parametrize("name", BAD_BUILD_REPORTS)
async def test_a_bad_report_costs_its_build_one_attempt(server: ServerWorld, name: str) -> None:
    report, fields = BAD_BUILD_REPORTS[name]
    if report is wire.BuildOutput:
        fields = {"build_id": 1, **fields}
    await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        await worker.report(job, wire.JobCompleted)
        build = await worker.take(JobKind.BUILD)
        await worker.report(build, wire.Building, build_id=1)
        await server.commit(out("a"))
        await worker.report(build, report, **fields)
        assert (await worker.expect(wire.AbortJob)).job_id == build.job_id
        await nothing_open(server)
        message = await server.value("SELECT failure_message FROM build_attempt")
        assert "could not record" in message
        # Its output was uploaded before: nothing is left to try again.
        assert await server.build_status("a") is BuildStatus.SUBSTITUTED
        # What it still says about the job is stale.
        await worker.report(build, wire.JobFailed, error="aborted", kind=FailureKind.ABORTED)
        await worker.link.send(wire.CacheQuery("", 1, (), wire.QueryMode.NORMAL))
        await worker.expect(wire.CacheStatus)


async def test_reports_of_the_other_kind_of_job_end_the_session(server: ServerWorld) -> None:
    """Ids of builds and of evaluations must never be taken for each other."""
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.take(JobKind.EVAL)
        await worker.report(job, wire.LogChunk, data=b"this is no build")
        end = await closed(worker)
        assert (end.code, end.reason) == (1002, "LogChunk is not expected here")
    async with server.worker(number=2) as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        build = await worker.take(JobKind.BUILD)
        await worker.report(build, wire.EvalMessage, level=MessageLevel.ERROR, source="x", message="mine")
        assert (await closed(worker)).code == 1002
    await nothing_open(server)
    assert (
        await server.value("SELECT count(*) FROM evaluation_message WHERE evaluation = %s", evaluation) == 0
    )


@pytest.mark.parametrize(
    "facts",
    [
        {"architectures": ("x86\0linux",)},
        {"architectures": ("",)},
        {"system_features": ("f" * 1000,)},
        {"architectures": tuple(map(str, range(1000)))},
    ],
    ids=["NUL", "empty", "long", "many"],
)
async def test_a_worker_that_describes_itself_badly_is_turned_away(
    server: ServerWorld, facts: dict[str, Any]
) -> None:
    async with server.worker(**facts) as worker:
        assert (await closed(worker)).code == 1002
    await nobody_connected(server)


async def test_workers_are_called_by_name_and_by_id_where_a_name_is_taken(server: ServerWorld) -> None:
    async with (
        server.worker(0xA << 124, name="host"),
        server.worker(0xB << 124, name="host"),
        server.worker(0xC << 124),
    ):
        names = [worker.name for worker in server.scheduler.pool]
    assert names == ["host", "host (b0000000)", "c0000000"]


async def test_a_message_out_of_place_ends_the_session(server: ServerWorld) -> None:
    async with server.worker() as worker:
        await worker.link.send(wire.InitConnection(1, 1, str(UUID(int=5)), wire.Capabilities()))
        end = await closed(worker)
    assert (end.code, end.reason) == (1002, "InitConnection is not expected here")


@asynccontextmanager
async def no_readers(server: ServerWorld) -> AsyncIterator[None]:
    """Nobody can read the database: every connection of the pool is lent."""
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(server.readers.connection())
        yield


async def test_too_many_questions_are_a_flood(server: ServerWorld) -> None:
    async with server.worker() as worker, no_readers(server):
        for number in range(MAX_QUESTIONS + 1):
            await worker.link.send(wire.CacheQuery("", number, (drv("a"),), wire.QueryMode.NORMAL))
        assert (await closed(worker)).code == 1008


async def test_too_many_imports_are_a_flood_and_fewer_are_none(server: ServerWorld) -> None:
    await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        for number in range(MAX_IMPORTS):
            await worker.link.send(wire.ImportRequest(job.job_id, job.assignment_id, number, (drv("a"),)))
        # Waiting imports are no questions: those are answered.
        await worker.link.send(wire.CacheQuery("", 1, (), wire.QueryMode.PUSH))
        await worker.expect(wire.CacheStatus)
        await worker.link.send(wire.ImportRequest(job.job_id, job.assignment_id, 100, (drv("a"),)))
        assert (await closed(worker)).code == 1008


async def test_a_flood_of_reports_is_held_back_and_nothing_is_lost(
    server: ServerWorld, database_url: str
) -> None:
    """The queue is full, the reader waits: TCP holds the worker back."""
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({}, [])
        await reached(server, evaluation, EvaluationStatus.EVALUATING_DERIVATION)
        session = next(iter(server.sessions._open.values()))
        async with trio.open_nursery() as nursery:

            async def flood() -> None:
                for number in range(300):
                    await worker.report(
                        job, wire.EvalMessage, level=MessageLevel.NOTICE, source="s", message=str(number)
                    )

            async with row_locked(database_url, "evaluation"):
                nursery.start_soon(flood)
                with trio.fail_after(PATIENCE):
                    while session._queue.statistics().tasks_waiting_send == 0:  # noqa: ASYNC110
                        await trio.sleep(0.01)
                assert session._queue.statistics().current_buffer_used == REPORT_QUEUE
        count = "SELECT count(*) FROM evaluation_message"
        await until(lambda: server.value(f"{count} HAVING count(*) = 300"))
        order = await server.value("SELECT array_agg(message ORDER BY id) FROM evaluation_message")
    assert order == [str(number) for number in range(300)]


# --- imports --------------------------------------------------------------------------------------


async def test_an_import_waits_for_the_reports_before_it_and_then_for_the_build(
    server: ServerWorld, database_url: str
) -> None:
    await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({}, [])
        await server.commit(drv("a"))
        async with row_locked(database_url, "evaluation"):
            point = EntryPoint("a", drv("a"))
            await worker.report(job, wire.EvalResult, derivations=(derivation("a"),), entry_points=(point,))
            await worker.link.send(wire.ImportRequest(job.job_id, job.assignment_id, 7, (drv("a"),)))
            # Answered later than the import would be, could it overtake the batch.
            await worker.link.send(wire.CacheQuery(job.job_id, 8, (drv("a"),), wire.QueryMode.NORMAL))
            await worker.expect(wire.CacheStatus)
        assert await worker.build() == "a"
        result = await worker.expect(wire.ImportResult)
    assert (result.request_id, result.failed_drv) == (7, None)


async def test_an_import_of_what_fails_names_it(server: ServerWorld) -> None:
    await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        await worker.link.send(wire.ImportRequest(job.job_id, job.assignment_id, 1, (drv("a"),)))
        build = await worker.take(JobKind.BUILD)
        await worker.report(build, wire.JobFailed, error="no", kind=FailureKind.PERMANENT)
        result = await worker.expect(wire.ImportResult)
        assert (result.failed_drv, result.reason) == (drv("a"), "FailedPermanent")
        for path, why in ((drv("z"), "it was never published"), ("/etc/passwd", "no store path")):
            await worker.link.send(wire.ImportRequest(job.job_id, job.assignment_id, 2, (path,)))
            result = await worker.expect(wire.ImportResult)
            assert result.failed_drv == path
            assert why in (result.reason or "")


# --- jobs that come back --------------------------------------------------------------------------


async def test_a_declined_job_goes_to_who_asks_for_it(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    async with server.worker() as first, server.worker(number=2) as second:
        await first.link.send(wire.RequestJob(JobKind.EVAL))
        job = await first.expect(wire.AssignJob)
        await first.link.send(wire.AssignJobResponse(job.job_id, job.assignment_id, False, "at capacity"))
        taken = await second.take(JobKind.EVAL)
        assert taken.job_id == job.job_id == f"eval:{evaluation}"
        assert taken.assignment_id != job.assignment_id
    assert await server.value("SELECT outcome FROM dispatched_job ORDER BY id LIMIT 1") == 2


async def test_a_worker_that_declines_is_not_asked_again_at_once(server: ServerWorld) -> None:
    await server.evaluation()
    async with server.worker() as worker:
        flake = await worker.evaluate({"a": []}, ["a"])
        await worker.report(flake, wire.JobCompleted)
        for rounds in (1, 2):
            await worker.link.send(wire.RequestJob(JobKind.BUILD))  # of its two slots
            job = await worker.expect(wire.AssignJob)
            await worker.link.send(wire.AssignJobResponse(job.job_id, job.assignment_id, False, "not now"))
            await nothing_open(server)
            await worker.expect(wire.JobOffer)  # it is offered again, and not assigned
            await worker.link.send(wire.CacheQuery("", rounds, (), wire.QueryMode.NORMAL))
            await worker.expect(wire.CacheStatus)
            assert await server.value("SELECT count(*) FROM dispatched_job WHERE kind = 1") == rounds


async def test_what_a_worker_says_of_a_job_after_its_end_is_dropped(
    server: ServerWorld, database_url: str
) -> None:
    """The end and what follows it wait in the queue together."""
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({}, [])
        await reached(server, evaluation, EvaluationStatus.EVALUATING_DERIVATION)
        session = next(iter(server.sessions._open.values()))

        async def queued(reports: int) -> None:
            with trio.fail_after(PATIENCE):
                while session._queue.statistics().current_buffer_used < reports:  # noqa: ASYNC110
                    await trio.sleep(0.01)

        async with row_locked(database_url, "evaluation"):
            await worker.report(job, wire.EvalResult, warnings=("this waits for the lock",))
            await writer_waits(server)
            await worker.report(job, wire.JobCompleted)
            await queued(1)  # control messages may overtake the end of a job on the way
            await worker.report(job, wire.EvalMessage, level=MessageLevel.ERROR, source="s", message="late")
            await queued(2)
        await reached(server, evaluation, EvaluationStatus.COMPLETED)
    assert await server.value("SELECT count(*) FROM evaluation_message WHERE message = 'late'") == 0


async def test_a_worker_lost_in_the_middle_of_a_claim_strands_nothing(
    server: ServerWorld, database_url: str
) -> None:
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        await worker.report(job, wire.JobCompleted)
        # Nothing but the claim is left for the writer to do.
        await reached(server, evaluation, EvaluationStatus.BUILDING)
        async with row_locked(database_url, "derivation_build"):
            await worker.link.send(wire.RequestJob(JobKind.BUILD))
            await writer_waits(server)
            await worker.link.close()
            await nobody_connected(server)
    # The claim was committed after all.
    await until(lambda: server.value("SELECT count(*) = 1 FROM dispatched_job WHERE kind = 1"))
    await nothing_open(server)
    async with server.worker(number=2) as worker:
        assert await worker.build() == "a"


async def test_an_evaluation_whose_worker_is_lost_waits_and_goes_to_the_next(server: ServerWorld) -> None:
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        await worker.evaluate({"a": []}, ["a"])
        await reached(server, evaluation, EvaluationStatus.EVALUATING_DERIVATION)
    await reached(server, evaluation, EvaluationStatus.WAITING)
    await nobody_connected(server)
    reason = '{"kind": "eval_workers", "capability": "fetch", "connected_workers": 0}'
    await until(lambda: server.value("SELECT waiting_reason = %s::jsonb FROM evaluation", reason))
    async with server.worker(number=2) as worker:
        job = await worker.evaluate({"a": []}, ["a"])
        await worker.report(job, wire.JobCompleted)
        await worker.build()
        await reached(server, evaluation, EvaluationStatus.COMPLETED)


async def test_a_job_whose_evaluation_ended_is_stopped(server: ServerWorld) -> None:
    """The abort came when nobody knew yet who held the job."""
    evaluation = await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({}, [])
        await reached(server, evaluation, EvaluationStatus.EVALUATING_DERIVATION)
        async with server.readers.connection() as connection:
            await connection.execute("UPDATE evaluation SET status = 7, finished_at = now()")
        await worker.report(job, wire.EvalResult, derivations=(derivation("a"),))
        assert (await worker.expect(wire.AbortJob)).job_id == job.job_id


# --- drain ----------------------------------------------------------------------------------------


async def test_a_drain_waits_for_the_jobs_and_hands_out_none(server: ServerWorld) -> None:
    await server.evaluation()
    async with server.worker() as worker:
        job = await worker.evaluate({"a": [], "b": ["a"]}, ["b"])
        build = await worker.take(JobKind.BUILD)
        async with trio.open_nursery() as nursery:
            server.scheduler.draining = True
            nursery.start_soon(server.sessions.drain)
            await worker.expect(wire.Draining)
            assert server.sessions.waiting_for() == "2 jobs on 1 workers"
            with pytest.raises(HandshakeRefused, match="stopping"):
                async with server.worker(number=2):
                    pass
            await worker.report(job, wire.JobFailed, error="stopping", kind=FailureKind.CANCELED)
            await server.commit(out("a"))
            await worker.link.send(wire.RequestJob(JobKind.BUILD))
            await worker.report(build, wire.JobCompleted)
            end = await closed(worker)
        assert (end.code, end.reason) == (1001, "the server stops")
    assert await server.build_status("a") is BuildStatus.COMPLETED
    assert await server.build_status("b") is BuildStatus.QUEUED
    assert await server.value("SELECT count(*) FROM dispatched_job") == 2


async def test_a_worker_lost_during_a_drain_ends_the_drain(server: ServerWorld) -> None:
    await server.evaluation()
    async with server.worker() as worker:
        await worker.take(JobKind.EVAL)
        server.scheduler.draining = True
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.sessions.drain)
                await worker.expect(wire.Draining)
                await worker.link.close()
    await nothing_open(server)


# --- handshake ------------------------------------------------------------------------------------


async def greeted(server: ServerWorld, tokens: list[wire.PeerToken]) -> tuple[str, ...]:
    """The peers a worker with these tokens is let in for."""
    ours, theirs = trio.testing.memory_stream_pair()

    async def serve() -> None:
        with suppress_wire_errors():
            async with accept(theirs) as link:
                await server.sessions.serve(link)

    server.nursery.start_soon(serve)
    async with connect_over(ours) as link:
        established = await introduce(link, str(UUID(int=9)), wire.Capabilities(), tokens)
    await nobody_connected(server)
    return established.authorized_peers


async def test_a_wrong_token_is_refused_in_words(server: ServerWorld) -> None:
    with pytest.raises(HandshakeRefused) as refusal:
        await greeted(server, [wire.PeerToken("*", "wrong" * 12)])
    assert refusal.value.code == 401
    assert refusal.value.reason == "no valid token: main: wrong token"
    with pytest.raises(HandshakeRefused, match="no token for it"):
        await greeted(server, [wire.PeerToken("other", TOKEN)])
    assert len(server.scheduler.pool) == 0


async def test_the_token_for_a_project_goes_before_the_one_for_all(server: ServerWorld) -> None:
    assert await greeted(server, [wire.PeerToken("*", "wrong"), wire.PeerToken("main", TOKEN)]) == ("main",)
    with pytest.raises(HandshakeRefused, match="wrong token"):
        await greeted(server, [wire.PeerToken("*", TOKEN), wire.PeerToken("main", "wrong")])


async def test_two_tokens_may_be_good_for_one_project(server: ServerWorld) -> None:
    """A second registration, such as one for a new token before the old one goes."""
    async with server.readers.connection() as connection:
        await connection.execute(
            "INSERT INTO worker_registration (project, token_hash, enable_eval, created_at)"
            " SELECT id, sha256('second'), false, now() FROM project"
        )
    assert await greeted(server, [wire.PeerToken("main", TOKEN)]) == ("main",)
    assert await greeted(server, [wire.PeerToken("main", "second")]) == ("main",)


async def test_a_capability_the_registration_lacks_is_not_given(server: ServerWorld) -> None:
    async with server.readers.connection() as connection:
        await connection.execute("UPDATE worker_registration SET enable_eval = false")
    await server.writer.submit(CreateEvaluation("main", Repository("git+https://example.org/x")))
    async with server.worker():
        reason = '{"kind": "eval_workers", "capability": "eval", "connected_workers": 1}'
        await until(lambda: server.value("SELECT waiting_reason = %s::jsonb FROM evaluation", reason))
