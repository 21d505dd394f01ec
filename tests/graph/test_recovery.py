"""What a killed server leaves open is picked up at the next start: once, and the same when done again."""

from __future__ import annotations

from typing import Any

import pytest

from gradient.graph.assignments import ClaimEvaluation
from gradient.graph.builds import BuildCompleted
from gradient.graph.evaluation_end import FinishEvaluation
from gradient.graph.evaluation_reports import EvaluationPhase
from gradient.graph.evaluations import CreateEvaluation, ParkEvaluation
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.recovery import Recovered, recover_interrupted_work
from gradient.model import (
    AttemptOutcome,
    BuildStatus,
    ClusterOutcome,
    ClusterStatus,
    DispatchOutcome,
    EvaluationStatus,
    FailureKind,
    Repository,
)
from tests.graph.world import LIMITS, WORKER, World, nar, out


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def everything(world: World) -> list[Any]:
    """All that recovery may touch."""
    tables = ("dispatched_job", "build_attempt", "derivation_build", "evaluation", "phase_event")
    return [
        await fetch_all(world.connection, f"SELECT t::text FROM {table} t ORDER BY 1")
        for table in (*tables, "cluster_job", "cluster_attempt")
    ]


async def recover(world: World) -> Recovered:
    """Recover, and once more: the second time changes nothing."""
    recovered = await recover_interrupted_work(world.connection, world.now)
    await world.check()
    once = await everything(world)
    assert await recover_interrupted_work(world.connection, world.now) == Recovered(0, 0, 0)
    assert await everything(world) == once
    return recovered


async def test_nothing_to_do(world: World) -> None:
    assert await recover(world) == Recovered(0, 0, 0)


async def test_builds_go_back_to_the_queue_without_an_attempt(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["a", "b", "c"], "a": [], "b": [], "c": []}, entries=["top"])
    await world.end_stream(evaluation)
    await world.start("a")
    await world.claim("b")  # handed out, not begun
    await world.fail("c", FailureKind.TRANSIENT)
    assert await recover(world) == Recovered(assignments=2, builds=1, evaluations=0)
    statuses = await world.statuses()
    assert statuses["a"] is statuses["b"] is BuildStatus.QUEUED
    assert statuses["c"] is BuildStatus.FAILED_TRANSIENT
    assert await world.evaluation_status(evaluation) is EvaluationStatus.BUILDING
    rows = await fetch_all(world.connection, "SELECT outcome, reason FROM build_attempt ORDER BY id")
    aborted, failed = (AttemptOutcome.ABORTED, None), (AttemptOutcome.FAILED, None)
    assert rows == [aborted, aborted, failed]
    outcomes = await world.value("SELECT array_agg(outcome ORDER BY id) FROM dispatched_job WHERE kind = 1")
    assert outcomes == [DispatchOutcome.ABANDONED, DispatchOutcome.ABANDONED, DispatchOutcome.FAILED]
    assert (
        await world.value("SELECT attempt FROM derivation_build WHERE derivation = %s", await world.id("a"))
        == 0
    )
    assert await world.claim("a") is not None


