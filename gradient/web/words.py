"""States in words for people. Layer: web, pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from gradient.graph.build_reads import BuildRow
from gradient.graph.failure_causes import Cause
from gradient.model import AttemptReason, BuildStatus

# CSI sequences (colours, cursor), OSC sequences (titles, links), two-character escapes. Source: ECMA-48.
_ANSI: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
# What no browser shows, and none should interpret; tabs and line breaks stay.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

REASONS: Final = {
    AttemptReason.SUBSTITUTE_UNAVAILABLE: "the upstream cache did not have it",
    AttemptReason.OOM: "it ran out of memory",
    AttemptReason.DISK_FULL: "the worker's disk was full",
    AttemptReason.NETWORK: "the network failed",
    AttemptReason.BUILDER_CRASH: "the builder crashed",
    AttemptReason.BUILDER_NONZERO: "the builder failed",
    AttemptReason.WALL_CLOCK_TIMEOUT: "it took too long",
    AttemptReason.SILENT_TIMEOUT: "it was silent for too long",
    AttemptReason.INPUTS_UNAVAILABLE: "its inputs could not be fetched",
    AttemptReason.WORKER_LOST: "its worker was lost",
    AttemptReason.NOT_ENOUGH_RESOURCES: "the worker had too little of something",
}


# What a status is called on a page: the labels of the API are names for programs.
STATUS_WORDS: Final = {
    "Completed": "built",
    "Substituted": "substituted",
    "Queued": "waiting",
    "Building": "building",
    "FailedPermanent": "failed",
    "FailedTimeout": "timed out",
    "FailedTransient": "will be retried",
    "DependencyFailed": "dependency failed",
    "EvalFailed": "does not evaluate",
    "Aborted": "aborted",
    "Skipped": "not needed",
}


def why_not_built(build: BuildRow, causes: Sequence[Cause]) -> str | None:
    """Why a build waits, or why it was not tried; None for one that runs or ended by itself."""
    match build.status:
        case BuildStatus.DEPENDENCY_FAILED:
            return _because(causes)
        case BuildStatus.QUEUED:
            return f"waits for a free worker for {_kind(build)}"
        case BuildStatus.FAILED_TRANSIENT:
            return f"is tried again after a pause (attempt {build.attempt} failed)"
        case BuildStatus.CREATED:
            return _unmet_condition(build)
        case _:
            return None


def _because(causes: Sequence[Cause]) -> str:
    if not causes:
        return "a dependency failed"
    names = ", ".join(cause.name for cause in causes)
    aborted = all(cause.status is BuildStatus.ABORTED for cause in causes)
    return f"{names} {'was aborted' if aborted else 'failed'}"


def _unmet_condition(build: BuildRow) -> str:
    """The first queue condition that does not hold, in the order they come true."""
    if not build.wanted:
        return "is not needed by anything that is left to build"
    if not build.walked:
        return "waits for its derivation to be recorded"
    if not build.probed:
        return "waits for the answer of the upstream caches"
    if build.blocking_deps:
        return f"waits for {count(build.blocking_deps, 'dependency', 'dependencies')}"
    if not build.drv_present:
        return "waits for its .drv file to be uploaded"
    return "is about to be queued"


def _kind(build: BuildRow) -> str:
    features = ", ".join(build.required_features)
    return f"{build.architecture} with {features}" if features else build.architecture


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 build`, `2 builds`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def duration(start: datetime | None, end: datetime | None) -> str:
    """`3 s`, `2 min 5 s`, `1 h 3 min`; "" while either is unknown."""
    if start is None or end is None:
        return ""
    minutes, seconds = divmod(max(0, round((end - start).total_seconds())), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def plain_log(data: bytes) -> str:
    """A log as text: without colours and control characters, what `\\r` overwrote left out."""
    text = _ANSI.sub("", data.decode(errors="replace").replace("\r\n", "\n"))
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROL.sub("", "\n".join(lines))
