"""What pages and the API show of builds. Layer: graph, reads only.

Every read is bounded: a listing has a cap, and what is looked up per row is looked up after the cap.
Values come out as the tables hold them; wording is `web`'s.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Final

import attrs

from gradient.graph.pg import Connection, fetch_all, fetch_as, fetch_one
from gradient.graph.predicates import any_of, drv_present_predicate, live_evaluation
from gradient.graph.statements import Statement
from gradient.model import TERMINAL_FAILURE, AttemptOutcome, AttemptReason, BuildProduct, BuildStatus
from gradient.nix.derivation import drv_path
from gradient.nix.store_path import STORE_DIR

# Builds of one snapshot: what a person reads, and one page of JSON. The counters cover the rest.
MAX_BUILDS: Final = 1000
MAX_ATTEMPTS: Final = 50
MAX_BLOCKERS: Final = 50

# From rows `b` and `d`. Times of a build are those of its newest attempt: before, it has none.
_BUILD: Final = f"""
    SELECT b.derivation AS build, d.hash, d.name, b.status, d.architecture,
           d.required_features, b.wanted, d.walked, b.probed, b.cache_available, b.blocking_deps, b.attempt,
           {drv_present_predicate("d")} AS drv_present, b.substituted, b.updated_at,
           newest.build_started_at AS started_at, newest.build_finished_at AS finished_at,
           newest.failure_message AS error, newest.worker,
           (SELECT count(*) FROM build_attempt a WHERE a.derivation = b.derivation) AS attempts
"""
_NEWEST_ATTEMPT: Final = """
    LEFT JOIN LATERAL (
        SELECT a.build_started_at, a.build_finished_at, a.failure_message,
               coalesce(q.worker_name, q.worker_id::text) AS worker
        FROM build_attempt a LEFT JOIN dispatched_job q ON q.id = a.dispatched_job
        WHERE a.derivation = b.derivation ORDER BY a.id DESC LIMIT 1
    ) newest ON true
"""
# What a person wants to see first: what runs, what failed, what waits, what is done.
_RANK: Final = f"""
    CASE WHEN b.status = {int(BuildStatus.BUILDING)} THEN 0
         WHEN {any_of("b.status", TERMINAL_FAILURE - {BuildStatus.DEPENDENCY_FAILED})} THEN 1
         WHEN {any_of("b.status", {BuildStatus.DEPENDENCY_FAILED, BuildStatus.ABORTED})} THEN 2
         WHEN b.status = {int(BuildStatus.FAILED_TRANSIENT)} THEN 3
         WHEN b.status = {int(BuildStatus.QUEUED)} THEN 4
         WHEN b.status = {int(BuildStatus.CREATED)} AND b.wanted THEN 5
         ELSE 6 END
