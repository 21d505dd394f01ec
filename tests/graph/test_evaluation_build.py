"""Abort and retry of one build: what each moves, every rule that refuses it, and what an abort holds."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gradient.graph.build_failures import BuildFailed
from gradient.graph.builds import BuildCompleted, BuildStarted
from gradient.graph.demote import DemotePath
from gradient.graph.evaluation_build import Aborted, BuildRefused, Refusal, Retried
from gradient.graph.evaluation_end import AbortEvaluation, FailEvaluation
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.heal import Repair
from gradient.graph.pg import Connection
from gradient.graph.record import Record
from gradient.graph.recounts import SettleSkipped
from gradient.graph.unconfirmed import AbandonUnconfirmed
from gradient.model import (
    ABORTABLE,
    USER_RETRYABLE,
    AttemptOutcome,
    BuildStatus,
    EntryPoint,
    EvaluationStatus,
    FailureKind,
    Repository,
)
from tests.graph.world import LIMITS, World, drv, hash_part, nar, out

CHAIN = {"top": ["mid"], "mid": ["bad", "good"], "bad": [], "good": []}
B = BuildStatus
E = EvaluationStatus
SOURCE = Repository("git+https://example.org/x")


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def pruned(world: World, *entries: str) -> int:
    """A running evaluation that has named nothing but entry points which the graph knows."""
    evaluation = await world.evaluation()
    await world.apply(Record(evaluation, (), tuple(EntryPoint(name, drv(name)) for name in entries)))
    return evaluation


async def passthrough(world: World, name: str) -> None:
    await world.connection.execute(
        "UPDATE derivation_build SET cache_available = true WHERE derivation = %s", (await world.id(name),)
    )


async def set_status(world: World, name: str, status: BuildStatus) -> None:
    await world.connection.execute(
        "UPDATE derivation_build SET status = %s WHERE derivation = %s", (int(status), await world.id(name))
    )


async def wanted(world: World, name: str) -> bool:
    query = "SELECT wanted FROM derivation_build WHERE derivation = %s"
    return bool(await world.value(query, await world.id(name)))


async def marks(world: World, name: str) -> list[int]:
    """The evaluations in which a person aborted it."""
    query = "SELECT coalesce(array_agg(evaluation ORDER BY evaluation), '{}') FROM build_job"
    found: list[int] = await world.value(f"{query} WHERE derivation = %s AND aborted", await world.id(name))
    return found


async def in_task(world: World) -> int:
    await world.connection.execute(
        "INSERT INTO task (project, name, repository, created_at) SELECT id, 't', 'u', now() FROM project"
    )
    return int(await world.value("SELECT id FROM task"))


def refused(refusal: Refusal) -> pytest.RaisesExc[BuildRefused]:
    return pytest.RaisesExc(BuildRefused, check=lambda error: error.refusal is refusal)


# --- abort ----------------------------------------------------------------------------------------


async def test_an_abort_stops_the_build_and_fails_what_wants_it(world: World) -> None:
    evaluation = await world.building({**CHAIN, "other": []}, "top", "other")
    await world.start("bad")
    answer = await world.abort_build("bad")
    assert answer == Aborted(evaluation, (await world.id("mid"), await world.id("top")))
    assert [abort.job_id for abort in world.moves.aborts] == [f"build:{await world.id('bad')}"]
    assert await marks(world, "bad") == [evaluation]
    assert await world.statuses() == {
        "bad": B.ABORTED,
        "mid": B.DEPENDENCY_FAILED,
        "top": B.DEPENDENCY_FAILED,
        "good": B.SKIPPED,  # only `mid` wanted it
        "other": B.QUEUED,
    }
    await world.check()
    await world.build("other")
    assert await world.evaluation_status(evaluation) is E.FAILED
    await world.confirm_abort("bad")
    assert await world.status("bad") is B.ABORTED
    await world.check()


async def test_what_a_person_stopped_is_no_failure_of_its_builder(world: World) -> None:
    """Or no evaluation of a task would ever try it again."""
    evaluation = await world.evaluation()
    await world.record(evaluation, CHAIN, entries=["top"])
    await world.start("bad")
    await world.abort_build("bad")
    await world.confirm_abort("bad")
    assert await world.value("SELECT outcome FROM build_attempt") == AttemptOutcome.ABORTED
    assert await world.value("SELECT reason FROM build_attempt") is None
    await world.end_stream(evaluation)
    later = await world.apply(CreateEvaluation("main", SOURCE, task=await in_task(world)))
    await world.start_evaluation(later)
    await world.record(later, CHAIN, entries=["top"])
    await world.end_stream(later)
    assert await world.status("bad") is B.QUEUED
    for name in ("bad", "good", "mid", "top"):
        await world.build(name)
    assert await world.evaluation_status(later) is E.COMPLETED
    await world.check()


async def test_an_abort_of_a_waiting_build_tells_no_worker(world: World) -> None:
    evaluation = await world.building(CHAIN, "top")
    await world.abort_build("mid", evaluation)
    assert world.moves.aborts == []
    assert await world.statuses() == {
        "top": B.DEPENDENCY_FAILED,
        "mid": B.ABORTED,
        "bad": B.SKIPPED,
        "good": B.SKIPPED,
    }
    assert await world.evaluation_status(evaluation) is E.FAILED
    await world.check()


async def test_an_aborted_entry_point_wants_nothing(world: World) -> None:
    await world.building({"a": ["b"], "b": [], "c": []}, "a", "c")
    await world.abort_build("a")
    assert not await wanted(world, "a")
    assert await world.status("b") is B.SKIPPED
    await world.check()


async def test_while_an_evaluation_is_still_evaluating(world: World) -> None:
    """What it records later and wants the aborted build fails at the end of its stream."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"bad": []}, entries=["bad"])
    await world.abort_build("bad")
    await world.record(evaluation, {"late": ["bad"], "user": ["late"]}, entries=["user"])
    assert await world.status("late") is B.CREATED
    await world.end_stream(evaluation)
    assert await world.statuses() == {
        "bad": B.ABORTED,
        "late": B.DEPENDENCY_FAILED,
        "user": B.DEPENDENCY_FAILED,
    }
    assert await world.evaluation_status(evaluation) is E.FAILED
    await world.check()


