"""Evaluations and builds as JSON: rows in, plain values out. Layer: web; docs/api.md has the shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from gradient.graph import build_reads, evaluation_reads
from gradient.graph.build_reads import BuildRow
from gradient.graph.evaluation_reads import EntryPointRow, EvaluationRow, EvaluationStats, MessageRow
from gradient.graph.failure_causes import Cause, failure_causes
from gradient.graph.pg import Connection
from gradient.model import BuildStatus, MessageLevel
from gradient.passes.waiting import words as waiting_words
from gradient.web.words import why_not_built

EVAL_FAILED: Final = "EvalFailed"
# The source of a message about an attribute (the worker writes it).
ATTRIBUTE_SOURCE: Final = "nix-eval:"


@attrs.frozen
class Snapshot:
    """Everything there is to show of an evaluation at one moment."""

    evaluation: EvaluationRow
    stats: EvaluationStats | None
    entry_points: Sequence[EntryPointRow]
    messages: Sequence[MessageRow]
    builds: Sequence[BuildRow]
    causes: Mapping[int, Sequence[Cause]]


async def read_snapshot(connection: Connection, evaluation: int) -> Snapshot | None:
    """Read it, as of one moment; None when there is no such evaluation."""
    async with connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        row = await evaluation_reads.evaluation(connection, evaluation)
        if row is None:
            return None
        builds = await build_reads.builds_of_evaluation(connection, evaluation)
        return Snapshot(
            evaluation=row,
            stats=await evaluation_reads.evaluation_stats(connection, evaluation),
            entry_points=await evaluation_reads.entry_points(connection, evaluation),
            messages=await evaluation_reads.messages(connection, evaluation),
            builds=builds,
            causes=await causes_of(connection, builds),
        )


async def causes_of(connection: Connection, builds: Iterable[BuildRow]) -> Mapping[int, Sequence[Cause]]:
    """The causes of those builds whose dependency failed."""
    failed = [build.build for build in builds if build.status is BuildStatus.DEPENDENCY_FAILED]
    return await failure_causes(connection, failed)


def snapshot_json(snapshot: Snapshot) -> dict[str, Any]:
    """The whole."""
    return {
        **evaluation_json(snapshot.evaluation),
        "entry_points": entry_points_json(snapshot.entry_points, snapshot.messages),
        "messages": [message_json(message) for message in snapshot.messages],
        "builds": [build_json(build, snapshot.causes.get(build.build, ())) for build in snapshot.builds],
        "builds_total": snapshot.evaluation.named,
        "stats": attrs.asdict(snapshot.stats) if snapshot.stats else {},
    }


def evaluation_json(row: EvaluationRow) -> dict[str, Any]:
    """An evaluation without what it consists of: the short row of a list."""
    return {
        "evaluation": row.id,
        **state_json(row),
        "repository": row.repository,
        "commit": row.commit,
        "wildcards": row.wildcards,
        "comment": row.comment,
        "created_at": row.created_at,
        "finished_at": row.finished_at,
    }


def state_json(row: EvaluationRow) -> dict[str, Any]:
    """Where an evaluation stands: the body of an `evaluation` event."""
    return {
        "status": row.status.label,
        "waiting": waiting_json(row),
        "graph_version": row.graph_version,
        "counters": {
            "named": row.named,
            "active": row.active,
            "failed": row.failed,
            "queued": row.queued,
            "building": row.building,
        },
    }


def waiting_json(row: EvaluationRow) -> dict[str, Any] | None:
    """Why it waits; None when it does not."""
    if row.waiting_reason is None:
        return None
    return {
        "reason": row.waiting_reason,
        "words": waiting_words(row.waiting_reason),
        "since": row.waiting_since,
    }


def entry_points_json(rows: Iterable[EntryPointRow], messages: Iterable[MessageRow]) -> list[dict[str, Any]]:
    """The attributes by name, those that failed to evaluate among them."""
    points = [
        {
            "attr": row.attr,
            "status": row.status.label,
            "drv_path": row.drv_path,
            "outputs": row.outputs,
            "build": row.build,
        }
        for row in rows
    ]
    failed = failed_attributes(messages) - {point["attr"] for point in points}
    points += [
        {"attr": attr, "status": EVAL_FAILED, "drv_path": None, "outputs": {}, "build": None}
        for attr in failed
    ]
    return sorted(points, key=lambda point: str(point["attr"]))


def failed_attributes(messages: Iterable[MessageRow]) -> set[str]:
    """Attributes that an error message is about."""
    return {
        message.source.removeprefix(ATTRIBUTE_SOURCE)
        for message in messages
        if message.level is MessageLevel.ERROR and message.source.startswith(ATTRIBUTE_SOURCE)
    }


def message_json(row: MessageRow) -> dict[str, Any]:
    """A message."""
    return {"level": row.level.name.capitalize(), "source": row.source, "message": row.message}


def build_json(row: BuildRow, causes: Sequence[Cause]) -> dict[str, Any]:
    """A build of an evaluation."""
    return {
        "build": row.build,
        "name": row.name,
        "drv_path": row.drv_path,
        "status": row.status.label,
        "architecture": row.architecture,
        "at": row.updated_at,
        "started_at": row.started_at,
        "finished_at": row.finished_at,
        "error": row.error,
        "attempts": row.attempts,
        "worker": row.worker,
        "reason": why_not_built(row, causes),
        "causes": [{"build": cause.build, "name": cause.name} for cause in causes],
    }


def build_event_json(row: BuildRow, causes: Sequence[Cause]) -> dict[str, Any]:
    """What a build is now: the body of a `build` event."""
    return {
        "build": row.build,
        "name": row.name,
        "status": row.status.label,
        "worker": row.worker,
        "at": row.updated_at,
        "started_at": row.started_at,
        "finished_at": row.finished_at,
        "error": row.error,
        "reason": why_not_built(row, causes),
    }
