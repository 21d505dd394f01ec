"""What the scheduler reads: queued builds and evaluations as jobs, and what keeps evaluations waiting.

Layer: graph, reads only, on a reader's connection. A failed read raises: it never reads as "no rows".
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, Final

import attrs

from gradient.graph.counters import UNFOLDED, counter
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.predicates import (
    any_of,
    blocks_evaluation,
    build_edge,
    live_evaluation,
    unassigned_predicate,
)
from gradient.graph.statements import Statement
from gradient.graph.transaction import ordered
from gradient.model import (
    BuildStatus,
    CachedSource,
    EvaluationStatus,
    InputOverride,
    OutputPath,
    Repository,
    WalkMode,
)
from gradient.nix.derivation import drv_path
from gradient.nix.store_path import STORE_DIR

# Outputs of direct inputs are the required paths; a passthrough needs none.
BUILD_CANDIDATES: Final = Statement(
    "build_candidates",
    f"""
    SELECT b.derivation, d.hash, d.name, d.architecture, d.required_features, d.is_fixed_output,
           d.prefer_local_build, b.cache_available, b.prioritized, b.timeout_secs, b.max_silent_secs,
           b.queued_at,
           ARRAY(SELECT o.name || ' ' || o.hash || '-' || o.package FROM derivation_output o
                 WHERE o.derivation = b.derivation ORDER BY o.name),
           CASE WHEN b.cache_available THEN '{{}}' ELSE ARRAY(
               SELECT o.hash || '-' || o.package FROM derivation_dependency e
               JOIN derivation_output o ON o.derivation = e.dependency
               WHERE e.derivation = b.derivation AND {build_edge("e")}) END
    FROM derivation_build b JOIN derivation d ON d.id = b.derivation
    WHERE b.derivation = ANY(%(ids)s) AND b.status = {int(BuildStatus.QUEUED)}
      AND {unassigned_predicate("b")}
    """,
)
QUEUED_BUILDS: Final = Statement(
    "queued_builds",
    f"""
    SELECT b.derivation FROM derivation_build b
    WHERE b.status = {int(BuildStatus.QUEUED)} AND {unassigned_predicate("b")}
    ORDER BY b.derivation
    """,
)
EVALUATION_CANDIDATES: Final = Statement(
    "evaluation_candidates",
    f"""
    SELECT v.id, v.repository, v.commit, v.flake_source, v.wildcards, v.walk_mode,
           v.prioritized, v.updated_at, v.input_overrides
    FROM evaluation v
    WHERE v.status = {int(EvaluationStatus.QUEUED)} AND NOT EXISTS (
        SELECT FROM dispatched_job q WHERE q.job_id = 'eval:' || v.id AND q.finished_at IS NULL)
    ORDER BY v.prioritized DESC, v.id
    """,
)
IN_FLIGHT: Final = Statement(
    "evaluations_in_flight",
    f"""
    SELECT v.id, v.status, v.waiting_reason, v.waiting_since, v.building_started_at IS NOT NULL,
           coalesce(t.wait_for_workers, false),
           {counter("active")}, {counter("building")}
    FROM evaluation v LEFT JOIN task t ON t.id = v.task, {UNFOLDED}
    WHERE {live_evaluation("v")} ORDER BY v.id
    """,
)
# Moves without anybody's doing: running, or to be tried again. The counters may be from before it began.
GOES_ON: Final = frozenset({BuildStatus.BUILDING, BuildStatus.FAILED_TRANSIENT})
BLOCKING_KINDS: Final = Statement(
    "blocking_kinds",
    f"""
    SELECT CASE WHEN b.cache_available THEN 'builtin' ELSE d.architecture END,
           CASE WHEN b.cache_available THEN '{{}}' ELSE d.required_features END,
           count(*), count(*) FILTER (WHERE b.status = {int(BuildStatus.QUEUED)}),
           count(*) FILTER (WHERE {any_of("b.status", GOES_ON)}), min(d.name)
    FROM build_job j
    JOIN derivation_build b ON b.derivation = j.derivation JOIN derivation d ON d.id = b.derivation
    WHERE j.evaluation = %(evaluation)s AND {blocks_evaluation("b")}
    GROUP BY 1, 2 ORDER BY 1, 2
    """,
)


@attrs.frozen
class BuildCandidate:
    """A queued build as a job: everything an offer and a BuildSpec need. Paths are full store paths."""

    derivation: int
    drv_path: str
    name: str
    architecture: str
    required_features: tuple[str, ...]
    is_fixed_output: bool
    prefer_local_build: bool
    cache_available: bool
    prioritized: bool
    timeout_secs: int | None
    max_silent_secs: int | None
    queued_at: datetime
    outputs: tuple[OutputPath, ...]
    required_paths: tuple[str, ...]

    @property
    def job_id(self) -> str:
        """The key of its assignment."""
        return f"build:{self.derivation}"


@attrs.frozen
class EvaluationCandidate:
    """A queued evaluation as a job."""

    evaluation: int
    repository: Repository | None
    cached: CachedSource | None
    wildcards: tuple[str, ...]
    walk_mode: WalkMode
    prioritized: bool
    queued_at: datetime
    input_overrides: tuple[InputOverride, ...]

    @property
    def job_id(self) -> str:
        """The key of its assignment."""
        return f"eval:{self.evaluation}"


@attrs.frozen
class InFlight:
    """A live evaluation as the waiting pass sees it; counters include unfolded deltas."""

    evaluation: int
    status: EvaluationStatus
    reason: dict[str, Any] | None
    waiting_since: datetime | None
    building_started: bool
    wait_for_workers: bool
    active: int
    building: int


@attrs.frozen
class BlockingKind:
    """Blocking shared builds of one evaluation that need the same kind of worker: `queued` of `builds` are
    Queued, `going_on` are Building or to be retried."""

    architecture: str
    required_features: tuple[str, ...]
    builds: int
    queued: int
    going_on: int
    example: str


async def build_candidates(connection: Connection, ids: Collection[int]) -> list[BuildCandidate]:
    """Those of `ids` that are Queued without an assignment."""
    rows = await fetch_all(connection, BUILD_CANDIDATES, {"ids": ordered(ids)})
    return [_build_candidate(row) for row in rows]


def _build_candidate(row: tuple[Any, ...]) -> BuildCandidate:
    derivation, hash_part, name, architecture, features, *facts = row
    is_fixed_output, prefer_local, available, prioritized, timeout, silent, queued_at, outputs, required = (
        facts
    )
    named = (output.split(" ", 1) for output in outputs)
    return BuildCandidate(
        derivation=derivation,
        drv_path=drv_path(hash_part, name),
        name=name,
        architecture=architecture,
        required_features=tuple(features),
        is_fixed_output=is_fixed_output,
        prefer_local_build=prefer_local,
        cache_available=available,
        prioritized=prioritized,
        timeout_secs=timeout,
        max_silent_secs=silent,
        queued_at=queued_at,
        outputs=tuple(OutputPath(output, f"{STORE_DIR}/{base}") for output, base in named),
        required_paths=tuple(f"{STORE_DIR}/{base}" for base in required),
    )


async def queued_builds(connection: Connection) -> list[int]:
    """Every Queued build without an assignment: for the resync, which only reads."""
    return [row[0] for row in await fetch_all(connection, QUEUED_BUILDS)]


async def evaluation_candidates(connection: Connection) -> list[EvaluationCandidate]:
    """Every queued evaluation without an assignment, in the order they should start."""
    rows = await fetch_all(connection, EVALUATION_CANDIDATES)
    return [_evaluation_candidate(*row) for row in rows]


def _evaluation_candidate(
    evaluation: int,
    repository: str | None,
    commit: str | None,
    source: dict[str, Any] | None,
    wildcards: list[str],
    walk_mode: int,
    prioritized: bool,
    queued_at: datetime,
    overrides: list[dict[str, Any]],
) -> EvaluationCandidate:
    return EvaluationCandidate(
        evaluation,
        Repository(repository, commit) if repository is not None else None,
        CachedSource(**source) if source is not None and repository is None else None,
        tuple(wildcards),
        WalkMode(walk_mode),
        prioritized,
        queued_at,
        tuple(InputOverride(**override) for override in overrides),
    )


async def evaluations_in_flight(connection: Connection) -> list[InFlight]:
    """Every live evaluation."""
    rows = await fetch_all(connection, IN_FLIGHT)
    return [InFlight(evaluation, EvaluationStatus(status), *rest) for evaluation, status, *rest in rows]


async def blocking_kinds(connection: Connection, evaluation: int) -> list[BlockingKind]:
    """What still blocks an evaluation, by the kind of worker it needs."""
    rows = await fetch_all(connection, BLOCKING_KINDS, {"evaluation": evaluation})
    return [BlockingKind(architecture, tuple(features), *counts) for architecture, features, *counts in rows]