"""
BUILDS_OF_EVALUATION: Final = Statement(
    "page_builds_of_evaluation",
    f"""
    WITH shown AS (
        SELECT b.derivation, {_RANK} AS rank
        FROM build_job j JOIN derivation_build b ON b.derivation = j.derivation
        WHERE j.evaluation = %(evaluation)s
        ORDER BY rank, b.derivation LIMIT {MAX_BUILDS}
    )
    {_BUILD}
    FROM shown JOIN derivation_build b ON b.derivation = shown.derivation
    JOIN derivation d ON d.id = b.derivation {_NEWEST_ATTEMPT}
    ORDER BY shown.rank, b.derivation
    """,
)
BUILDS: Final = Statement(
    "page_builds",
    f"""
    {_BUILD}
    FROM derivation_build b JOIN derivation d ON d.id = b.derivation {_NEWEST_ATTEMPT}
    WHERE b.derivation = ANY(%(ids)s) ORDER BY b.derivation
    """,
)
NAMED_BUILDS: Final = Statement(
    "page_named_builds",
    f"""
    SELECT j.derivation, b.status <> {int(BuildStatus.CREATED)}
    FROM build_job j JOIN derivation_build b ON b.derivation = j.derivation
    WHERE j.evaluation = %(evaluation)s
    """,
)
ATTEMPTS: Final = Statement(
    "page_attempts",
    f"""
    SELECT a.id AS attempt, a.outcome, a.reason, a.failure_message AS message,
           coalesce(q.worker_name, q.worker_id::text) AS worker, a.substitute,
           a.build_started_at AS started_at, a.build_finished_at AS finished_at
    FROM build_attempt a LEFT JOIN dispatched_job q ON q.id = a.dispatched_job
    WHERE a.derivation = %(build)s ORDER BY a.id DESC LIMIT {MAX_ATTEMPTS}
    """,
)
OUTPUTS: Final = Statement(
    "page_outputs",
    """
    SELECT o.name, o.hash || '-' || o.package, o.nar_size, o.is_cached FROM derivation_output o
    WHERE o.derivation = %(build)s ORDER BY o.name
    """,
)
PRODUCTS: Final = Statement(
    "page_products",
    """
    SELECT file_type, subtype, name, path, size FROM build_product WHERE derivation = %(build)s ORDER BY id
    """,
)
BLOCKERS: Final = Statement(
    "page_blockers",
    f"""
    SELECT d.id AS build, d.hash, d.name, coalesce(b.status, 0) AS status
    FROM derivation_dependency e JOIN derivation d ON d.id = e.dependency
    LEFT JOIN derivation_build b ON b.derivation = e.dependency
    WHERE e.derivation = %(build)s AND NOT coalesce(b.fetchable, false)
    ORDER BY d.id LIMIT {MAX_BLOCKERS}
    """,
)
# What waits is looked for among the names of live evaluations: most rows have been done for long.
QUEUE_SIZES: Final = Statement(
    "page_queue_sizes",
    f"""
    SELECT (SELECT count(*) FROM derivation_build WHERE status = {int(BuildStatus.QUEUED)}),
           (SELECT count(*) FROM derivation_build WHERE status = {int(BuildStatus.BUILDING)}),
           (SELECT count(DISTINCT waiting.derivation)
            FROM (SELECT j.derivation FROM evaluation v JOIN build_job j ON j.evaluation = v.id
                  WHERE {live_evaluation("v")} OFFSET 0) named, LATERAL (
                SELECT b.derivation FROM derivation_build b
                WHERE b.derivation = named.derivation AND b.status = {int(BuildStatus.CREATED)} AND b.wanted
                OFFSET 0) waiting)
    """,
)


@attrs.frozen
class BuildRow:
    """A shared build, what it waits for, and its newest attempt."""

    build: int
    hash: str
    name: str
    status: BuildStatus = attrs.field(converter=BuildStatus)
    architecture: str
    required_features: list[str]
    wanted: bool
    walked: bool
    probed: bool
    cache_available: bool
    blocking_deps: int
    attempt: int
    drv_present: bool
    substituted: bool
    updated_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error: str | None
    worker: str | None
    attempts: int

    @property
    def drv_path(self) -> str:
        """Full path."""
        return drv_path(self.hash, self.name)


@attrs.frozen
class AttemptRow:
    """One attempt at a build."""

    attempt: int
    outcome: AttemptOutcome = attrs.field(converter=AttemptOutcome)
    reason: AttemptReason | None = attrs.field(converter=attrs.converters.optional(AttemptReason))
    message: str | None
    worker: str | None
    substitute: bool
    started_at: datetime | None
    finished_at: datetime | None


@attrs.frozen
class OutputRow:
    """An output: full path, NAR size in bytes, and whether the cache has it."""

    name: str
    path: str
    nar_size: int | None
    cached: bool


@attrs.frozen
class BlockerRow:
    """A dependency that is not there yet."""

    build: int
    hash: str
    name: str
    status: BuildStatus = attrs.field(converter=BuildStatus)


@attrs.frozen
class QueueSizes:
    """Shared builds that may start, that run, and that wait for others."""

    queued: int
    building: int
    created: int


async def builds_of_evaluation(connection: Connection, evaluation: int) -> list[BuildRow]:
    """The builds an evaluation names: running, failed, open, done, at most MAX_BUILDS."""
    return await fetch_as(connection, BuildRow, BUILDS_OF_EVALUATION, {"evaluation": evaluation})


async def builds(connection: Connection, ids: Collection[int]) -> list[BuildRow]:
    """These builds, in order of their ids. The caller bounds their number."""
    return await fetch_as(connection, BuildRow, BUILDS, {"ids": list(ids)})


async def named_builds(connection: Connection, evaluation: int) -> dict[int, bool]:
    """Every build an evaluation names, by id, and whether it has left Created: tens of thousands for a
    package set."""
    return dict(await fetch_all(connection, NAMED_BUILDS, {"evaluation": evaluation}))


async def attempts(connection: Connection, build: int) -> list[AttemptRow]:
    """The attempts at a build, newest first."""
    return await fetch_as(connection, AttemptRow, ATTEMPTS, {"build": build})


async def outputs(connection: Connection, build: int) -> list[OutputRow]:
    """The outputs of a build, by name."""
    rows = await fetch_all(connection, OUTPUTS, {"build": build})
    return [OutputRow(name, f"{STORE_DIR}/{base}", nar_size, cached) for name, base, nar_size, cached in rows]


async def products(connection: Connection, build: int) -> list[BuildProduct]:
    """What `nix-support/hydra-build-products` of its outputs named."""
    return await fetch_as(connection, BuildProduct, PRODUCTS, {"build": build})


async def blockers(connection: Connection, build: int) -> list[BlockerRow]:
    """The dependencies a build still waits for, at most MAX_BLOCKERS."""
    return await fetch_as(connection, BlockerRow, BLOCKERS, {"build": build})


async def queue_sizes(connection: Connection) -> QueueSizes:
    """How much there is to do."""
    row = await fetch_one(connection, QUEUE_SIZES)
    assert row is not None
    return QueueSizes(*row)
