"""From an imported batch to a finished evaluation: the counters, the queue, the verdict."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gradient.graph.assignments import ClaimEvaluation
from gradient.graph.build_failures import BuildFailed
from gradient.graph.builds import BuildStarted
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.evaluation_reports import EvaluationPhase
from gradient.graph.evaluations import CreateEvaluation, ParkEvaluation
from gradient.graph.pg import Connection
from gradient.graph.record import Record
from gradient.graph.requeue import LoseWorker, RetryTransient
from gradient.model import BuildStatus, EvaluationStatus, FailureKind, Repository
from tests.graph.world import LIMITS, WORKER, World, derivation, drv, nar, out

DIAMOND = {"d": ["b", "c"], "b": ["a"], "c": ["a"], "a": []}


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def test_a_diamond_builds_in_order_and_completes(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, DIAMOND, entries=["d"])
    await world.check()
    assert await world.statuses() == {
        "a": BuildStatus.QUEUED,
        "b": BuildStatus.CREATED,
        "c": BuildStatus.CREATED,
        "d": BuildStatus.CREATED,
    }
    await world.build("a")  # while the evaluation still runs
    await world.check()
    await world.end_stream(evaluation)
    assert await world.evaluation_status(evaluation) is EvaluationStatus.BUILDING
    await world.build("b", references=["a"])
    assert await world.status("d") is BuildStatus.CREATED
    await world.build("c")
    assert await world.status("d") is BuildStatus.QUEUED
    await world.build("d", references=["b", "c"])
    await world.check()
    assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED


async def test_batches_parents_first_with_stubs_between(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"d": ["b", "c"]}, entries=["d"])
    await world.check()
    assert await world.status("b") is BuildStatus.CREATED  # a stub is never queued
    await world.record(evaluation, {"b": ["a"], "c": ["a"]})
    await world.check()
    await world.record(evaluation, {"a": []})
    await world.check()
    assert await world.status("a") is BuildStatus.QUEUED
    assert await world.value("SELECT unwalked_inputs FROM derivation WHERE name = 'd'") == 0


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([{"d": ["b"]}], f"without the record of {drv('b')},"),
        ([{"d": ["b"], "b": ["a"]}, {"c": []}], f"without the record of {drv('a')},"),
    ],
)
async def test_a_walk_that_never_ends_fails_its_evaluation_alone(
    world: World, batches: list[dict[str, list[str]]], words: str
) -> None:
    """No Nix sends such a graph; whoever does must not leave an evaluation that waits for ever."""
    evaluation, other = await world.evaluation(), await world.evaluation()
    for batch in batches:
        await world.record(evaluation, batch, entries=batch)
    await world.end_stream(evaluation)
    assert await world.evaluation_status(evaluation) is EvaluationStatus.FAILED
    message = await world.value("SELECT message FROM evaluation_message WHERE evaluation = %s", evaluation)
    assert words in message
    await world.record(other, {"z": []}, entries=["z"])
    await world.end_stream(other)
    await world.build("z")
    assert await world.evaluation_status(other) is EvaluationStatus.COMPLETED


async def test_an_evaluation_that_was_claimed_meanwhile_is_not_parked(world: World) -> None:
    """The waiting pass saw it Queued and nobody there; then a worker came and took it."""
    evaluation = await world.apply(CreateEvaluation("main", Repository("git+https://example.org/x")))
    claim = await world.apply(ClaimEvaluation(evaluation, WORKER, "w"))
    assert claim is not None
    await world.apply(ParkEvaluation(evaluation, EvaluationStatus.QUEUED, {"kind": "eval_workers"}))
    assert await world.apply(EvaluationPhase(claim, EvaluationStatus.EVALUATING_DERIVATION))
    assert await world.evaluation_status(evaluation) is EvaluationStatus.EVALUATING_DERIVATION


async def test_replaying_a_batch_changes_nothing(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, DIAMOND, entries=["d"])
    before = await world.statuses()
    await world.record(evaluation, DIAMOND, entries=["d"])
    assert await world.statuses() == before
    assert world.moves.builds == {}
    await world.check()


async def test_the_drv_nar_arriving_last_queues_its_owner(world: World) -> None:
    evaluation = await world.evaluation()
    await world.apply(Record(evaluation, (derivation("a"),), ()))
    await world.record(evaluation, {"x": ["a"]}, entries=["x"])
    assert await world.status("a") is BuildStatus.CREATED
    await world.commit(nar(drv("a")))
    assert await world.status("a") is BuildStatus.QUEUED
    await world.check()


async def test_a_failure_fails_what_needs_it_and_nothing_else(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(
        evaluation, {"top": ["bad"], "bad": [], "good": [], "side": ["x"], "x": []}, entries=["top", "good"]
    )
    await world.record(evaluation, {"both": ["bad", "x"]}, entries=["both"])
    await world.end_stream(evaluation)
    await world.fail("bad")
    await world.check()
    statuses = await world.statuses()
    assert statuses["bad"] is BuildStatus.FAILED_PERMANENT
    assert statuses["top"] is statuses["both"] is BuildStatus.DEPENDENCY_FAILED
    assert statuses["x"] is BuildStatus.SKIPPED  # only the failed one wanted it
    assert await world.evaluation_status(evaluation) is EvaluationStatus.BUILDING
    await world.build("good")
    assert await world.evaluation_status(evaluation) is EvaluationStatus.FAILED
    await world.check()


async def test_a_second_evaluation_shares_the_builds(world: World) -> None:
    first, second = await world.evaluation(), await world.evaluation()
    await world.record(first, DIAMOND, entries=["d"])
    await world.record(second, {"e": ["b"], **DIAMOND}, entries=["e"])
    for name in "abc":
        await world.build(name)
    await world.end_stream(first)
    await world.end_stream(second)
    await world.build("d")
    assert await world.evaluation_status(first) is EvaluationStatus.COMPLETED
    assert await world.evaluation_status(second) is EvaluationStatus.BUILDING
    await world.build("e")
    assert await world.evaluation_status(second) is EvaluationStatus.COMPLETED
    await world.check()


async def test_what_the_cache_holds_is_substituted_at_import(world: World) -> None:
    first = await world.evaluation()
    await world.record(first, DIAMOND, entries=["d"])
    await world.end_stream(first)
    for name in "abcd":
        await world.build(name)
    second = await world.evaluation()
    await world.record(second, {"new": ["d"], **DIAMOND}, entries=["new", "d"])
    await world.check()
    assert await world.status("new") is BuildStatus.QUEUED
    await world.commit(nar(out("held")))
    await world.record(second, {"held": ["unbuilt"], "unbuilt": []}, entries=["held"])
    assert await world.status("held") is BuildStatus.SUBSTITUTED
    assert await world.status("unbuilt") is BuildStatus.SKIPPED
    await world.check()


async def test_an_upload_settles_what_was_needed_for_it_alone(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["mid"], "mid": ["low"], "low": []}, entries=["top"])
    assert await world.status("low") is BuildStatus.QUEUED
    await world.commit(nar(out("top")))
    await world.check()
    assert await world.statuses() == {
        "top": BuildStatus.SUBSTITUTED,
        "mid": BuildStatus.SKIPPED,
        "low": BuildStatus.SKIPPED,
    }


async def test_a_reference_to_a_missing_path_keeps_the_dependents_waiting(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["lib"], "lib": [], "late": []}, entries=["top", "late"])
    await world.build("lib", references=["late"])
    await world.check()
    assert await world.status("lib") is BuildStatus.COMPLETED
    assert await world.status("top") is BuildStatus.CREATED
    await world.build("late")
    assert await world.status("top") is BuildStatus.QUEUED
    await world.check()


async def test_a_reference_to_what_nobody_needed_wakes_it_as_it_lands(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": [], "late": ["below"], "below": []}, entries=["top"])
    assert await world.status("late") is BuildStatus.SKIPPED
    await world.start("top")
    await world.commit(nar(out("top"), [out("late")]))
    await world.check()
    assert await world.status("below") is BuildStatus.QUEUED


async def test_a_runtime_chain_completes_in_one_step(world: World) -> None:
    evaluation = await world.evaluation()
    names = [f"n{i}" for i in range(12)]
    await world.record(evaluation, {**{name: [] for name in names}, "user": ["n0"]}, entries=[*names, "user"])
    for above, below in pairwise(names):
        await world.build(above, references=[below])
    assert await world.status("user") is BuildStatus.CREATED
    await world.build(names[-1])
    assert await world.status("user") is BuildStatus.QUEUED
    await world.check()


async def test_a_transient_failure_is_tried_again_after_its_backoff(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.end_stream(evaluation)
    for attempt in (1, 2):
        await world.fail("a", FailureKind.TRANSIENT)
        assert await world.status("a") is BuildStatus.FAILED_TRANSIENT
        assert await world.apply(RetryTransient(LIMITS)) == 0
        world.now = world.now.replace(hour=world.now.hour + attempt)
        assert await world.apply(RetryTransient(LIMITS)) == 1
    await world.fail("a", FailureKind.TRANSIENT)
    assert await world.status("a") is BuildStatus.FAILED_PERMANENT
    assert await world.evaluation_status(evaluation) is EvaluationStatus.FAILED
    await world.check()


async def test_a_lost_worker_requeues_and_ten_in_a_row_give_up(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["a"], "a": []}, entries=["top"])
    await world.end_stream(evaluation)
    for _ in range(9):
        await world.start("a")
        await world.apply(LoseWorker(WORKER))
        assert await world.status("a") is BuildStatus.QUEUED
        await world.check()
    await world.start("a")
    await world.apply(LoseWorker(WORKER))
    assert await world.status("a") is BuildStatus.FAILED_PERMANENT
    assert await world.status("top") is BuildStatus.DEPENDENCY_FAILED
    assert await world.evaluation_status(evaluation) is EvaluationStatus.FAILED
    await world.check()


async def test_a_canceled_build_uses_no_attempt(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.fail("a", FailureKind.CANCELED)
    assert await world.status("a") is BuildStatus.QUEUED
    assert await world.value("SELECT attempt FROM derivation_build") == 0
    assert world.moves.returned == {f"build:{await world.id('a')}"}
    await world.build("a")
    await world.check()


async def test_an_abort_stops_what_nobody_else_wants(world: World) -> None:
    first, second = await world.evaluation(), await world.evaluation()
    await world.record(first, {"own": ["shared"], "shared": [], "alone": []}, entries=["own", "alone"])
    await world.record(second, {"other": ["shared"], "shared": []}, entries=["other"])
    await world.start("shared")
    await world.start("alone")
    assert await world.apply(AbortEvaluation(first, "by a person"))
    statuses = await world.statuses()
    assert statuses["alone"] is BuildStatus.ABORTED
    assert statuses["own"] is BuildStatus.ABORTED
    assert statuses["shared"] is BuildStatus.BUILDING
    alone = f"build:{await world.id('alone')}"
    assert {abort.job_id for abort in world.moves.aborts} == {alone, f"eval:{first}"}
    assert not await world.apply(BuildStarted(world.open["alone"]))
    await world.apply(BuildFailed(world.open.pop("alone"), FailureKind.ABORTED, "aborted by server", LIMITS))
    assert await world.status("alone") is BuildStatus.ABORTED
    # A later need thaws it.
    third = await world.evaluation()
    await world.record(third, {"alone": []}, entries=["alone"])
    assert await world.status("alone") is BuildStatus.QUEUED
    await world.check()