async def test_a_late_report_of_the_killed_servers_worker_changes_nothing(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.start("a")
    stale = world.open.pop("a")
    await recover(world)
    await world.commit(nar(out("other")))
    assert not await world.apply(BuildCompleted(stale, LIMITS))
    assert await world.status("a") is BuildStatus.QUEUED


async def test_a_build_whose_conditions_are_gone_leaves_the_queue(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.start("a")
    # As if its .drv had been lost while the server was down.
    await world.connection.execute("UPDATE cached_path SET file_hash = NULL WHERE package LIKE '%.drv'")
    await recover(world)
    assert await world.status("a") is BuildStatus.CREATED


async def test_what_was_uploaded_before_the_kill_is_not_built_again(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["a"], "a": []}, entries=["top"])
    await world.end_stream(evaluation)
    await world.start("a")
    await world.commit(nar(out("a")))
    await recover(world)
    assert await world.status("a") is BuildStatus.SUBSTITUTED
    assert await world.status("top") is BuildStatus.QUEUED


@pytest.mark.parametrize(
    "phase",
    [EvaluationStatus.FETCHING, EvaluationStatus.EVALUATING_FLAKE, EvaluationStatus.EVALUATING_DERIVATION],
)
async def test_a_running_evaluation_is_queued_again(world: World, phase: EvaluationStatus) -> None:
    evaluation = await world.apply(CreateEvaluation("main", Repository("git+https://example.org/x")))
    assignment = await world.apply(ClaimEvaluation(evaluation, WORKER, "w"))
    assert assignment is not None
    assert await world.apply(EvaluationPhase(assignment, phase))
    assert await recover(world) == Recovered(assignments=1, builds=0, evaluations=1)
    assert await world.evaluation_status(evaluation) is EvaluationStatus.QUEUED
    phases = await world.value("SELECT array_agg(status ORDER BY id) FROM phase_event")
    assert phases == [phase, EvaluationStatus.QUEUED]
    await world.start_evaluation(evaluation)


async def test_an_evaluation_whose_builds_are_done_is_not_failed(world: World) -> None:
    """One whose verdict was lost waits for it as it is; one whose last build ran goes on to its own."""
    green, going_on = await world.evaluation(), await world.evaluation()
    await world.record(green, {"a": []}, entries=["a"])
    await world.record(going_on, {"b": []}, entries=["b"])
    for evaluation in (green, going_on):
        await world.end_stream(evaluation)
    await world.build("a")
    lost = "UPDATE evaluation SET status = %s, finished_at = NULL WHERE id = %s"
    await world.connection.execute(lost, (EvaluationStatus.BUILDING, green))
    await world.start("b")
    await recover_interrupted_work(world.connection, world.now)
    for evaluation in (green, going_on):
        assert await world.evaluation_status(evaluation) is EvaluationStatus.BUILDING
    assert await world.apply(FinishEvaluation(green))
    await world.build("b")
    for evaluation in (green, going_on):
        assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED
    await world.check()


async def test_a_claimed_evaluation_that_had_not_begun_can_be_claimed_again(world: World) -> None:
    evaluation = await world.apply(CreateEvaluation("main", Repository("git+https://example.org/x")))
    await world.apply(ClaimEvaluation(evaluation, WORKER, "w"))
    assert await recover(world) == Recovered(assignments=1, builds=0, evaluations=0)
    await world.start_evaluation(evaluation)


@pytest.mark.parametrize("kind", ["draining", "eval_workers", "approval"])
async def test_only_draining_parks_end(world: World, kind: str) -> None:
    evaluation = await world.apply(CreateEvaluation("main", Repository("git+https://example.org/x")))
    await world.apply(ParkEvaluation(evaluation, EvaluationStatus.QUEUED, {"kind": kind}))
    await recover(world)
    status = EvaluationStatus.QUEUED if kind == "draining" else EvaluationStatus.WAITING
    assert await world.evaluation_status(evaluation) is status
    reason = await world.value("SELECT waiting_reason FROM evaluation")
    assert reason == (None if kind == "draining" else {"kind": kind})
    phases = await world.value("SELECT array_agg(status ORDER BY id) FROM phase_event")
    assert phases == [EvaluationStatus.WAITING, *([EvaluationStatus.QUEUED] if kind == "draining" else [])]


async def test_clusters_are_tried_again_unless_a_member_has_ended(world: World) -> None:
    live = await world.evaluation()
    await world.record(live, {"done": [], "open": []}, entries=["done", "open"])
    await world.build("done")
    for status, member in (
        (ClusterStatus.RUNNING, "open"),
        (ClusterStatus.RUNNING, "done"),
        (ClusterStatus.COMPLETED, None),
    ):
        await world.connection.execute(
            "INSERT INTO cluster_job (status, created_at, updated_at) VALUES (%s, now(), now())", [status]
        )
        if member is not None:
            await world.connection.execute(
                "INSERT INTO cluster_member (cluster_job, derivation, role)"
                f" SELECT max(id), {await world.id(member)}, 'x' FROM cluster_job".encode()
            )
    await world.connection.execute(
        "INSERT INTO cluster_attempt (cluster_job, created_at, started_at) VALUES"
        " (1, now(), NULL), (2, now(), now())"
    )
    await recover(world)
    statuses = await world.value("SELECT array_agg(status ORDER BY id) FROM cluster_job")
    assert statuses == [ClusterStatus.QUEUED, ClusterStatus.ABORTED, ClusterStatus.COMPLETED]
    outcomes = await world.value("SELECT array_agg(outcome ORDER BY id) FROM cluster_attempt")
    assert outcomes == [ClusterOutcome.PREPARE_FAILED, ClusterOutcome.ABORTED]
