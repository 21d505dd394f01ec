"""A worker's session, with the clock in hand: slots, aborts, the stop window, offers, questions."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from gradient.model import BuildStage, FailureKind, JobKind
from gradient.settings.tables import WorkerLog
from gradient.wire import messages as wire
from gradient.worker.build_log import CHUNK_AGE, CHUNK_SIZE, BuildLog
from gradient.worker.errors import JobFault
from gradient.worker.job import Job
from gradient.worker.queries import ANSWER_LIMIT, Queries
from tests.patience import PATIENCE
from tests.simulation.worker_world import BASE_URL, World, build, evaluation, session_world

A, B, C = (f"/nix/store/{letter * 32}-{letter}" for letter in "abc")


async def pass_time(clock: trio.testing.MockClock, seconds: float) -> None:
    """Let `seconds` pass, and everything that is due then happen."""
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(seconds)
    await trio.testing.wait_all_tasks_blocked()


# --- slots ----------------------------------------------------------------------------------------


async def test_a_job_is_accepted_done_and_the_next_one_asked_for() -> None:
    async with session_world() as world:
        await world.assign(build(7, assignment=3))
        world.work.released["build:7"].set()
        done = await world.take(wire.JobCompleted)
        assert (done.job_id, done.assignment_id) == ("build:7", 3)
        assert (await world.take(wire.RequestJob)).kind is JobKind.BUILD
        await world.silent()


async def test_a_full_worker_declines() -> None:
    async with session_world() as world:
        await world.assign(build(1))
        await world.assign(build(2))
        await world.link.send(build(3, assignment=9))
        response = await world.take(wire.AssignJobResponse)
        assert response == wire.AssignJobResponse("build:3", 9, False, "at capacity")
        await world.assign(evaluation(1))
        assert world.work.running == {"build:1", "build:2", "eval:1"}


async def test_a_build_that_uploads_leaves_its_slot_to_the_next() -> None:
    async def uploads(job: Job) -> None:
        await job.enter(BuildStage.UPLOAD)
        await trio.sleep_forever()

    async with session_world() as world:
        for number in range(1, 7):
            world.work.scripts[f"build:{number}"] = uploads
            await world.link.send(build(number))
            await world.take(wire.AssignJobResponse)
            assert (await world.take(wire.Stage)).stage is BuildStage.UPLOAD
            assert (await world.take(wire.RequestJob)).kind is JobKind.BUILD
        await world.assign(build(7))
        await world.assign(build(8))
        await world.link.send(build(9))
        assert (await world.take(wire.AssignJobResponse)).reason == "at capacity"


async def test_a_job_sent_again_goes_on_under_the_new_assignment() -> None:
    async with session_world() as world:
        await world.assign(build(1, assignment=5))
        await world.link.send(build(1, assignment=6))
        assert await world.take(wire.AssignJobResponse) == wire.AssignJobResponse("build:1", 6, True)
        assert world.work.running == {"build:1"}
        world.work.released["build:1"].set()
        assert (await world.take(wire.JobCompleted)).assignment_id == 6


async def test_an_assignment_without_a_job_is_declined() -> None:
    async with session_world() as world:
        await world.link.send(wire.AssignJob("build:1", 1))
        assert not (await world.take(wire.AssignJobResponse)).accepted


async def test_a_failure_says_its_kind_and_a_bug_is_permanent() -> None:
    async def gone(job: Job) -> None:
        raise ExceptionGroup("g", [JobFault(FailureKind.INPUTS_UNAVAILABLE, "gone", (A,))])

    async def broken(job: Job) -> None:
        raise KeyError("a mistake")

    async with session_world() as world:
        world.work.scripts |= {"build:1": gone, "build:2": broken}
        await world.link.send(build(1))
        await world.take(wire.AssignJobResponse)
        failed = await world.take(wire.JobFailed)
        assert (failed.kind, failed.error, failed.missing_paths) == (
            FailureKind.INPUTS_UNAVAILABLE,
            "gone",
            (A,),
        )
        await world.take(wire.RequestJob)
        await world.link.send(build(2))
        await world.take(wire.AssignJobResponse)
        assert (await world.take(wire.JobFailed)).kind is FailureKind.PERMANENT
        await world.take(wire.RequestJob)
        assert not world.ended.is_set()


# --- aborts ---------------------------------------------------------------------------------------


async def test_an_abort_ends_the_job_and_is_reported() -> None:
    async with session_world() as world:
        await world.assign(build(1))
        await world.link.send(wire.AbortJob("build:1", "nobody wants it"))
        failed = await world.take(wire.JobFailed)
        assert (failed.kind, failed.error) == (FailureKind.ABORTED, "aborted by server: nobody wants it")
        assert world.work.running == set()
        assert (await world.take(wire.RequestJob)).kind is JobKind.BUILD
        await world.link.send(wire.AbortJob("build:1", "again"))
        await world.silent()


async def test_an_abort_right_behind_its_assignment_counts() -> None:
    async with session_world() as world:
        await world.link.send(build(1))
        await world.link.send(wire.AbortJob("build:1", "late"))
        await world.take(wire.AssignJobResponse)
        assert (await world.take(wire.JobFailed)).kind is FailureKind.ABORTED


async def test_what_an_abort_breaks_is_no_failure_of_its_own() -> None:
    async def breaks(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("the pipe broke when the build was ended")

    async with session_world() as world:
        world.work.scripts["build:1"] = breaks
        await world.assign(build(1))
        await world.link.send(wire.AbortJob("build:1", "enough"))
        assert (await world.take(wire.JobFailed)).kind is FailureKind.ABORTED


# --- stop -----------------------------------------------------------------------------------------


async def test_a_stop_says_so_first_and_reports_every_job_as_canceled() -> None:
    async def fails(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise JobFault(FailureKind.PERMANENT, "the builder was killed")

    async with session_world() as world, trio.open_nursery() as nursery:
        world.work.scripts["build:2"] = fails
        await world.assign(build(1))
        await world.assign(build(2))
        nursery.start_soon(world.session.stop)
        await world.take(wire.Draining)
        kinds = {(f.job_id, f.kind) for f in [await world.take(wire.JobFailed) for _ in range(2)]}
        assert kinds == {("build:1", FailureKind.CANCELED), ("build:2", FailureKind.CANCELED)}
        await world.link.send(build(3))
        declined = await world.take(wire.AssignJobResponse)
        assert (declined.accepted, declined.reason) == (False, "worker draining")
        await world.silent()


async def test_a_job_that_does_not_end_holds_a_stop_for_five_seconds_exactly(
    mock_clock: trio.testing.MockClock,
) -> None:
    async def stubborn(job: Job) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(60)

    async with session_world() as world:
        world.work.scripts["build:1"] = stubborn
        await world.assign(build(1))
        await world.assign(build(2))
        took: list[float] = []
        late: list[str] = []

        async def stop() -> None:
            began = trio.current_time()
            late.extend(await world.session.stop())
            took.append(trio.current_time() - began)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            await pass_time(mock_clock, 4.999)
            assert took == []
            await pass_time(mock_clock, 0.001)
            assert took == [pytest.approx(5.0)]
            assert late == ["build:1"]
            await world.take(wire.Draining)
            assert (await world.take(wire.JobFailed)).job_id == "build:2"
            await pass_time(mock_clock, 60)


async def test_a_lost_link_ends_every_job() -> None:
    async with session_world() as world:
        await world.assign(build(1))
        await world.assign(evaluation(1))
        await world.link.close()
        with trio.fail_after(PATIENCE):
            await world.ended.wait()
        assert world.work.running == set()


async def test_a_server_that_drains_leaves_the_jobs_alone() -> None:
    async with session_world() as world:
        await world.assign(build(1))
        await world.link.send(wire.Draining())
        await trio.testing.wait_all_tasks_blocked()
        assert world.session.server_drains
        assert world.work.running == {"build:1"}


# --- offers and heartbeat -------------------------------------------------------------------------


async def test_an_offer_is_scored_with_one_question() -> None:
    async with session_world() as world:
        world.store.valid = {A}
        first = wire.Candidate("build:1", (wire.RequiredPath(A), wire.RequiredPath(B)))
        second = wire.Candidate("build:2", (wire.RequiredPath(B, 10),), (A,))
        await world.link.send(wire.JobOffer((first, second)))
        chunk = await world.take(wire.RequestJobChunk)
        assert chunk.scores == (
            wire.CandidateScore("build:1", 1, 0, False),
            wire.CandidateScore("build:2", 1, 10, True),
        )
        assert world.store.asked == [[A, B]]
        await world.silent()  # the server knows that we are hungry


async def test_an_empty_list_is_answered() -> None:
    async with session_world() as world:
        await world.link.send(wire.JobListChunk((), True))
        assert await world.take(wire.RequestJobChunk) == wire.RequestJobChunk((), True)
        assert world.store.asked == []


async def test_a_long_offer_is_answered_in_pages() -> None:
    async with session_world() as world:
        await world.link.send(wire.JobOffer(tuple(wire.Candidate(f"build:{n}") for n in range(1500))))
        first, second = [await world.take(wire.RequestJobChunk) for _ in range(2)]
        assert (len(first.scores), first.is_final) == (1000, False)
        assert (len(second.scores), second.is_final) == (500, True)


async def test_the_heartbeat_asks_again_for_what_has_room(mock_clock: trio.testing.MockClock) -> None:
    async with session_world() as world:
        await world.assign(evaluation(1))
        await pass_time(mock_clock, 10)
        await world.take(wire.WorkerMetrics)
        assert (await world.take(wire.RequestJob)).kind is JobKind.BUILD
        await world.silent()


# --- questions ------------------------------------------------------------------------------------


async def cached(world: World, paths: list[str], mode: wire.QueryMode) -> list[object]:
    """Ask in the background; the list gets the answer, or what was raised."""
    found: list[object] = []

    async def ask(job: Job) -> None:
        try:
            found.append(await job.queries.cache(job.job_id, paths, mode))
        except JobFault as error:
            found.append(error)

    world.work.scripts["build:1"] = ask
    await world.link.send(build(1))
    await world.take(wire.AssignJobResponse)
    return found


async def test_an_unknown_state_is_asked_again_and_never_read_as_missing(
    mock_clock: trio.testing.MockClock,
) -> None:
    async with session_world() as world:
        found = await cached(world, [A, B], wire.QueryMode.PUSH)
        query = await world.take(wire.CacheQuery)
        await world.link.send(wire.CacheError(query.query_id, "the database is away"))
        await pass_time(mock_clock, 0.5)
        again = await world.take(wire.CacheQuery)
        assert (again.paths, again.query_id != query.query_id) == ((A, B), True)
        grant = wire.UploadGrant("/api/v1/uploads", "token", 10**12)
        infos = (wire.CachedPathInfo(A, True), wire.CachedPathInfo(B, False))
        await world.link.send(wire.CacheStatus(again.query_id, infos, grant))
        await world.take(wire.JobCompleted)
        (answer,) = found
        assert (answer.holds(A), answer.holds(B), answer.holds(C)) == (True, False, False)
        assert answer.grant.url == f"{BASE_URL}/api/v1/uploads"


async def test_a_state_that_stays_unknown_is_an_outage(mock_clock: trio.testing.MockClock) -> None:
    async with session_world() as world:
        found = await cached(world, [A], wire.QueryMode.PULL)
        for pause in (0.5, 1.0, 2.0, 0.0):
            query = await world.take(wire.CacheQuery)
            await world.link.send(wire.CacheError(query.query_id, "away"))
            await pass_time(mock_clock, pause)
        await world.take(wire.JobCompleted)
        (error,) = found
        assert isinstance(error, JobFault)
        assert error.kind is FailureKind.TRANSIENT


async def test_many_paths_are_asked_in_pages_four_at_a_time() -> None:
    async with session_world() as world:
        paths = [f"/nix/store/{n:032d}-p" for n in range(5500)]
        found = await cached(world, paths, wire.QueryMode.NORMAL)
        queries = [await world.take(wire.CacheQuery) for _ in range(4)]
        await world.silent()
        for query in queries:
            held = wire.CachedPathInfo(query.paths[0], True)
            await world.link.send(wire.CacheStatus(query.query_id, (held,)))
        queries += [await world.take(wire.CacheQuery) for _ in range(2)]
        for query in queries[4:]:
            await world.link.send(wire.CacheStatus(query.query_id, ()))
        assert sorted(len(query.paths) for query in queries) == [500] + [1000] * 5
        await world.take(wire.JobCompleted)
        assert sum(found[0].holds(path) for path in paths) == 4


async def test_known_derivations_that_are_not_told_are_none(mock_clock: trio.testing.MockClock) -> None:
    found: list[frozenset[str]] = []

    async def ask(job: Job) -> None:
        found.append(await job.queries.known(job.job_id, [A]))
        found.append(await job.queries.known(job.job_id, [A, B]))

    async with session_world() as world:
        world.work.scripts["eval:1"] = ask
        await world.link.send(evaluation(1))
        await world.take(wire.AssignJobResponse)
        await world.take(wire.QueryKnownDerivations)
        await pass_time(mock_clock, ANSWER_LIMIT)
        query = await world.take(wire.QueryKnownDerivations)
        await world.link.send(wire.KnownDerivations(query.query_id - 1, (A, B)))  # too late for the first
        await world.link.send(wire.KnownDerivations(query.query_id, (B,)))
        await world.take(wire.RequestJob)  # of the heartbeat
        await world.take(wire.JobCompleted)
        assert found == [frozenset(), frozenset({B})]


async def test_a_grant_is_used_while_it_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(message: object) -> None:
        assert isinstance(message, wire.CacheQuery)
        grant = wire.UploadGrant("http://elsewhere/up", "token", expires=1000)
        queries.answered(wire.CacheStatus(message.query_id, (), grant))

    queries = Queries(send, BASE_URL)
    assert queries.usable_grant() is None
    await queries.cache("build:1", [A], wire.QueryMode.PUSH)
    monkeypatch.setattr("time.time", lambda: 600.0)
    assert queries.usable_grant() == wire.UploadGrant("http://elsewhere/up", "token", 1000)
    monkeypatch.setattr("time.time", lambda: 700.0)
    assert queries.usable_grant() is None


# --- the live log ---------------------------------------------------------------------------------


async def test_lines_are_joined_and_sent_a_moment_later(mock_clock: trio.testing.MockClock) -> None:
    sent: list[bytes] = []
    async with trio.open_nursery() as nursery:
        log = make_log(sent)
        nursery.start_soon(log.run)
        await log.add("one")
        await log.add("two")
        await pass_time(mock_clock, CHUNK_AGE / 2)
        assert sent == []
        await pass_time(mock_clock, CHUNK_AGE / 2)
        assert sent == [b"one\ntwo\n"]
        await pass_time(mock_clock, 10)
        assert sent == [b"one\ntwo\n"]
        await log.add("three")
        await log.flush()
        assert sent[1:] == [b"three\n"]
        nursery.cancel_scope.cancel()


async def test_much_log_is_sent_at_once_in_chunks() -> None:
    sent: list[bytes] = []
    log = make_log(sent)
    await log.add("x" * (2 * CHUNK_SIZE))
    assert [len(chunk) for chunk in sent] == [CHUNK_SIZE, CHUNK_SIZE, 1]


async def test_a_log_over_its_budget_ends_with_a_notice(mock_clock: trio.testing.MockClock) -> None:
    sent: list[bytes] = []
    log = make_log(sent, WorkerLog(burst_bytes_per_min=10, sustained_bytes_per_hour=1000))
    await log.add("12345")
    await log.add("6789")
    mock_clock.jump(3600)
    await log.add("more")
    await log.flush()
    assert b"".join(sent) == b"12345\n(log cut off: more than 10 bytes in a minute)\n"


def make_log(sent: list[bytes], settings: WorkerLog | None = None) -> BuildLog:
    async def send(message: object) -> None:
        await trio.lowlevel.checkpoint()
        assert isinstance(message, wire.LogChunk)
        sent.append(message.data)

    job = Job("build:1", 1, JobKind.BUILD, send, Queries(send, BASE_URL))
    return BuildLog(job, settings or WorkerLog())


async def test_a_cancelled_flush_loses_nothing() -> None:
    sent: list[bytes] = []
    blocked = trio.Event()

    async def send(message: object) -> None:
        assert isinstance(message, wire.LogChunk)
        await blocked.wait()
        sent.append(message.data)

    log = BuildLog(Job("build:1", 1, JobKind.BUILD, send, Queries(send, BASE_URL)), WorkerLog())
    await log.add("line")
    with trio.CancelScope() as scope:
        scope.cancel()
        await log.flush()
    await log.add("another")
    blocked.set()
    await log.flush()
    assert b"".join(sent) == b"line\nanother\n"
