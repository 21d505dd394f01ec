"""What pages and the API show of evaluations. Layer: graph, reads only.

Every read is bounded: a listing has a cap, and what is looked up per row is looked up after the cap.
Values come out as the tables hold them; wording is `web`'s.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import attrs

from gradient.graph.counters import UNFOLDED, counter
from gradient.graph.pg import Connection, fetch_as
from gradient.graph.predicates import live_evaluation
from gradient.graph.statements import Statement
from gradient.model import BuildStatus, EvaluationStatus, MessageLevel
from gradient.nix.derivation import drv_path
from gradient.nix.store_path import STORE_DIR

MAX_EVALUATIONS: Final = 500
MAX_ENTRY_POINTS: Final = 20_000
MAX_MESSAGES: Final = 1000

_EVALUATION: Final = f"""
    SELECT v.id, v.status, v.repository, v.commit, v.flake_source, v.wildcards, v.source_comment AS comment,
           v.waiting_reason, v.waiting_since, v.created_at, v.finished_at, v.graph_version,
           {counter("named")} AS named, {counter("active")} AS active, {counter("failed")} AS failed,
           {counter("queued")} AS queued, {counter("building")} AS building
    FROM evaluation v, {UNFOLDED}
"""
EVALUATION: Final = Statement("page_evaluation", f"{_EVALUATION} WHERE v.id = %(evaluation)s")
EVALUATIONS: Final = Statement("page_evaluations", f"{_EVALUATION} ORDER BY v.id DESC LIMIT %(limit)s")
ACTIVE_EVALUATIONS: Final = Statement(
    "page_active_evaluations",
    f"{_EVALUATION} WHERE {live_evaluation('v')} ORDER BY v.id DESC LIMIT {MAX_EVALUATIONS}",
)
EVALUATION_STATS: Final = Statement(
    "page_evaluation_stats",
    """
    SELECT attributes, derivations, failed_attributes, fetch_ms, eval_ms, walk_ms, peak_rss_mb
    FROM evaluation_metric WHERE evaluation = %(evaluation)s
    """,
)
ENTRY_POINTS: Final = Statement(
    "page_entry_points",
    f"""
    SELECT t.eval AS attr, d.id AS build, d.hash, d.name, coalesce(b.status, 0) AS status, o.names, o.paths
    FROM entry_point t
    JOIN derivation d ON d.id = t.derivation
    LEFT JOIN derivation_build b ON b.derivation = t.derivation
    CROSS JOIN LATERAL (
        SELECT coalesce(array_agg(x.name ORDER BY x.name), '{{}}') AS names,
               coalesce(array_agg(x.hash || '-' || x.package ORDER BY x.name), '{{}}') AS paths
        FROM derivation_output x WHERE x.derivation = t.derivation
    ) o
    WHERE t.evaluation = %(evaluation)s
    ORDER BY t.eval LIMIT {MAX_ENTRY_POINTS}
    """,
)
MESSAGES: Final = Statement(
    "page_messages",
    f"""
    SELECT id, level, source, message, created_at FROM evaluation_message
    WHERE evaluation = %(evaluation)s AND id > %(after)s ORDER BY id LIMIT {MAX_MESSAGES}
    """,
)


@attrs.frozen
class EvaluationRow:
    """An evaluation with its counters, unfolded moves included."""

    id: int
    status: EvaluationStatus = attrs.field(converter=EvaluationStatus)
    repository: str | None
    commit: str | None
    flake_source: dict[str, Any] | None
    wildcards: list[str]
    comment: str | None
    waiting_reason: dict[str, Any] | None
    waiting_since: datetime | None
    created_at: datetime
    finished_at: datetime | None
    graph_version: int
    named: int
    active: int
    failed: int
    queued: int
    building: int


@attrs.frozen
class EvaluationStats:
    """What the worker measured; None where it could not."""

    attributes: int | None
    derivations: int | None
    failed_attributes: int | None
    fetch_ms: int | None
    eval_ms: int | None
    walk_ms: int | None
    peak_rss_mb: int | None


@attrs.frozen
class EntryPointRow:
    """An attribute, its derivation and its outputs (base names)."""

    attr: str
    build: int
    hash: str
    name: str
    status: BuildStatus = attrs.field(converter=BuildStatus)
    names: list[str]
    paths: list[str]

    @property
    def drv_path(self) -> str:
        """Full path."""
        return drv_path(self.hash, self.name)

    @property
    def outputs(self) -> dict[str, str]:
        """Output names and full store paths."""
        return {name: f"{STORE_DIR}/{base}" for name, base in zip(self.names, self.paths, strict=True)}


@attrs.frozen
class MessageRow:
    """A message of an evaluation."""

    id: int
    level: MessageLevel = attrs.field(converter=MessageLevel)
    source: str
    message: str
    created_at: datetime


async def evaluation(connection: Connection, evaluation: int) -> EvaluationRow | None:
    """One evaluation; None when there is no such."""
    rows = await fetch_as(connection, EvaluationRow, EVALUATION, {"evaluation": evaluation})
    return rows[0] if rows else None


async def evaluations(connection: Connection, limit: int) -> list[EvaluationRow]:
    """The newest evaluations, newest first, at most MAX_EVALUATIONS."""
    limit = max(0, min(limit, MAX_EVALUATIONS))
    return await fetch_as(connection, EvaluationRow, EVALUATIONS, {"limit": limit})


async def active_evaluations(connection: Connection) -> list[EvaluationRow]:
    """Those that have not ended, newest first."""
    return await fetch_as(connection, EvaluationRow, ACTIVE_EVALUATIONS)


async def evaluation_stats(connection: Connection, evaluation: int) -> EvaluationStats | None:
    """The metrics of an evaluation, once the worker sent them."""
    rows = await fetch_as(connection, EvaluationStats, EVALUATION_STATS, {"evaluation": evaluation})
    return rows[0] if rows else None


async def entry_points(connection: Connection, evaluation: int) -> list[EntryPointRow]:
    """The attributes of an evaluation, by name."""
    return await fetch_as(connection, EntryPointRow, ENTRY_POINTS, {"evaluation": evaluation})


async def messages(connection: Connection, evaluation: int, after: int = 0) -> list[MessageRow]:
    """Messages with an id above `after`, oldest first."""
    return await fetch_as(connection, MessageRow, MESSAGES, {"evaluation": evaluation, "after": after})
