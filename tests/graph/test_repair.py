"""The repair pass, at the end of a stream and for a stuck graph: failures tried again, outputs that came
without a build, what fails with a dependency, names of pruned subtrees."""

from __future__ import annotations

from typing import Any

import pytest

from gradient.graph import repair
from gradient.graph.build_failures import BuildFailed
from gradient.graph.demote import DemoteMissingNar
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.heal import Repair
from gradient.graph.pg import Connection
from gradient.graph.record import Record
from gradient.graph.repair import RepairScope
from gradient.graph.requeue import RetryTransient
from gradient.graph.transaction import Rejected
from gradient.model import BuildStatus, EntryPoint, EvaluationStatus, FailureKind, Repository
from tests.graph.world import LIMITS, World, drv, hash_part, nar, out

CHAIN = {"top": ["mid"], "mid": ["bad", "good"], "bad": [], "good": []}


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def failed_chain(world: World, kind: FailureKind = FailureKind.PERMANENT) -> int:
    """An evaluation of CHAIN that failed through `bad`."""
    evaluation = await world.evaluation()
    await world.record(evaluation, CHAIN, entries=["top"])
    await world.end_stream(evaluation)
    await world.fail("bad", kind)
    assert await world.evaluation_status(evaluation) is EvaluationStatus.FAILED
    return evaluation


@pytest.mark.parametrize("kind", [FailureKind.PERMANENT, FailureKind.TIMEOUT])
async def test_a_person_who_asks_again_tries_what_failed_again(world: World, kind: FailureKind) -> None:
    await failed_chain(world, kind)
    again = await world.evaluation()
    await world.record(again, CHAIN, entries=["top"])
    await world.end_stream(again)
    await world.check()
    assert await world.statuses() == {
        "bad": BuildStatus.QUEUED,
        "good": BuildStatus.QUEUED,
        "mid": BuildStatus.CREATED,
        "top": BuildStatus.CREATED,
    }
    assert await world.value("SELECT sum(attempt) FROM derivation_build") == 0
    for name in ("bad", "good", "mid", "top"):
        await world.build(name)
    assert await world.evaluation_status(again) is EvaluationStatus.COMPLETED
    await world.check()


async def test_a_pruned_walk_reaches_the_failure_too(world: World) -> None:
    """The worker skips a subtree the graph knows: only its top is named, and `top` failed by dependency."""
    await failed_chain(world)
    again = await world.evaluation()
    await world.apply(Record(again, (), (EntryPoint("top", drv("top")),)))
    await world.end_stream(again)
    await world.check()
    assert await world.evaluation_status(again) is EvaluationStatus.BUILDING
    named = (
        "SELECT array_agg(d.name ORDER BY d.name) FROM build_job j JOIN derivation d ON d.id = j.derivation"
    )
    assert await world.value(f"{named} WHERE j.evaluation = %s", again) == ["bad", "good", "mid", "top"]
    await world.fail("bad")
    await world.check()
    assert await world.evaluation_status(again) is EvaluationStatus.FAILED


async def test_what_thaws_is_queued_though_the_evaluation_does_not_name_it(world: World) -> None:
    """A walk of need ends at what no upstream cache was asked for, so nothing below it is adopted."""
    first = await world.evaluation()
    await world.record(first, {"low": [], "mid": ["low"]}, entries=["low", "mid"])
    await world.end_stream(first)
    await world.fail("low", FailureKind.TIMEOUT)
    await world.connection.execute(
        "UPDATE derivation_build SET probed = false WHERE derivation = %s", (await world.id("mid"),)
    )
    second = await world.evaluation()
    await world.record(second, {"top": ["mid"]}, entries=["top"])
    await world.end_stream(second)
    assert await world.status("low") is BuildStatus.QUEUED
    await world.check()


async def test_a_failure_of_this_evaluation_is_not_tried_again(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, CHAIN, entries=["top"])
    await world.fail("bad")
    await world.end_stream(evaluation)
    assert await world.status("bad") is BuildStatus.FAILED_PERMANENT
    assert await world.evaluation_status(evaluation) is EvaluationStatus.FAILED
    await world.check()


