"""From a worker's report to the writer message that applies it: one small function a report. Pure.

Source: seed "Jobs", Reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import singledispatch
from itertools import islice
from typing import Any, Final

import attrs

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
from gradient.graph.record import Record
from gradient.graph.requeue import ReturnAssignment
from gradient.graph.transaction import Message
from gradient.model import EvaluationStatus, JobKind
from gradient.nix.store_path import InvalidStorePath, StorePath
from gradient.passes.pool import ActiveJob
from gradient.wire import messages as wire

# Missing inputs that one failure may name: a worker stops at the first it cannot get, or at one round's.
MAX_MISSING: Final = 1000

PHASES: Final = {
    wire.Fetching: EvaluationStatus.FETCHING,
    wire.EvaluatingFlake: EvaluationStatus.EVALUATING_FLAKE,
    wire.EvaluatingDerivations: EvaluationStatus.EVALUATING_DERIVATION,
}


# Reports that belong to one kind of job; every other belongs to both.
REPORTS_OF: Final = {
    JobKind.EVAL: frozenset(
        {
            *PHASES,
            wire.FetchResult,
            wire.EvalResult,
            wire.EvalMessage,
            wire.EvalStats,
            wire.EvalProgress,
            wire.ImportRequest,
        }
    ),
    JobKind.BUILD: frozenset({wire.Building, wire.Stage, wire.BuildOutput, wire.LogChunk}),
}


def fits(report: wire.Report | wire.ImportRequest, kind: JobKind) -> bool:
    """Whether a job of this kind may send this: ids of evaluations and of builds must not meet."""
    return not any(type(report) in reports for other, reports in REPORTS_OF.items() if other is not kind)


@singledispatch
def writer_message(report: object, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    """The writer message of a report about `job`."""
    raise TypeError(f"no report: {type(report).__name__}")


@writer_message.register(wire.Fetching)
@writer_message.register(wire.EvaluatingFlake)
@writer_message.register(wire.EvaluatingDerivations)
def _phase(report: wire.Report, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    return EvaluationPhase(job.assignment, PHASES[type(report)])


@writer_message.register
def _fetch_result(report: wire.FetchResult, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    if report.flake_source is None:
        return FailEvaluation(job.subject, "fetch", "the worker fetched no source")
    return StoreFetchResult(job.subject, report.flake_source)


@writer_message.register
def _eval_result(report: wire.EvalResult, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    return Record(job.subject, report.derivations, report.entry_points, report.warnings, report.errors)


@writer_message.register
def _eval_message(report: wire.EvalMessage, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    return AddMessage(job.subject, report.level, report.source, report.message)


@writer_message.register
def _eval_stats(report: wire.EvalStats, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    stats = attrs.asdict(report, filter=lambda field, _: field.name not in {"job_id", "assignment_id"})
    return StoreEvalStats(job.subject, **stats)


@writer_message.register
def _building(report: wire.Building, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    return BuildStarted(job.assignment)


@writer_message.register
def _build_output(report: wire.BuildOutput, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    return StoreBuildOutput(job.assignment, report.outputs, report.substituted, report.metrics)


@writer_message.register
def _declined(report: wire.AssignJobResponse, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    return ReturnAssignment(job.assignment)


@writer_message.register
def _completed(report: wire.JobCompleted, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    if job.kind is JobKind.EVAL:
        return EvalStreamCompleted(job.assignment, report.spans)
    return BuildCompleted(job.assignment, limits, report.spans)


@writer_message.register
def _failed(report: wire.JobFailed, job: ActiveJob, limits: RetryLimits) -> Message[Any]:
    missing = _hash_parts(report.missing_paths)
    if job.kind is JobKind.EVAL:
        return EvalFailed(
            job.assignment, report.kind, report.error, limits.max_attempts, report.spans, missing
        )
    killed = report.metrics is not None and report.metrics.oom_killed
    return BuildFailed(
        job.assignment, report.kind, report.error, limits, killed, report.metrics, report.spans, missing
    )


def _hash_parts(paths: Iterable[str]) -> tuple[str, ...]:
    """Of the store paths among `paths`; a worker may say anything."""
    parts = set()
    for path in islice(paths, MAX_MISSING):
        with suppress(InvalidStorePath):
            parts.add(StorePath.parse(path).hash_part)
    return tuple(sorted(parts))
