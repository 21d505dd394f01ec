"""Reports and their ends: late, twice, after an abort, without outputs; and what they mean for others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import attrs
import pytest

from gradient.graph import locks
from gradient.graph.assignments import ClaimBuild, ClaimEvaluation
from gradient.graph.build_failures import BuildFailed
from gradient.graph.build_outputs import StoreBuildOutput
from gradient.graph.builds import BuildCompleted, BuildStarted
from gradient.graph.can_start import became_fetchable
from gradient.graph.demote import DemotePath
from gradient.graph.evaluation_end import AbortEvaluation, FailEvaluation, FinishEvaluation
from gradient.graph.evaluation_reports import EvalFailed, EvalStreamCompleted, EvaluationPhase
from gradient.graph.evaluations import CreateEvaluation, ParkEvaluation, UnparkEvaluation
from gradient.graph.failure import RetryLimits
from gradient.graph.messages import AddMessage
from gradient.graph.moves import BuildChange, Moves
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.record import Record
from gradient.graph.recovery import recover_interrupted_work
from gradient.graph.requeue import LoseWorker, RetryTransient, ReturnAssignment
from gradient.graph.transaction import Transaction
from gradient.graph.unconfirmed import AbandonUnconfirmed
from gradient.model import (
    AttemptOutcome,
    AttemptReason,
    BuildMetrics,
    BuildProduct,
    BuildStatus,
    BuiltOutput,
    EntryPoint,
    EvaluationStatus,
    FailureKind,
    MessageLevel,
    OutputPath,
    Repository,
)
from tests.graph.world import LIMITS, WORKER, World, drv, hash_part, nar, out

S, E, K = BuildStatus, EvaluationStatus, FailureKind


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def building(world: World, graph: dict[str, list[str]], entries: list[str]) -> int:
    """An evaluation past its evaluation phase."""
    evaluation = await world.evaluation()
    await world.record(evaluation, graph, entries=entries)
    await world.end_stream(evaluation)
    return evaluation


async def attempts(world: World) -> list[tuple[Any, ...]]:
    return await fetch_all(world.connection, "SELECT outcome, reason FROM build_attempt ORDER BY id")


# --- builds ---------------------------------------------------------------------------------------


async def test_a_claim_hands_a_build_out_once(world: World) -> None:
    await building(world, {"a": []}, ["a"])
    derivation = await world.id("a")
    assert await world.apply(ClaimBuild(derivation, False, WORKER, "w")) is not None
    assert await world.apply(ClaimBuild(derivation, False, WORKER, "w")) is None
    assert await world.status("a") is S.QUEUED  # only the worker's report moves it
    await world.check()


async def test_a_job_whose_spec_has_changed_is_not_handed_out(world: World) -> None:
    await building(world, {"a": []}, ["a"])
    assert await world.apply(ClaimBuild(await world.id("a"), True, WORKER, "w")) is None
    assert await world.apply(ClaimBuild(10**9, False, WORKER, "w")) is None


async def test_a_completion_without_its_outputs_is_a_failed_attempt(world: World) -> None:
    evaluation = await building(world, {"a": []}, ["a"])
    for attempt in (1, 2):
        await world.start("a")
        assert not await world.apply(BuildCompleted(world.open.pop("a"), LIMITS))
        assert await world.status("a") is S.FAILED_TRANSIENT
        await world.check()
        world.now += timedelta(hours=attempt)
        await world.apply(RetryTransient(LIMITS))
    await world.start("a")
    assert not await world.apply(BuildCompleted(world.open.pop("a"), LIMITS))
    assert await world.status("a") is S.FAILED_PERMANENT
    assert await world.evaluation_status(evaluation) is E.FAILED
    message = await world.value("SELECT failure_message FROM build_attempt LIMIT 1")
    assert "not every output arrived" in message


async def test_every_report_counts_once(world: World) -> None:
    await building(world, {"a": []}, ["a"])
    await world.start("a")
    assignment = world.open["a"]
    assert await world.apply(BuildStarted(assignment))
    assert world.moves.builds == {}
    await world.commit(nar(out("a")))
    assert await world.apply(BuildCompleted(assignment, LIMITS))
    for late in (
        BuildCompleted(assignment, LIMITS),
        BuildFailed(assignment, K.PERMANENT, "late", LIMITS),
        BuildStarted(assignment),
        StoreBuildOutput(assignment, (BuiltOutput("out", out("a"), 5),), True),
        ReturnAssignment(assignment),
        LoseWorker(WORKER),
    ):
        assert not await world.apply(late)  # type: ignore[func-returns-value,arg-type]
        assert world.moves.empty
    assert await world.status("a") is S.COMPLETED
    assert await attempts(world) == [(AttemptOutcome.BUILT, None)]
    await world.check()


async def test_what_was_there_already_is_substituted(world: World) -> None:
    await building(world, {"a": []}, ["a"])
    await world.start("a")
    await world.commit(nar(out("a")))
    metrics = BuildMetrics(100)
    await world.apply(StoreBuildOutput(world.open["a"], (), True, metrics))
    assert await world.apply(BuildCompleted(world.open.pop("a"), LIMITS))
    assert await world.status("a") is S.SUBSTITUTED
    assert await attempts(world) == [(AttemptOutcome.SUBSTITUTED, None)]
    assert await world.value("SELECT count(*) FROM derivation_metric") == 0  # only of real builds


async def test_products_and_metrics_are_kept(world: World) -> None:
    await building(world, {"a": []}, ["a"])
    await world.start("a")
    product = BuildProduct("doc", "html", "index.html", out("a") + "/index.html", 7)
    built = BuiltOutput("out", out("a"), 120, products=(product,))
    for _ in range(2):  # a report replayed
        await world.apply(
            StoreBuildOutput(world.open["a"], (built,), False, BuildMetrics(1500, peak_ram_mb=3))
        )
    assert await fetch_all(world.connection, "SELECT file_type, subtype, name, size FROM build_product") == [
        ("doc", "html", "index.html", 7)
    ]
    assert await world.value("SELECT nar_size FROM derivation_output") == 120
    assert await world.value("SELECT peak_ram_mb FROM derivation_metric LIMIT 1") == 3


@pytest.mark.parametrize("began", [False, True])
async def test_a_late_success_of_an_aborted_build_stays_aborted(world: World, began: bool) -> None:
    evaluation = await building(world, {"a": []}, ["a"])
    await world.claim("a")
    if began:
        await world.apply(BuildStarted(world.open["a"]))
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    await world.commit(nar(out("a")))
    assert await world.apply(BuildCompleted(world.open.pop("a"), LIMITS))
    assert await world.status("a") is S.ABORTED
    await world.check()
    # Wanted again, it needs no build: its output is in the cache.
    again = await world.evaluation()
    await world.record(again, {"a": []}, entries=["a"])
    await world.check()
    assert await world.status("a") is S.SUBSTITUTED


@pytest.mark.parametrize("report", ["aborted", "lost", "completed", "failed"])
async def test_a_build_wanted_again_while_its_worker_still_stops(world: World, report: str) -> None:
    first = await building(world, {"top": ["a"], "a": []}, ["top"])
    await world.start("a")
    await world.apply(AbortEvaluation(first, "by a person"))
    second = await world.evaluation()
    await world.record(second, {"top": ["a"], "a": []}, entries=["top"])
    await world.end_stream(second)
    await world.check()
    assert await world.status("a") is S.QUEUED
    assert await world.apply(ClaimBuild(await world.id("a"), False, WORKER, "w")) is None  # still out there
    assignment = world.open.pop("a")
    match report:
        case "aborted":
            await world.apply(BuildFailed(assignment, K.ABORTED, "aborted by server", LIMITS))
        case "lost":
            await world.apply(LoseWorker(WORKER))
        case "completed":
            await world.commit(nar(out("a")))
            assert await world.apply(BuildCompleted(assignment, LIMITS))
        case "failed":
            await world.apply(BuildFailed(assignment, K.PERMANENT, "no", LIMITS))
    await world.check()
    expected = {
        "aborted": (S.QUEUED, E.BUILDING),
        "lost": (S.QUEUED, E.BUILDING),
        "completed": (S.COMPLETED, E.BUILDING),
        "failed": (S.FAILED_PERMANENT, E.FAILED),
    }[report]
    assert (await world.status("a"), await world.evaluation_status(second)) == expected
    if expected[0] is S.QUEUED:
        assert await world.claim("a") is not None


@pytest.mark.parametrize("report", ["completed", "aborted", "failed", "lost", "abandoned", "restart"])
async def test_what_was_uploaded_while_its_worker_stopped_needs_no_build(world: World, report: str) -> None:
    """Wanted again, it would wait for an input that is gone by now."""
    first = await building(world, {"top": ["a"], "a": []}, ["top"])
    await world.build("a")
    await world.start("top")
    await world.apply(AbortEvaluation(first, "by a person"))
    await world.apply(DemotePath((hash_part("a"),), world.now))
    second = await building(world, {"top": ["a"], "a": []}, ["top"])
    assert await world.statuses() == {"top": S.CREATED, "a": S.QUEUED}
    await world.commit(nar(out("top")))
    assert await world.status("top") is S.CREATED  # its worker still has it
    assignment = world.open.pop("top")
    match report:
        case "completed":
            assert await world.apply(BuildCompleted(assignment, LIMITS))
        case "aborted":
            await world.apply(BuildFailed(assignment, K.ABORTED, "aborted by server", LIMITS))
        case "failed":
            await world.apply(BuildFailed(assignment, K.PERMANENT, "no", LIMITS))
        case "lost":
            await world.apply(LoseWorker(WORKER))
        case "abandoned":
            assert await world.apply(AbandonUnconfirmed(timedelta(0))) == 1
        case "restart":
            await recover_interrupted_work(world.connection, world.now)
    await world.check()
    assert await world.statuses() == {"top": S.SUBSTITUTED, "a": S.SKIPPED}
    assert await world.evaluation_status(second) is E.COMPLETED


@pytest.mark.parametrize("kind", [K.PERMANENT, K.TIMEOUT])
async def test_a_final_failure_fails_what_needs_it_across_evaluations(
    world: World, kind: FailureKind
) -> None:
    first = await building(
        world, {"x": ["mid"], "mid": ["bad"], "bad": [], "y": ["only"], "only": []}, ["x", "y"]
    )
    second = await building(world, {"z": ["mid", "side"], "side": [], "mid": ["bad"], "bad": []}, ["z"])
    await world.fail("bad", kind)
    await world.check()
    statuses = await world.statuses()
    assert {statuses[name] for name in ("mid", "x", "z")} == {S.DEPENDENCY_FAILED}
    assert statuses["side"] is S.SKIPPED
    assert await world.evaluation_status(second) is E.FAILED
    assert await world.evaluation_status(first) is E.BUILDING
    await world.build("only")
    await world.build("y")
    assert await world.evaluation_status(first) is E.FAILED


@pytest.mark.parametrize("ending", ["completed", "failed", "timed out", "lost"])
async def test_the_end_of_a_build_ends_the_need_below_it(world: World, ending: str) -> None:
    """Its input went while it ran, and is to be made again for it alone."""
    evaluation = await building(world, {"top": ["a"], "a": []}, ["top"])
    await world.build("a")
    for _ in range(9 if ending == "lost" else 0):
        await world.start("top")
        await world.apply(LoseWorker(WORKER))
    await world.start("top")
    await world.apply(DemotePath((hash_part("a"),), world.now))
    assert await world.status("a") is S.QUEUED
    assignment = world.open["top"]
    match ending:
        case "completed":
            await world.commit(nar(out("top")))
            assert await world.apply(BuildCompleted(assignment, LIMITS))
        case "failed":
            await world.apply(BuildFailed(assignment, K.PERMANENT, "no", LIMITS))
        case "timed out":
            await world.apply(BuildFailed(assignment, K.TIMEOUT, "no", LIMITS))
        case "lost":
            await world.apply(LoseWorker(WORKER))
    await world.check()
    assert await world.status("a") is S.SKIPPED
    expected = E.COMPLETED if ending == "completed" else E.FAILED
    assert await world.evaluation_status(evaluation) is expected


@pytest.mark.parametrize("back", ["canceled", "declined", "lost", "restart", "tried again"])
async def test_what_comes_back_and_is_needed_by_nobody_is_skipped(world: World, back: str) -> None:
    await building(world, {"top": ["x", "bad"], "x": [], "bad": []}, ["top"])
    await world.start("x")
    assignment = world.open.pop("x")
    if back == "tried again":
        await world.apply(BuildFailed(assignment, K.TRANSIENT, "no", LIMITS))
    await world.fail("bad")
    match back:
        case "canceled":
            await world.apply(BuildFailed(assignment, K.CANCELED, "the worker stops", LIMITS))
        case "declined":
            await world.apply(ReturnAssignment(assignment))
        case "lost":
            await world.apply(LoseWorker(WORKER))
        case "restart":
            await recover_interrupted_work(world.connection, world.now)
        case "tried again":
            world.now += timedelta(hours=1)
            assert await world.apply(RetryTransient(LIMITS)) == 1
    await world.check()
    assert await world.status("x") is S.SKIPPED


async def test_a_reference_is_waited_for_like_an_input(world: World) -> None:
    evaluation = await world.evaluation()
    await world.commit(nar(out("app", "dev"), [out("lib")]))
    await world.record(evaluation, {"lib": []}, entries=["lib"])
    outputs = (OutputPath("out", out("app")), OutputPath("dev", out("app", "dev")))
    await world.record(evaluation, {"app": []}, entries=["app"], outputs=outputs)
    await world.end_stream(evaluation)
    await world.check()
    assert await world.status("app") is S.CREATED
    await world.fail("lib")
    assert await world.status("app") is S.DEPENDENCY_FAILED


async def test_an_oom_is_tried_again_and_measured(world: World) -> None:
    await building(world, {"a": []}, ["a"])
    await world.start("a")
    metrics = BuildMetrics(5, oom_killed=True)
    await world.apply(BuildFailed(world.open.pop("a"), K.PERMANENT, "killed", LIMITS, True, metrics))
    assert await world.status("a") is S.FAILED_TRANSIENT
    assert await attempts(world) == [(AttemptOutcome.FAILED, AttemptReason.OOM)]
    assert await world.value("SELECT oom_killed FROM derivation_metric")


async def test_a_failure_message_is_cut_between_characters(world: World) -> None:
    await building(world, {"a": []}, ["a"])
    await world.start("a")
    await world.apply(BuildFailed(world.open.pop("a"), K.PERMANENT, "ü" * 8000, LIMITS))
    message = await world.value("SELECT failure_message FROM build_attempt")
    assert message == "ü" * 4096 + " [cut]"


async def test_a_substitution_given_up_is_built_with_its_inputs(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"relay": ["input"], "input": []}, entries=["relay"])
    # As the probe of an upstream cache would leave it.
    relay = await world.id("relay")
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    await world.connection.execute(
        f"UPDATE derivation_build SET cache_available = true WHERE derivation = {relay}".encode()
    )
    evaluation = await world.evaluation()
    await world.record(evaluation, {"relay": ["input"], "input": []}, entries=["relay"])
    await world.end_stream(evaluation)
    await world.check()
    assert (await world.status("relay"), await world.status("input")) == (S.QUEUED, S.SKIPPED)
    for expected in (S.QUEUED, S.CREATED):
        assignment = await world.apply(ClaimBuild(relay, True, WORKER, "w"))
        assert assignment is not None
        await world.apply(BuildFailed(assignment, K.SUBSTITUTE_UNAVAILABLE, "404", LIMITS))
        await world.check()
        assert await world.status("relay") is expected
    assert await world.status("input") is S.QUEUED
    await world.build("input")
    await world.build("relay")
    assert await world.evaluation_status(evaluation) is E.COMPLETED


async def test_a_retry_waits_its_turn_whatever_the_settings_say_now(world: World) -> None:
    await building(world, {"a": []}, ["a"])
    many = RetryLimits(max_attempts=30, retry_backoff_secs=1)
    for _ in range(4):
        await world.claim("a")
        await world.apply(BuildFailed(world.open.pop("a"), K.TRANSIENT, "no", many))
        world.now += timedelta(days=1)
        # Fewer attempts are allowed by now: what waits for one is not forgotten.
        assert await world.apply(RetryTransient(RetryLimits(max_attempts=1, retry_backoff_secs=1))) == 1
    assert await world.value("SELECT attempt FROM derivation_build") == 4


async def test_a_declined_job_that_had_begun_goes_back(world: World) -> None:
    await building(world, {"a": []}, ["a"])
    await world.start("a")
    await world.apply(ReturnAssignment(world.open.pop("a")))
    await world.check()
    assert await world.status("a") is S.QUEUED
    assert world.moves.returned == {f"build:{await world.id('a')}"}
    assert await attempts(world) == [(AttemptOutcome.ABORTED, None)]


async def test_a_lost_worker_loses_only_its_own(world: World) -> None:
    other = attrs.evolve(ClaimBuild(0, False, WORKER, "w"), worker=type(WORKER)(int=99))
    await building(world, {"a": [], "b": []}, ["a", "b"])
    await world.start("a")
    held = await world.apply(attrs.evolve(other, derivation=await world.id("b")))
    assert held is not None
    assert await world.apply(BuildStarted(held))
    await world.apply(LoseWorker(WORKER))
    await world.check()
    assert (await world.status("a"), await world.status("b")) == (S.QUEUED, S.BUILDING)


async def test_what_a_lost_worker_had_uploaded_is_not_built_again(world: World) -> None:
    await building(world, {"top": ["a"], "a": []}, ["top"])
    await world.start("a")
    await world.commit(nar(out("a")))
    await world.apply(LoseWorker(WORKER))
    await world.check()
    assert (await world.status("a"), await world.status("top")) == (S.SUBSTITUTED, S.QUEUED)


async def test_any_other_end_breaks_a_row_of_lost_workers(world: World) -> None:
    await building(world, {"a": []}, ["a"])
    for ending in [K.CANCELED, *[None] * 9, K.CANCELED, *[None] * 9]:
        await world.start("a")
        if ending is None:
            await world.apply(LoseWorker(WORKER))
        else:
            await world.apply(BuildFailed(world.open["a"], ending, "stopping", LIMITS))
        assert await world.status("a") is S.QUEUED
    await world.start("a")
    await world.apply(LoseWorker(WORKER))
    assert await world.status("a") is S.FAILED_PERMANENT


async def test_a_flag_is_not_spread_without_its_lock(world: World) -> None:
    tx = Transaction(world.connection, world.now)
    async with world.connection.transaction():
        lock = await locks.lock_shared_builds(tx, [1, 2])
        with pytest.raises(locks.LockNotHeld, match="not locked"):
            await became_fetchable(tx, lock, [3])
        later = Transaction(world.connection, world.now + timedelta(seconds=1))
        with pytest.raises(locks.LockNotHeld, match="another transaction"):
            await became_fetchable(later, lock, [1])


def test_moves_fold_to_what_changed() -> None:
    moves = Moves()
    moves.change([BuildChange(1, S.CREATED, S.QUEUED), BuildChange(2, S.QUEUED, S.CREATED)])
    moves.change([BuildChange(1, S.QUEUED, S.BUILDING), BuildChange(2, S.CREATED, S.QUEUED)])
    assert moves.builds == {1: BuildChange(1, S.CREATED, S.BUILDING)}
    assert (moves.queued, moves.unqueued) == ([], [])
    later = Moves()
    later.change([BuildChange(1, S.BUILDING, S.QUEUED), BuildChange(3, S.QUEUED, S.ABORTED)])
    moves.merge(later)
    assert moves.builds[1] == BuildChange(1, S.CREATED, S.QUEUED)
    assert (moves.queued, moves.unqueued) == ([1], [3])
    assert moves.unsettled == {1, 2, 3}
    assert Moves().empty
    assert not moves.empty


# --- evaluations ----------------------------------------------------------------------------------


async def new(world: World) -> tuple[int, int]:
    """An evaluation handed to a worker, and the assignment."""
    evaluation = await world.apply(CreateEvaluation("main", Repository("git+https://example.org/x")))
    assignment = await world.apply(ClaimEvaluation(evaluation, WORKER, "w"))
    assert assignment is not None
    return evaluation, assignment


async def test_the_phases_of_an_evaluation_leave_their_times(world: World) -> None:
    evaluation, assignment = await new(world)
    for phase in (E.FETCHING, E.EVALUATING_FLAKE, E.EVALUATING_DERIVATION):
        assert await world.apply(EvaluationPhase(assignment, phase))
        assert await world.evaluation_status(evaluation) is phase
    assert await world.apply(EvaluationPhase(assignment, E.FETCHING))  # late: it stays where it is
    assert await world.evaluation_status(evaluation) is E.EVALUATING_DERIVATION
    await world.apply(EvalStreamCompleted(assignment))
    assert await world.evaluation_status(evaluation) is E.COMPLETED  # nothing to build
    stamps = "fetch_started_at, eval_flake_started_at, eval_drv_started_at, building_started_at, finished_at"
    (row,) = await fetch_all(world.connection, f"SELECT {stamps} FROM evaluation")
    assert list(row) == sorted(row)
    phases = await world.value("SELECT array_agg(status ORDER BY id) FROM phase_event")
    assert phases == [
        E.FETCHING,
        E.EVALUATING_FLAKE,
        E.EVALUATING_DERIVATION,
        E.BUILDING,
        E.COMPLETED,
    ]


async def test_a_phase_of_a_closed_assignment_or_a_dead_evaluation_stops_the_job(world: World) -> None:
    evaluation, assignment = await new(world)
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    assert not await world.apply(EvaluationPhase(assignment, E.FETCHING))
    await world.apply(EvalFailed(assignment, K.ABORTED, "aborted by server", 3))
    assert not await world.apply(EvaluationPhase(assignment, E.EVALUATING_FLAKE))
    assert await world.evaluation_status(evaluation) is E.ABORTED


@pytest.mark.parametrize("phase", [None, E.FETCHING])
async def test_a_job_that_ends_before_it_evaluated_anything_failed(world: World, phase: Any) -> None:
    evaluation, assignment = await new(world)
    if phase is not None:
        await world.apply(EvaluationPhase(assignment, phase))
    await world.apply(EvalStreamCompleted(assignment))
    assert await world.evaluation_status(evaluation) is E.FAILED
    assert "without evaluating" in await world.value("SELECT message FROM evaluation_message")


async def test_an_error_message_fails_an_evaluation_at_its_end_only(world: World) -> None:
    evaluation = await world.evaluation()
    await world.apply(AddMessage(evaluation, MessageLevel.ERROR, "nix-eval:x", "no such attribute"))
    await world.apply(AddMessage(evaluation, MessageLevel.ERROR, "nix-eval:x", "no such attribute"))
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.end_stream(evaluation)
    assert await world.evaluation_status(evaluation) is E.BUILDING
    await world.build("a")
    assert await world.evaluation_status(evaluation) is E.FAILED
    assert await world.value("SELECT count(*) FROM evaluation_message") == 1


async def test_a_warning_fails_nothing(world: World) -> None:
    evaluation = await world.evaluation()
    await world.apply(Record(evaluation, warnings=("careful",)))
    await world.end_stream(evaluation)
    assert await world.evaluation_status(evaluation) is E.COMPLETED


async def test_an_outage_is_tried_again_within_the_attempts(world: World) -> None:
    evaluation, assignment = await new(world)
    for expected in (E.QUEUED, E.QUEUED, E.FAILED):
        await world.apply(EvaluationPhase(assignment, E.FETCHING))
        await world.apply(EvalFailed(assignment, K.TRANSIENT, "the connection broke", 3))
        assert await world.evaluation_status(evaluation) is expected
        if expected is E.QUEUED:
            assert world.moves.returned == {f"eval:{evaluation}"}
            claimed = await world.apply(ClaimEvaluation(evaluation, WORKER, "w"))
            assert claimed is not None
            assignment = claimed


async def test_canceled_jobs_and_lost_workers_are_no_attempts_but_count_as_dispatches(world: World) -> None:
    evaluation, assignment = await new(world)
    for _ in range(5):
        await world.apply(EvaluationPhase(assignment, E.FETCHING))
        await world.apply(EvalFailed(assignment, K.CANCELED, "the worker stops", 3))
        assert await world.evaluation_status(evaluation) is E.QUEUED
        assignment = await world.apply(ClaimEvaluation(evaluation, WORKER, "w")) or 0
    for phase in (None, E.FETCHING, E.EVALUATING_FLAKE, None):
        if phase is not None:
            await world.apply(EvaluationPhase(assignment, phase))
        await world.apply(LoseWorker(WORKER))
        if phase is not None:
            capability = "fetch" if phase is E.FETCHING else "eval"
            reason = {"kind": "eval_workers", "capability": capability, "connected_workers": 0}
            assert await world.value("SELECT waiting_reason FROM evaluation") == reason
            await world.apply(UnparkEvaluation(evaluation, E.QUEUED))
        assert await world.evaluation_status(evaluation) is E.QUEUED
        assignment = await world.apply(ClaimEvaluation(evaluation, WORKER, "w")) or 0
    await world.apply(LoseWorker(WORKER))  # the tenth dispatch
    assert await world.evaluation_status(evaluation) is E.FAILED
    assert "10 workers were lost" in await world.value("SELECT message FROM evaluation_message")


async def test_any_other_failure_of_an_evaluation_is_its_end(world: World) -> None:
    evaluation, assignment = await new(world)
    await world.apply(EvaluationPhase(assignment, E.EVALUATING_FLAKE))
    await world.apply(EvalFailed(assignment, K.PERMANENT, "syntax error", 3))
    assert await world.evaluation_status(evaluation) is E.FAILED
    await world.apply(EvalFailed(assignment, K.PERMANENT, "again", 3))
    assert await world.value("SELECT array_agg(message) FROM evaluation_message") == ["syntax error"]


async def test_failing_an_evaluation_stops_its_job_and_keeps_its_builds(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.apply(FailEvaluation(evaluation, "fetch", "no source"))
    assert [abort.job_id for abort in world.moves.aborts] == [f"eval:{evaluation}"]
    assert await world.status("a") is S.QUEUED  # a failed evaluation still wants its entry points
    await world.check()
    await world.apply(FailEvaluation(evaluation, "fetch", "no source, again"))
    assert await world.value("SELECT count(*) FROM evaluation_message") == 1


async def test_an_evaluation_that_waits_for_a_worker_has_nothing_to_finish(world: World) -> None:
    """Its counters say zero, because its walk has not come to anything yet."""
    evaluation = await world.evaluation()
    await world.apply(LoseWorker(WORKER))
    assert not await world.apply(FinishEvaluation(evaluation))
    assert await world.evaluation_status(evaluation) is EvaluationStatus.WAITING


async def test_a_park_moves_only_what_it_was_judged_on(world: World) -> None:
    evaluation, assignment = await new(world)
    reason = {"kind": "eval_workers", "capability": "fetch", "connected_workers": 0}
    await world.apply(EvaluationPhase(assignment, E.FETCHING))
    await world.apply(ParkEvaluation(evaluation, E.QUEUED, reason))
    assert await world.evaluation_status(evaluation) is E.FETCHING
    await world.apply(EvalFailed(assignment, K.CANCELED, "stop", 3))
    await world.apply(ParkEvaluation(evaluation, E.QUEUED, reason))
    assert await world.evaluation_status(evaluation) is E.WAITING
    await world.apply(UnparkEvaluation(evaluation, E.QUEUED))
    assert await world.evaluation_status(evaluation) is E.QUEUED
    assert await world.value("SELECT waiting_reason IS NULL AND waiting_since IS NULL FROM evaluation")
    await world.apply(UnparkEvaluation(evaluation, E.BUILDING))
    assert await world.evaluation_status(evaluation) is E.QUEUED


async def test_a_park_that_goes_on_keeps_its_time(world: World) -> None:
    evaluation = await building(world, {"a": []}, ["a"])
    since = "SELECT waiting_since FROM evaluation"
    await world.apply(ParkEvaluation(evaluation, E.BUILDING, {"kind": "workers", "connected_workers": 1}))
    parked = await world.value(since)
    await world.apply(ParkEvaluation(evaluation, E.WAITING, {"kind": "workers", "connected_workers": 1}))
    assert world.moves.empty  # the same JSON is not written again
    await world.apply(
        ParkEvaluation(evaluation, E.WAITING, {"kind": "workers", "connected_workers": 2}, True)
    )
    assert world.moves.progressed == {evaluation}
    assert await world.value(since) == parked
    await world.apply(ParkEvaluation(evaluation, E.WAITING, {"kind": "graph_stuck"}))
    assert await world.value(since) == world.now


async def test_a_parked_evaluation_can_end(world: World) -> None:
    evaluation = await building(world, {"a": []}, ["a"])
    await world.apply(ParkEvaluation(evaluation, E.BUILDING, {"kind": "workers"}))
    await world.build("a")
    assert await world.evaluation_status(evaluation) is E.COMPLETED
    await world.check()


async def test_an_evaluation_is_not_finished_while_something_blocks_it(world: World) -> None:
    evaluation = await building(world, {"a": []}, ["a"])
    assert not await world.apply(FinishEvaluation(evaluation))
    assert not await world.apply(FinishEvaluation(10**9))
    # Counters that say zero wrongly are not believed, and counted afresh.
    await world.connection.execute("UPDATE evaluation SET active_shared_builds = active_shared_builds - 1")
    assert not await world.apply(FinishEvaluation(evaluation))
    await world.check()


async def test_what_is_wanted_no_more_lets_an_evaluation_end_though_nothing_moves(world: World) -> None:
    """`flaky` is to be tried again, and the second names it without any use for it."""
    first, second = await world.evaluation(), await world.evaluation()
    await world.record(first, {"flaky": []}, entries=["flaky"])
    await world.commit(nar(out("held")))
    await world.record(second, {"held": ["flaky"], "x": []}, entries=["held", "x"])
    await world.end_stream(second)
    await world.build("x")
    await world.fail("flaky", K.TRANSIENT)
    assert await world.evaluation_status(second) is E.BUILDING
    await world.apply(AbortEvaluation(first, "by a person"))
    assert await world.status("flaky") is S.FAILED_TRANSIENT
    assert await world.evaluation_status(second) is E.COMPLETED
    await world.check()


async def test_an_abort_says_why_once(world: World) -> None:
    evaluation = await world.evaluation()
    assert await world.apply(AbortEvaluation(evaluation, "no worker", warning="riscv64-linux: nobody"))
    assert not await world.apply(AbortEvaluation(evaluation, "again", warning="again"))
    messages = await fetch_all(
        world.connection, "SELECT level, message FROM evaluation_message ORDER BY level"
    )
    assert messages == [(MessageLevel.WARNING, "riscv64-linux: nobody"), (MessageLevel.NOTICE, "no worker")]


async def test_what_was_aborted_before_and_is_not_needed_now_fails_nobody(world: World) -> None:
    first = await building(world, {"held": ["tool"], "tool": []}, ["held"])
    await world.apply(AbortEvaluation(first, "by a person"))
    await world.commit(nar(out("held")))
    second = await building(world, {"held": ["tool"], "tool": []}, ["held"])
    await world.check()
    assert await world.statuses() == {"held": S.SUBSTITUTED, "tool": S.SKIPPED}
    assert await world.evaluation_status(second) is E.COMPLETED


async def test_two_evaluations_and_one_aborts_while_both_evaluate(world: World) -> None:
    first, second = await world.evaluation(), await world.evaluation()
    await world.record(first, {"x": ["shared"], "shared": ["deep"], "deep": []}, entries=["x"])
    await world.apply(Record(second, (), (EntryPoint("shared", drv("shared")),)))
    await world.start("deep")
    await world.apply(AbortEvaluation(first, "by a person"))
    await world.check()
    assert await world.statuses() == {"x": S.ABORTED, "shared": S.CREATED, "deep": S.BUILDING}
    await world.end_stream(second)
    await world.commit(nar(out("deep")))
    await world.apply(BuildCompleted(world.open.pop("deep"), LIMITS))
    await world.build("shared")
    await world.check()
    assert await world.evaluation_status(second) is E.COMPLETED