async def test_what_is_named_after_its_dependency_failed_fails_with_it(world: World) -> None:
    first = await world.evaluation()
    await world.record(first, {"bad": []}, entries=["bad"])
    await world.fail("bad")
    await world.record(first, {"late": ["bad"], "user": ["late"]}, entries=["user"])
    assert await world.status("late") is BuildStatus.CREATED
    await world.end_stream(first)
    assert await world.status("late") is await world.status("user") is BuildStatus.DEPENDENCY_FAILED
    assert await world.evaluation_status(first) is EvaluationStatus.FAILED
    await world.check()


async def test_a_task_does_not_try_a_failure_again(world: World) -> None:
    await failed_chain(world)
    await world.connection.execute(
        "INSERT INTO task (project, name, repository, created_at) SELECT id, 't', 'u', now() FROM project"
    )
    task = await world.value("SELECT id FROM task")
    source = Repository("git+https://example.org/x")
    evaluation = await world.apply(CreateEvaluation("main", source, task=task))
    await world.start_evaluation(evaluation)
    await world.record(evaluation, {**CHAIN, "other": ["bad"]}, entries=["top", "other"])
    await world.end_stream(evaluation)
    assert await world.status("bad") is BuildStatus.FAILED_PERMANENT
    assert await world.status("top") is await world.status("other") is BuildStatus.DEPENDENCY_FAILED
    assert await world.evaluation_status(evaluation) is EvaluationStatus.FAILED
    await world.check()


async def test_what_failed_through_something_repaired_elsewhere_is_tried_again(world: World) -> None:
    """`top` failed with `bad`; another evaluation had `bad` built since."""
    await failed_chain(world)
    other = await world.evaluation()
    await world.record(other, {"bad": []}, entries=["bad"])
    await world.end_stream(other)
    await world.build("bad")
    assert await world.status("top") is BuildStatus.DEPENDENCY_FAILED
    again = await world.evaluation()
    await world.record(again, CHAIN, entries=["top"])
    await world.end_stream(again)
    await world.check()
    for name in ("good", "mid", "top"):
        await world.build(name)
    assert await world.evaluation_status(again) is EvaluationStatus.COMPLETED


async def test_what_nobody_needs_thaws_to_skipped(world: World) -> None:
    await failed_chain(world)
    await world.commit(nar(out("top")))
    again = await world.evaluation()
    await world.record(again, CHAIN, entries=["top"])
    await world.end_stream(again)
    await world.check()
    # `top` had failed, and its NAR is here: nothing below it is built.
    assert await world.statuses() == {
        "top": BuildStatus.COMPLETED,
        "mid": BuildStatus.SKIPPED,
        "bad": BuildStatus.SKIPPED,
        "good": BuildStatus.SKIPPED,
    }
    assert await world.evaluation_status(again) is EvaluationStatus.COMPLETED


async def test_a_thawed_row_that_nobody_needs_is_skipped(world: World) -> None:
    """`bad` is named as an input of what the cache holds; what failed with it nobody asks for now."""
    await failed_chain(world)
    await world.commit(nar(out("held")))
    again = await world.evaluation()
    await world.record(again, {"held": ["bad"], "bad": []}, entries=["held"])
    await world.end_stream(again)
    await world.check()
    assert await world.status("bad") is BuildStatus.SKIPPED
    assert await world.evaluation_status(again) is EvaluationStatus.COMPLETED


async def test_a_row_that_failed_when_nobody_needed_it_thaws_to_skipped(world: World) -> None:
    first = await world.evaluation()
    await world.record(first, {"top": ["bad", "worse"], "bad": [], "worse": []}, entries=["top"])
    await world.end_stream(first)
    await world.start("bad")
    await world.fail("worse")
    await world.apply(BuildFailed(world.open.pop("bad"), FailureKind.PERMANENT, "it broke too", LIMITS))
    await world.commit(nar(out("held")))
    again = await world.evaluation()
    await world.record(again, {"held": ["bad"], "bad": []}, entries=["held"])
    await world.end_stream(again)
    await world.check()
    assert await world.status("bad") is BuildStatus.SKIPPED