@pytest.mark.parametrize("status", sorted(set(BuildStatus) - ABORTABLE))
async def test_only_what_has_not_ended_is_aborted(world: World, status: BuildStatus) -> None:
    await world.building(CHAIN, "top")
    await set_status(world, "mid", status)
    with refused(Refusal.WRONG_STATUS):
        await world.abort_build("mid")
    assert await world.status("mid") is status


async def test_an_abort_needs_a_running_evaluation(world: World) -> None:
    first = await world.building(CHAIN, "top")
    second = await world.building(CHAIN, "top")
    await world.apply(AbortEvaluation(first, "by a person"))
    with refused(Refusal.EVALUATION_FINISHED):
        await world.abort_build("bad", first)
    await world.abort_build("bad", second)
    with refused(Refusal.NOT_NAMED):
        await world.abort_build("bad", second + 1)


async def test_what_another_live_evaluation_names_is_not_aborted(world: World) -> None:
    first = await world.building(CHAIN, "top")
    second = await world.building({"bad": []}, "bad")
    for evaluation in (first, second, None):
        with refused(Refusal.NEEDED_BY_OTHER_EVALUATION):
            await world.abort_build("bad", evaluation)
    await world.check()
    assert await world.status("bad") is B.QUEUED
    await world.apply(AbortEvaluation(second, "by a person"))
    await world.abort_build("bad", first)
    assert await world.status("bad") is B.ABORTED
    await world.check()


async def test_nor_what_stands_below_a_name_where_the_walk_stopped(world: World) -> None:
    """Nothing is left of a refused abort, though it is found out after the dependents."""
    first = await world.building(CHAIN, "top")
    await pruned(world, "top")
    before = await world.statuses()
    with refused(Refusal.NEEDED_BY_OTHER_EVALUATION):
        await world.abort_build("bad", first)
    assert (await world.statuses(), await marks(world, "bad")) == (before, [])


