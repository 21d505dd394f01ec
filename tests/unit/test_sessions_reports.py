"""Reports before they reach the graph writer: which merge, which a job may send, what they become."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import attrs
import pytest
import trio

from gradient.graph.build_failures import BuildFailed
from gradient.graph.build_outputs import StoreBuildOutput
from gradient.graph.builds import BuildCompleted, BuildStarted
from gradient.graph.evaluation_end import FailEvaluation
from gradient.graph.evaluation_reports import (
    EvalFailed,
    EvalStreamCompleted,
    EvaluationPhase,
    StoreEvalStats,
    StoreFetchResult,
)
from gradient.graph.failure import RetryLimits
from gradient.graph.messages import AddMessage
from gradient.graph.record import MAX_BATCH, Record, Recorded
from gradient.graph.requeue import ReturnAssignment
from gradient.graph.writer import Reply, _Request
from gradient.model import (
    BuildMetrics,
    BuildStage,
    CachedSource,
    DiscoveredDerivation,
    EntryPoint,
    EvaluationStatus,
    FailureKind,
    JobKind,
    MessageLevel,
)
from gradient.passes.pool import ActiveJob, Worker
from gradient.sessions.report_messages import fits, writer_message
from gradient.sessions.reports import Received, ReportApplier, merged
from gradient.wire import messages as wire

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EVAL = ActiveJob("eval:7", 1, JobKind.EVAL, 7, "evaluation 7", NOW)
BUILD = ActiveJob("build:9", 2, JobKind.BUILD, 9, "n9", NOW)
LIMITS = RetryLimits()


def drvs(count: int, start: int = 0) -> tuple[DiscoveredDerivation, ...]:
    return tuple(DiscoveredDerivation(f"d{start + i}", (), (), (), "x") for i in range(count))


def batch(derivations: int, start: int = 0, job: ActiveJob = EVAL, **fields: Any) -> Received:
    report = wire.EvalResult(job.job_id, job.assignment, drvs(derivations, start), **fields)
    return Received(job, report)


def sizes(received: list[Received]) -> list[int]:
    return [len(r.report.derivations) if isinstance(r.report, wire.EvalResult) else -1 for r in received]


def test_consecutive_batches_of_a_job_merge_in_order() -> None:
    (one,) = merged([batch(2), batch(3, 2, warnings=("w",)), batch(0, errors=("e",)), batch(1, 5)])
    assert one.report == wire.EvalResult("eval:7", 1, drvs(6), (), ("w",), ("e",))


def test_up_to_the_limit() -> None:
    assert sizes(merged([batch(MAX_BATCH - 1), batch(1), batch(1)])) == [MAX_BATCH, 1]
    assert sizes(merged([batch(MAX_BATCH + 1), batch(1)])) == [MAX_BATCH + 1, 1]
    points = tuple(EntryPoint(str(i), "d") for i in range(MAX_BATCH))
    assert sizes(merged([batch(1), batch(1, entry_points=points)])) == [1, 1]


def test_nothing_merges_over_another_report_or_another_job() -> None:
    message = Received(EVAL, wire.EvalMessage("eval:7", 1, MessageLevel.ERROR, "s", "m"))
    assert sizes(merged([batch(1), message, batch(1), batch(1)])) == [1, -1, 2]
    asked = Received(EVAL, wire.ImportRequest("eval:7", 1, 1, ("d",)))
    assert sizes(merged([batch(1), asked, batch(1)])) == [1, -1, 1]
    other = ActiveJob("eval:7", 3, JobKind.EVAL, 7, "evaluation 7", NOW)
    assert sizes(merged([batch(1), batch(1, job=other)])) == [1, 1]
    assert merged([]) == []


@attrs.define(eq=False)
class Noting:
    """A writer that answers at once, and notes how many derivations each message holds."""

    busy: bool
    noted: list[int] = attrs.field(factory=list)

    def post(self, message: Record) -> Reply[Recorded]:
        self.noted.append(len(message.derivations))
        request = _Request(message)
        request.succeed(Recorded())
        return Reply(request)


@pytest.mark.parametrize(
    ("busy", "portions"), [(False, [MAX_BATCH, 250]), (True, [800, 800, 800, 800, 800, 800, 450])]
)
async def test_others_who_want_the_writer_wait_for_a_small_portion(busy: bool, portions: list[int]) -> None:
    worker = Worker(UUID(int=1), "w", frozenset({"main"}), wire.Capabilities(), NOW)
    worker.jobs[EVAL.job_id] = EVAL
    writer: Any = Noting(busy)
    unused: Any = None
    send, receive = trio.open_memory_channel[Received](105)
    for _ in range(105):
        send.send_nowait(batch(50))
    send.close()
    await ReportApplier(worker, writer, unused, unused, LIMITS).run(receive, unused, unused)
    assert writer.noted == portions


EVAL_ONLY: list[Any] = [
    wire.Fetching("j", 1),
    wire.FetchResult("j", 1, None),
    wire.EvaluatingFlake("j", 1),
    wire.EvaluatingDerivations("j", 1),
    wire.EvalResult("j", 1),
    wire.EvalMessage("j", 1, MessageLevel.ERROR, "s", "m"),
    wire.EvalStats("j", 1, 1, 1, 1),
    wire.EvalProgress("j", 1, 1, None, 1),
    wire.ImportRequest("j", 1, 1, ()),
]
BUILD_ONLY: list[Any] = [
    wire.Building("j", 1, 9),
    wire.Stage("j", 1, BuildStage.BUILD),
    wire.BuildOutput("j", 1, 9, (), False),
    wire.LogChunk("j", 1, b""),
]
BOTH: list[Any] = [wire.JobCompleted("j", 1), wire.JobFailed("j", 1, "e", FailureKind.PERMANENT)]


def test_each_kind_of_job_has_its_reports() -> None:
    for kind, mine, others in (
        (JobKind.EVAL, EVAL_ONLY, BUILD_ONLY),
        (JobKind.BUILD, BUILD_ONLY, EVAL_ONLY),
    ):
        assert all(fits(report, kind) for report in (*mine, *BOTH))
        assert not any(fits(report, kind) for report in others)
    known = {type(report) for report in (*EVAL_ONLY, *BUILD_ONLY, *BOTH)} - {wire.ImportRequest}
    assert known == set(wire.Report.__subclasses__())


SOURCE = CachedSource("/nix/store/s")
# What of it is no store path, the server cannot look for.
ONE, NONE = "1" * 32, "0" * 32
MISSING = (f"/nix/store/{ONE}-b", "/etc/passwd", "", f"/nix/store/{NONE}-a", f"/nix/store/{NONE}-c")


@pytest.mark.parametrize(
    ("job", "report", "message"),
    [
        (EVAL, wire.Fetching("", 1), EvaluationPhase(1, EvaluationStatus.FETCHING)),
        (EVAL, wire.EvaluatingFlake("", 1), EvaluationPhase(1, EvaluationStatus.EVALUATING_FLAKE)),
        (EVAL, wire.EvaluatingDerivations("", 1), EvaluationPhase(1, EvaluationStatus.EVALUATING_DERIVATION)),
        (EVAL, wire.FetchResult("", 1, SOURCE), StoreFetchResult(7, SOURCE)),
        (EVAL, wire.FetchResult("", 1, None), FailEvaluation(7, "fetch", "the worker fetched no source")),
        (EVAL, wire.EvalResult("", 1, drvs(1), (), ("w",), ("e",)), Record(7, drvs(1), (), ("w",), ("e",))),
        (
            EVAL,
            wire.EvalMessage("", 1, MessageLevel.ERROR, "s", "m"),
            AddMessage(7, MessageLevel.ERROR, "s", "m"),
        ),
        (EVAL, wire.EvalStats("", 1, 1, 2, 3, peak_rss_mb=4), StoreEvalStats(7, 1, 2, 3, peak_rss_mb=4)),
        (EVAL, wire.JobCompleted("", 1), EvalStreamCompleted(1)),
        (EVAL, wire.JobFailed("", 1, "e", FailureKind.CANCELED), EvalFailed(1, FailureKind.CANCELED, "e", 3)),
        (EVAL, wire.AssignJobResponse("", 1, False), ReturnAssignment(1)),
        (BUILD, wire.Building("", 2, 9), BuildStarted(2)),
        (BUILD, wire.BuildOutput("", 2, 9, (), True), StoreBuildOutput(2, (), True)),
        (BUILD, wire.JobCompleted("", 2), BuildCompleted(2, LIMITS)),
        (
            BUILD,
            wire.JobFailed("", 2, "e", FailureKind.PERMANENT, metrics=BuildMetrics(1, oom_killed=True)),
            BuildFailed(
                2, FailureKind.PERMANENT, "e", LIMITS, True, BuildMetrics(1, oom_killed=True)
            ),
        ),
        (
            BUILD,
            wire.JobFailed("", 2, "e", FailureKind.ABORTED),
            BuildFailed(2, FailureKind.ABORTED, "e", LIMITS),
        ),
        (
            BUILD,
            wire.JobFailed("", 2, "e", FailureKind.INPUTS_UNAVAILABLE, missing_paths=MISSING),
            BuildFailed(2, FailureKind.INPUTS_UNAVAILABLE, "e", LIMITS, missing_paths=(NONE, ONE)),
        ),
        (
            EVAL,
            wire.JobFailed("", 1, "e", FailureKind.INPUTS_UNAVAILABLE, missing_paths=MISSING),
            EvalFailed(1, FailureKind.INPUTS_UNAVAILABLE, "e", 3, missing_paths=(NONE, ONE)),
        ),
        (BUILD, wire.AssignJobResponse("", 2, False), ReturnAssignment(2)),
    ],
)  # fmt: skip
def test_what_a_report_becomes(job: ActiveJob, report: Any, message: Any) -> None:
    """By the job's own ids, never by what the report says."""
    assert writer_message(report, job, LIMITS) == message


def test_what_is_no_report_becomes_nothing() -> None:
    with pytest.raises(TypeError, match="no report: Draining"):
        writer_message(wire.Draining(), EVAL, LIMITS)