async def test_an_abort_stops_what_only_it_wanted_also_without_its_name(world: World) -> None:
    """A pruned stream that is aborted before its end has named the top alone."""
    first = await world.evaluation()
    await world.record(first, CHAIN, entries=["top"])
    await world.apply(AbortEvaluation(first, "by a person"))
    second = await world.evaluation()
    await world.apply(Record(second, (), (EntryPoint("top", drv("top")),)))
    await world.start("bad")
    await world.apply(AbortEvaluation(second, "by a person"))
    await world.check()
    assert await world.status("bad") is BuildStatus.ABORTED
    assert f"build:{await world.id('bad')}" in {abort.job_id for abort in world.moves.aborts}


async def test_present_outputs_complete_and_what_they_refer_to_is_wanted(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"lib": []})
    await world.commit(nar(out("app"), [out("lib")]))
    await world.record(evaluation, {"app": ["tool"], "tool": []}, entries=["app"])
    assert await world.status("app") is BuildStatus.CREATED
    await world.end_stream(evaluation)
    await world.check()
    assert await world.status("app") is BuildStatus.COMPLETED
    assert await world.status("tool") is BuildStatus.SKIPPED
    assert await world.status("lib") is BuildStatus.QUEUED
    await world.build("lib")
    await world.check()
    assert await world.value(
        "SELECT fetchable FROM derivation_build WHERE derivation = %s", await world.id("app")
    )
    assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED


async def test_a_second_evaluation_adopts_what_it_waits_for(world: World) -> None:
    first = await world.evaluation()
    await world.record(first, CHAIN, entries=["top"])
    await world.end_stream(first)
    await world.start("bad")
    second = await world.evaluation()
    await world.apply(Record(second, (), (EntryPoint("top", drv("top")),)))
    await world.end_stream(second)
    await world.check()
    counts = "SELECT named_shared_builds + coalesce(sum(named), 0) FROM evaluation v"
    ledger = "LEFT JOIN evaluation_shared_build_delta l ON l.evaluation = v.id"
    assert await world.value(f"{counts} {ledger} WHERE v.id = %s GROUP BY v.id", second) == 4
    assert await world.apply(AbortEvaluation(first, "by a person"))
    assert await world.status("bad") is BuildStatus.BUILDING
    assert await world.apply(AbortEvaluation(second, "by a person"))
    assert await world.status("bad") is BuildStatus.ABORTED
    await world.check()


async def test_an_adoption_looks_what_is_needed_below(world: World) -> None:
    """A mark that was lost below what is named by it."""
    first, second = await world.evaluation(), await world.evaluation()
    await world.record(first, CHAIN, entries=["top"])
    await world.apply(Record(second, (), (EntryPoint("top", drv("top")),)))
    lose = "UPDATE derivation_build SET wanted = false, status = %s WHERE derivation = %s"
    await world.connection.execute(lose, (BuildStatus.SKIPPED, await world.id("good")))
    await world.end_stream(second)
    await world.check()
    assert await world.status("good") is BuildStatus.QUEUED


async def test_an_adoption_ends_at_what_failed(world: World) -> None:
    """Its mark is left over from when it was wanted."""
    first, second = await world.evaluation(), await world.evaluation()
    await world.commit(nar(out("above"), [out("top")]))
    await world.record(first, {"top": [], "above": []}, entries=["top", "above"])
    await world.end_stream(first)
    await world.apply(Record(second, (), (EntryPoint("above", drv("above")),)))
    await world.fail("top")
    await world.end_stream(second)
    assert await world.statuses() == {"above": BuildStatus.COMPLETED, "top": BuildStatus.FAILED_PERMANENT}
    names = "SELECT array_agg(d.name) FROM build_job j JOIN derivation d ON d.id = j.derivation"
    assert await world.value(f"{names} WHERE j.evaluation = %s", second) == ["above"]
    await world.check()