async def test_an_ended_evaluation_keeps_nobody_from_aborting_nor_does_it_bring_the_build_back(
    world: World,
) -> None:
    """A Failed evaluation still wants its closure, and what is not in the other's closure does not fail."""
    first = await world.building({"top": ["x"], "x": ["y"], "y": []}, "top")
    await world.apply(FailEvaluation(first, "test", "over"))
    second = await world.building({"x": ["y"], "y": []}, "x")
    await world.abort_build("x")
    assert await marks(world, "x") == [second]
    assert (await world.status("x"), await wanted(world, "x")) == (B.ABORTED, True)
    assert (await world.status("top"), await world.status("y")) == (B.CREATED, B.SKIPPED)
    assert await world.evaluation_status(second) is E.FAILED
    assert await world.apply(SettleSkipped((await world.id("x"),))) == 0  # nor does the consistency check
    await world.check()
    # But whoever asks for it anew gets it.
    third = await world.building({"x": ["y"], "y": []}, "x")
    await world.check()
    for name in ("y", "x", "top"):
        await world.build(name)
    assert await world.evaluation_status(third) is E.COMPLETED
    await world.check()


async def test_what_adopts_an_aborted_build_gets_it(world: World) -> None:
    first = await world.building(CHAIN, "top")
    await world.abort_build("bad")
    assert await world.evaluation_status(first) is E.FAILED
    second = await pruned(world, "top")
    await world.end_stream(second)
    await world.check()
    assert await world.statuses() == {"top": B.CREATED, "mid": B.CREATED, "bad": B.QUEUED, "good": B.QUEUED}