async def test_the_last_abort_stops_a_build_that_several_named(world: World) -> None:
    await failed_chain(world)
    second = await world.evaluation()
    await world.record(second, {"bad": []}, entries=["bad"])
    await world.end_stream(second)
    await world.build("bad")
    # `top` thaws in the third, which is aborted before its stream ends.
    third = await world.evaluation()
    await world.record(third, {"mid": ["bad", "good"]}, entries=["mid"])
    fourth = await world.evaluation()
    await world.apply(Record(fourth, (), (EntryPoint("good", drv("good")),)))
    assert await world.status("good") is BuildStatus.QUEUED
    await world.apply(AbortEvaluation(third, "by a person"))
    assert await world.status("good") is BuildStatus.QUEUED
    await world.apply(AbortEvaluation(fourth, "by a person"))
    assert await world.status("good") is BuildStatus.ABORTED
    await world.check()


async def test_an_abort_is_no_failure_of_an_evaluation_that_needed_nothing(world: World) -> None:
    """`tool` is named by the second as an input of what the cache holds; only the first wants it."""
    first, second = await world.evaluation(), await world.evaluation()
    await world.record(first, {"tool": []}, entries=["tool"])
    await world.commit(nar(out("held")))
    await world.record(second, {"held": ["tool"], "x": []}, entries=["held", "x"])
    await world.end_stream(second)
    await world.apply(AbortEvaluation(first, "by a person"))
    await world.check()
    assert await world.status("tool") is BuildStatus.SKIPPED
    await world.build("x")
    assert await world.evaluation_status(second) is EvaluationStatus.COMPLETED


async def test_what_was_aborted_and_is_held_needs_no_build(world: World) -> None:
    """Its NAR came while it was aborted; the second names it and has no need for it."""
    first, second = await world.evaluation(), await world.evaluation()
    await world.record(first, {"tool": []}, entries=["tool"])
    await world.apply(AbortEvaluation(first, "by a person"))
    await world.commit(nar(out("tool")), nar(out("held")))
    await world.record(second, {"held": ["tool"], "x": ["tool"]}, entries=["held"])
    await world.check()
    assert await world.status("tool") is BuildStatus.SUBSTITUTED


async def test_a_retry_that_nobody_wants_any_more_is_skipped(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["flaky", "bad"], "flaky": [], "bad": [], "x": []}, ["top", "x"])
    await world.end_stream(evaluation)
    await world.fail("flaky", FailureKind.TRANSIENT)
    await world.fail("bad")
    assert await world.status("flaky") is BuildStatus.FAILED_TRANSIENT
    world.now = world.now.replace(hour=world.now.hour + 1)
    await world.apply(RetryTransient(LIMITS))
    await world.check()
    assert await world.status("flaky") is BuildStatus.SKIPPED


# --- dependency failure ---------------------------------------------------------------------------


async def test_a_failure_does_not_reach_through_what_a_cache_serves(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(
        evaluation, {"top": ["pass"], "pass": ["bad"], "bad": [], "user": ["bad"]}, entries=["top", "user"]
    )
    await world.connection.execute(
        "UPDATE derivation_build SET cache_available = true WHERE derivation = %s", (await world.id("pass"),)
    )
    await world.fail("bad")
    await world.end_stream(evaluation)  # the repair's walk stops there too
    assert await world.status("user") is BuildStatus.DEPENDENCY_FAILED
    assert await world.status("top") is BuildStatus.CREATED
    assert await world.status("pass") is BuildStatus.QUEUED


async def test_a_failure_does_not_reach_what_needs_only_what_is_built(world: World) -> None:
    """`lib` was built and is whole; its input failed when it was built once more."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"lib": ["input"], "input": [], "x": []}, entries=["lib", "input"])
    await world.build("input")
    await world.build("lib")
    await world.connection.execute(
        "UPDATE derivation_output SET is_cached = false WHERE derivation = %(id)s",
        {"id": await world.id("input")},
    )
    await world.connection.execute(
        "UPDATE derivation_build SET status = 1, fetchable = false, wanted = true WHERE derivation = %s",
        (await world.id("input"),),
    )
    await world.connection.execute(
        "UPDATE derivation_build SET blocking_deps = 1 WHERE derivation = %s", (await world.id("lib"),)
    )
    await world.record(evaluation, {"user": ["lib", "x"]}, entries=["user"])
    await world.fail("input")
    await world.check()
    assert await world.status("user") is BuildStatus.CREATED


async def test_a_failure_reaches_what_waits_for_a_closure_that_lacks_it(world: World) -> None:
    """`app` is here without `lib`, which it refers to: who needs `app` cannot start without `lib`."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"lib": []})
    await world.commit(nar(out("app"), [out("lib")]))
    await world.record(evaluation, {"app": [], "user": ["app"]}, entries=["user"])
    await world.end_stream(evaluation)
    await world.fail("lib")
    await world.check()
    assert await world.status("app") is BuildStatus.COMPLETED
    assert await world.status("user") is BuildStatus.DEPENDENCY_FAILED
    assert await world.evaluation_status(evaluation) is EvaluationStatus.FAILED


async def test_a_failure_spares_what_runs_and_what_needs_that_alone(world: World) -> None:
    """`low` is lost when others have been built from it or are tried again, and cannot be made again."""
    evaluation = await world.evaluation()
    graph = {"low": [], "running": ["low"], "flaky": ["low"], "user": ["running"], "late": ["flaky"]}
    await world.record(evaluation, graph, entries=["user", "late"])
    await world.end_stream(evaluation)
    await world.build("low")
    await world.start("running")
    await world.fail("flaky", FailureKind.TRANSIENT)
    await world.apply(DemoteMissingNar((hash_part("low"),)))
    await world.fail("low")
    assert await world.statuses() == {
        "low": BuildStatus.FAILED_PERMANENT,
        "running": BuildStatus.BUILDING,
        "flaky": BuildStatus.DEPENDENCY_FAILED,
        "user": BuildStatus.CREATED,
        "late": BuildStatus.DEPENDENCY_FAILED,
    }
    await world.check()
    await world.commit(nar(out("running")))
    await world.complete("running")
    assert await world.status("user") is BuildStatus.QUEUED
    await world.check()


async def test_a_failure_does_not_reach_through_a_closure_that_is_here(world: World) -> None:
    """The output of `lib` came from elsewhere while it was built: `app`, which refers to it, is whole."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"lib": [], "x": []}, entries=["lib"])
    await world.start("lib")
    await world.commit(nar(out("app"), [out("lib")]))
    await world.record(evaluation, {"app": [], "user": ["app", "x"]}, entries=["user"])
    await world.commit(nar(out("lib")))
    await world.end_stream(evaluation)
    await world.apply(BuildFailed(world.open.pop("lib"), FailureKind.PERMANENT, "it broke", LIMITS))
    assert await world.statuses() == {
        "lib": BuildStatus.FAILED_PERMANENT,
        "app": BuildStatus.SUBSTITUTED,
        "user": BuildStatus.CREATED,
        "x": BuildStatus.QUEUED,
    }
    await world.check()


# --- the scopes -----------------------------------------------------------------------------------


async def stuck(world: World) -> int:
    """An evaluation that waits for `other` while CHAIN failed in it through `bad`."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {**CHAIN, "other": []}, entries=["top", "other"])
    await world.end_stream(evaluation)
    return evaluation


async def test_the_heal_tries_again_what_its_builder_did_not_fail(world: World) -> None:
    evaluation = await stuck(world)
    await world.fail("bad", FailureKind.TIMEOUT)
    await world.apply(Repair(evaluation))
    await world.check()
    assert await world.statuses() == {
        "bad": BuildStatus.QUEUED,
        "good": BuildStatus.QUEUED,
        "mid": BuildStatus.CREATED,
        "top": BuildStatus.CREATED,
        "other": BuildStatus.QUEUED,
    }


async def test_the_heal_leaves_what_its_builder_failed_and_what_stands_above(world: World) -> None:
    evaluation = await stuck(world)
    await world.fail("bad")
    before = await world.statuses()
    await world.apply(Repair(evaluation))
    await world.check()
    assert await world.statuses() == before


async def test_the_heal_leaves_an_aborted_build_and_what_stands_above(world: World) -> None:
    """Not even for a moment: a thaw would look as if it had failed just now."""
    evaluation = await stuck(world)
    await world.abort_build("bad")
    picture = (
        "SELECT array_agg((derivation, status, updated_at) ORDER BY derivation)::text FROM derivation_build"
    )
    before = await world.value(picture)
    await world.apply(Repair(evaluation))
    await world.apply(Repair(evaluation, RepairScope.EVAL))
    await world.check()
    assert await world.value(picture) == before


async def test_the_heal_fails_what_was_thawed_after_its_dependency_failed(world: World) -> None:
    evaluation = await stuck(world)
    await world.fail("bad")
    await world.connection.execute(
        "UPDATE derivation_build SET status = 0 WHERE derivation = ANY(%s)",
        ([await world.id(name) for name in ("mid", "top")],),
    )
    await world.apply(Repair(evaluation))
    assert await world.status("mid") is await world.status("top") is BuildStatus.DEPENDENCY_FAILED
    assert await world.status("other") is BuildStatus.QUEUED


async def test_the_heal_leaves_an_evaluation_that_is_not_at_its_builds(world: World) -> None:
    first, second = await world.evaluation(), await stuck(world)
    await world.fail("bad", FailureKind.TIMEOUT)
    await world.apply(AbortEvaluation(second, "by a person"))
    before = await world.statuses()
    for evaluation in (first, second, second + 1):
        await world.apply(Repair(evaluation))
    assert await world.statuses() == before


@pytest.mark.parametrize("retries", [False, True])
async def test_a_task_tries_again_what_its_builder_did_not_fail_or_what_it_is_told_to(
    world: World, retries: bool
) -> None:
    await failed_chain(world, FailureKind.PERMANENT if retries else FailureKind.TIMEOUT)
    await world.connection.execute(
        "INSERT INTO task (project, name, repository, retry_failed_builds, created_at)"
        " SELECT id, 't', 'u', %s, now() FROM project",
        (retries,),
    )
    task = await world.value("SELECT id FROM task")
    evaluation = await world.apply(
        CreateEvaluation("main", Repository("git+https://example.org/x"), task=task)
    )
    await world.start_evaluation(evaluation)
    await world.record(evaluation, CHAIN, entries=["top"])
    await world.end_stream(evaluation)
    assert await world.status("bad") is BuildStatus.QUEUED
    assert await world.evaluation_status(evaluation) is EvaluationStatus.BUILDING
    await world.check()


STEPS = (
    "repair_cached_shared_builds_for_eval",
    "repair_dependency_failed",
    "adopt_pending_closure",
    "promote_closure",
)


@pytest.mark.parametrize(
    ("scope", "thaw"),
    [
        (RepairScope.EVAL, "requeue_failed_closure"),
        (RepairScope.UNSTICK, "requeue_failed_closure"),
        (RepairScope.RETRY, "thaw_failed"),
    ],
)
async def test_the_steps_in_their_order(
    world: World, monkeypatch: pytest.MonkeyPatch, scope: RepairScope, thaw: str
) -> None:
    evaluation = await stuck(world)
    taken: list[str] = []

    def step(name: str) -> None:
        async def note(*_: Any) -> None:
            taken.append(name)

        monkeypatch.setattr(repair, name, note)

    for name in (thaw, *STEPS):
        step(name)
    await world.apply(Repair(evaluation, scope))
    assert taken == [thaw, *STEPS]


@pytest.mark.parametrize("failing", STEPS)
async def test_the_first_step_that_fails_fails_the_transition(
    world: World, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    evaluation = await stuck(world)
    await world.fail("bad", FailureKind.TIMEOUT)
    before = await world.statuses()

    async def fail(*_: Any) -> None:
        raise Rejected("this step fails")

    monkeypatch.setattr(repair, failing, fail)
    with pytest.raises(Rejected, match="this step fails"):
        await world.apply(Repair(evaluation))
    assert await world.statuses() == before