async def test_a_runtime_dependency_that_was_aborted_stays_so_though_it_is_wanted(world: World) -> None:
    """What is built already cannot fail, and wants what it refers to: that alone is no new wish."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"lib": []})
    await world.commit(nar(out("app"), [out("lib")]))
    await world.record(evaluation, {"app": [], "user": ["app"], "x": []}, entries=["user", "x"])
    await world.end_stream(evaluation)
    await world.abort_build("lib")
    assert await world.statuses() == {
        "lib": B.ABORTED,
        "app": B.COMPLETED,
        # It waits for a closure that will not come.
        "user": B.DEPENDENCY_FAILED,
        "x": B.QUEUED,
    }
    await world.check()
    await world.apply(Repair(evaluation))
    assert await world.status("lib") is B.ABORTED
    await world.build("x")
    assert await world.evaluation_status(evaluation) is E.FAILED
    await world.check()


async def test_who_names_an_aborted_build_that_is_wanted_gets_it_with_its_inputs(world: World) -> None:
    """`app` is built, and refers to `lib`: nothing but the name is new."""
    first = await world.evaluation()
    await world.record(first, {"lib": ["low"], "low": []})
    await world.commit(nar(out("app"), [out("lib")]))
    await world.record(first, {"app": []}, entries=["app"])
    await world.end_stream(first)
    await world.abort_build("lib")
    assert await world.statuses() == {"app": B.COMPLETED, "lib": B.ABORTED, "low": B.SKIPPED}
    second = await world.evaluation()
    await world.record(second, {"user": ["lib"]})
    await world.check()
    assert (await world.status("lib"), await world.status("low")) == (B.CREATED, B.QUEUED)


async def test_an_abort_never_goes_through_a_passthrough(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(
        evaluation, {"top": ["pass"], "pass": ["bad"], "bad": [], "user": ["bad"]}, ["top", "user"]
    )
    await passthrough(world, "pass")
    await world.abort_build("bad")
    assert await world.status("user") is B.DEPENDENCY_FAILED
    assert await world.status("pass") is not B.DEPENDENCY_FAILED
    assert await world.status("top") is B.CREATED


async def test_an_aborted_passthrough_fails_what_wants_it(world: World) -> None:
    evaluation = await world.building(CHAIN, "top")
    await passthrough(world, "bad")
    await world.abort_build("bad")
    assert await world.status("mid") is await world.status("top") is B.DEPENDENCY_FAILED
    assert await world.evaluation_status(evaluation) is E.FAILED


async def test_what_somebody_else_has_built_counts_as_aborted_no_more(world: World) -> None:
    """The one it was aborted for is healed beside the one that asks for it anew."""
    first = await world.building({**CHAIN, "x": []}, "top", "x")
    await world.abort_build("bad")
    await world.building(CHAIN, "top")
    before = await world.statuses()
    assert {name: before[name] for name in CHAIN} == {
        "top": B.CREATED,
        "mid": B.CREATED,
        "bad": B.QUEUED,
        "good": B.QUEUED,
    }
    await world.apply(Repair(first))
    assert await world.statuses() == before
    await world.check()


async def test_a_success_that_comes_too_late_is_used_by_the_retry(world: World) -> None:
    evaluation = await world.building(CHAIN, "top")
    await world.start("bad")
    await world.abort_build("bad")
    await world.commit(nar(out("bad")))
    await world.apply(BuildCompleted(world.open.pop("bad"), LIMITS))
    assert await world.status("bad") is B.ABORTED
    await world.check()
    await world.retry_build("bad")
    await world.check()
    assert await world.status("bad") is B.SUBSTITUTED
    for name in ("good", "mid", "top"):
        await world.build(name)
    assert await world.evaluation_status(evaluation) is E.COMPLETED


async def test_a_claim_that_has_not_begun_is_stopped_at_its_report(world: World) -> None:
    await world.building(CHAIN, "top")
    await world.claim("bad")
    await world.abort_build("bad")
    assert [abort.job_id for abort in world.moves.aborts] == [f"build:{await world.id('bad')}"]
    assert not await world.apply(BuildStarted(world.open["bad"]))
    await world.check()


# --- retry ----------------------------------------------------------------------------------------


async def failed(world: World, kind: FailureKind = FailureKind.PERMANENT) -> int:
    """An evaluation of CHAIN that failed through `bad`."""
    evaluation = await world.building(CHAIN, "top")
    await world.fail("bad", kind)
    assert await world.evaluation_status(evaluation) is E.FAILED
    return evaluation


@pytest.mark.parametrize("kind", [FailureKind.PERMANENT, FailureKind.TIMEOUT])
@pytest.mark.parametrize("asked", ["bad", "mid", "top"])
async def test_a_retry_reopens_the_evaluation_and_it_ends_again(
    world: World, kind: FailureKind, asked: str
) -> None:
    """Asked of what failed through it, it retries the failure below."""
    evaluation = await failed(world, kind)
    answer = await world.retry_build(asked)
    everything = tuple([await world.id(name) for name in ("bad", "mid", "top")])
    assert answer == Retried(evaluation, True, tuple(sorted(everything)))
    assert world.moves.evaluations == {evaluation: E.BUILDING}
    assert await world.statuses() == {
        "bad": B.QUEUED,
        "good": B.QUEUED,
        "mid": B.CREATED,
        "top": B.CREATED,
    }
    assert await world.value("SELECT finished_at IS NULL FROM evaluation")
    assert await world.value("SELECT sum(attempt) FROM derivation_build") == 0
    await world.check()
    for name in ("bad", "good", "mid", "top"):
        await world.build(name)
    assert await world.evaluation_status(evaluation) is E.COMPLETED
    await world.check()


async def test_a_retry_that_fails_ends_it_once_more(world: World) -> None:
    evaluation = await failed(world)
    for _ in range(2):
        await world.retry_build("bad")
        await world.fail("bad")
        assert await world.evaluation_status(evaluation) is E.FAILED
        await world.check()


async def test_the_counters_of_a_reopened_evaluation_are_of_now(world: World) -> None:
    """While it was over, another one built what had failed in it."""
    evaluation = await world.building({"one": [], "two": []}, "one", "two")
    await world.fail("one")
    await world.fail("two")
    await world.building({"one": []}, "one")
    await world.build("one")
    await world.retry_build("two", evaluation)
    await world.check()
    await world.build("two")
    assert await world.evaluation_status(evaluation) is E.COMPLETED


async def test_a_retry_while_the_evaluation_still_runs(world: World) -> None:
    evaluation = await world.building({**CHAIN, "x": []}, "top", "x")
    await world.fail("bad")
    assert await world.retry_build("bad") == Retried(
        evaluation, False, tuple(sorted([await world.id(name) for name in ("bad", "mid", "top")]))
    )
    assert await world.status("good") is B.QUEUED
    await world.check()


async def test_what_another_failure_stands_below_fails_again(world: World) -> None:
    graph = {"top": ["one", "two"], "one": ["bad"], "two": ["worse"], "bad": [], "worse": []}
    evaluation = await world.building(graph, "top", "one")
    await world.start("bad")
    await world.fail("worse")
    await world.apply(BuildFailed(world.open.pop("bad"), FailureKind.PERMANENT, "it broke", LIMITS))
    assert await world.status("one") is B.DEPENDENCY_FAILED
    await world.retry_build("bad")
    await world.check()
    assert await world.statuses() == {
        "top": B.DEPENDENCY_FAILED,
        "one": B.CREATED,
        "bad": B.QUEUED,
        "two": B.DEPENDENCY_FAILED,
        "worse": B.FAILED_PERMANENT,
    }
    assert await world.evaluation_status(evaluation) is E.BUILDING
    # Asked of the top, the other one is retried too.
    assert len((await world.retry_build("top")).builds) == 3
    await world.check()
    for name in ("bad", "worse", "one", "two", "top"):
        await world.build(name)
    assert await world.evaluation_status(evaluation) is E.COMPLETED


async def test_a_retry_looks_below_through_dependency_failures_only(world: World) -> None:
    """`bad` failed by itself: what has failed below it since is no cause of that."""
    await world.building({**CHAIN, "bad": ["older"], "older": []}, "top")
    await world.build("older")
    await world.fail("bad")
    # Its input is lost, and cannot be made a second time.
    await world.apply(DemotePath((hash_part("older"),), world.now + timedelta(days=1)))
    await world.record(await world.evaluation(), {"older": []}, entries=["older"])
    await world.fail("older")
    answer = await world.retry_build("top", 1)
    thawed = {await world.id(name) for name in ("bad", "mid", "top")}
    assert set(answer.builds) == thawed
    assert await world.status("older") is B.FAILED_PERMANENT
    await world.check()


async def test_a_retry_waits_until_the_worker_has_stopped(world: World) -> None:
    evaluation = await world.building(CHAIN, "top")
    await world.start("bad")
    await world.abort_build("bad")
    for asked in ("bad", "top"):
        with refused(Refusal.WORKER_STILL_STOPPING):
            await world.retry_build(asked)
    await world.confirm_abort("bad")
    assert (await world.retry_build("top")).evaluation == evaluation
    assert await marks(world, "bad") == []
    await world.check()
    for name in ("bad", "good", "mid", "top"):
        await world.build(name)
    assert await world.evaluation_status(evaluation) is E.COMPLETED


async def test_or_until_nobody_waits_for_the_worker_any_more(world: World) -> None:
    await world.building(CHAIN, "top")
    await world.start("bad")
    await world.abort_build("bad")
    world.now += timedelta(minutes=4)
    assert await world.apply(AbandonUnconfirmed()) == 0
    world.now += timedelta(minutes=1)
    assert await world.apply(AbandonUnconfirmed()) == 1
    assert world.moves.dropped == {world.open["bad"]}
    outcomes = "SELECT array_agg(ARRAY[outcome, coalesce(reason, -1)]) FROM build_attempt"
    assert await world.value(outcomes) == [[4, -1]]
    await world.retry_build("bad")
    await world.confirm_abort("bad")  # too late: its assignment is closed
    await world.check()
    assert await world.status("bad") is B.QUEUED


async def test_what_was_wanted_again_goes_to_others_then(world: World) -> None:
    first = await world.building(CHAIN, "top")
    await world.start("bad")
    await world.apply(AbortEvaluation(first, "by a person"))
    await world.building(CHAIN, "top")
    assert await world.status("bad") is B.QUEUED
    assert await world.claim("bad") is None
    world.now += timedelta(minutes=5)
    assert await world.apply(AbandonUnconfirmed()) == 1
    assert world.moves.returned == {f"build:{await world.id('bad')}"}
    await world.build("bad")
    await world.check()


@pytest.mark.parametrize("status", sorted(set(BuildStatus) - USER_RETRYABLE))
async def test_only_what_failed_is_retried(world: World, status: BuildStatus) -> None:
    await world.building(CHAIN, "top")
    await set_status(world, "mid", status)
    with refused(Refusal.WRONG_STATUS):
        await world.retry_build("mid")
    assert await world.status("mid") is status


async def test_a_dependency_failure_without_a_failure_below_it_is_not_retried(world: World) -> None:
    await failed(world)
    other = await world.building({"bad": []}, "bad")
    await world.build("bad")
    assert await world.evaluation_status(other) is E.COMPLETED
    with refused(Refusal.NO_FAILED_DEPENDENCY):
        await world.retry_build("top")


async def test_an_aborted_evaluation_goes_on_with_everything_it_wants(world: World) -> None:
    evaluation = await world.building({**CHAIN, "x": ["good"]}, "top", "x")
    await world.start("bad")
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    await world.confirm_abort("bad")
    assert set((await world.statuses()).values()) == {B.ABORTED}
    assert (await world.retry_build("bad")).reopened
    await world.check()
    for name in ("bad", "good", "mid", "top", "x"):
        await world.build(name)
    assert await world.evaluation_status(evaluation) is E.COMPLETED
    await world.check()


async def test_what_a_reopened_evaluation_has_no_use_for_is_no_failure_of_it(world: World) -> None:
    """`tool` was aborted with the evaluation, and only what the cache holds by now needed it."""
    evaluation = await world.building({"held": ["tool"], "tool": [], "x": []}, "held", "x")
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    await world.commit(nar(out("held")))
    await world.retry_build("held")
    await world.check()
    assert await world.statuses() == {"held": B.SUBSTITUTED, "tool": B.SKIPPED, "x": B.QUEUED}
    await world.build("x")
    assert await world.evaluation_status(evaluation) is E.COMPLETED


async def test_what_was_aborted_itself_stays_so_when_another_build_is_retried(world: World) -> None:
    evaluation = await world.building({"a": ["x"], "x": [], "b": []}, "a", "b")
    await world.abort_build("x")
    await world.fail("b")
    assert await world.evaluation_status(evaluation) is E.FAILED
    await world.retry_build("b")
    await world.check()
    assert await world.statuses() == {"a": B.DEPENDENCY_FAILED, "x": B.ABORTED, "b": B.QUEUED}
    await world.build("b")
    assert await world.evaluation_status(evaluation) is E.FAILED


async def test_an_evaluation_that_was_reopened_gets_what_was_aborted_elsewhere(world: World) -> None:
    first = await world.building({"top": ["x"], "x": [], "b": []}, "top", "b")
    await world.fail("b")
    await world.apply(FailEvaluation(first, "test", "over"))
    await world.building({"x": []}, "x")
    await world.abort_build("x")
    await world.retry_build("b", first)
    await world.check()
    assert (await world.status("x"), await world.status("top")) == (B.QUEUED, B.CREATED)


async def test_a_completed_evaluation_is_not_reopened(world: World) -> None:
    first = await world.building({"a": []}, "a")
    await world.build("a")
    assert await world.evaluation_status(first) is E.COMPLETED
    await set_status(world, "a", B.FAILED_PERMANENT)
    with refused(Refusal.EVALUATION_FINISHED):
        await world.retry_build("a")


async def test_nor_one_that_never_came_to_its_builds(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, CHAIN, entries=["top"])
    await world.fail("bad")
    await world.apply(FailEvaluation(evaluation, "test", "over"))
    with refused(Refusal.EVALUATION_FINISHED):
        await world.retry_build("bad")


@pytest.mark.parametrize("newer_has_ended", [False, True])
async def test_a_newer_evaluation_of_its_task_keeps_it_closed(world: World, newer_has_ended: bool) -> None:
    task = await in_task(world)
    first = await world.apply(CreateEvaluation("main", SOURCE, task=task))
    await world.start_evaluation(first)
    await world.record(first, CHAIN, entries=["top"])
    await world.end_stream(first)
    await world.fail("bad")
    newer = await world.apply(CreateEvaluation("main", SOURCE, task=task))
    if newer_has_ended:
        await world.apply(AbortEvaluation(newer, "by a person"))
    with refused(Refusal.NEWER_EVALUATION):
        await world.retry_build("bad", first)
    assert await world.evaluation_status(first) is E.FAILED


async def test_an_older_one_that_still_runs_keeps_it_closed_too(world: World) -> None:
    task = await in_task(world)
    older = await world.apply(CreateEvaluation("main", SOURCE, task=task))
    await world.connection.execute("UPDATE evaluation SET concurrent = true")
    newer = await world.apply(CreateEvaluation("main", SOURCE, task=task))
    await world.start_evaluation(newer)
    await world.record(newer, CHAIN, entries=["top"])
    await world.end_stream(newer)
    await world.fail("bad")
    with refused(Refusal.NEWER_EVALUATION):
        await world.retry_build("bad")
    await world.apply(AbortEvaluation(older, "by a person"))
    assert (await world.retry_build("bad")).reopened


async def test_both_are_told_on_the_evaluation(world: World) -> None:
    evaluation = await world.building(CHAIN, "top")
    await world.abort_build("bad")
    await world.retry_build("top")
    query = "SELECT array_agg(message ORDER BY id) FROM evaluation_message WHERE evaluation = %s"
    assert await world.value(query, evaluation) == [
        "bad was aborted by a person",
        "top was tried again by a person",
    ]
