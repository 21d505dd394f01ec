"""Assignments: the claim that hands a job out, and the closers. Layer: graph, run by the graph writer.

An open `dispatched_job` row is the one fact that a job is on a worker. Every report closes or checks
its row in the transaction that acts on it, so a stale report, or one applied twice, does nothing.
Source: seed "Queueing and Counters", Queued Invariant; seed "Jobs".
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Sequence
from datetime import datetime
from typing import Any, ClassVar, Final, Self
from uuid import UUID

import attrs

from gradient.graph.joint import Joint, Stage
from gradient.graph.predicates import live_evaluation
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import AttemptOutcome, BuildStatus, DispatchOutcome, EvaluationStatus, JobKind, Span

# Still Queued, with the `cache_available` its spec was made from: a regressed job is dropped. The open
# row, the running attempt and the time of dispatch are one statement: it runs for every build.
CLAIM_BUILDS: Final = Statement(
    "claim_builds",
    f"""
    WITH asked AS (
        SELECT * FROM unnest(%(ids)s::bigint[], %(cache_available)s::boolean[], %(workers)s::uuid[],
                             %(names)s::text[], %(scores)s::float8[])
            AS r (derivation, cache_available, worker, worker_name, score)
    ), claimed AS (
        INSERT INTO dispatched_job (kind, job_id, evaluation, derivation, worker_id, worker_name, score,
                                    queued_at, dispatched_at)
        SELECT {int(JobKind.BUILD)}, 'build:' || b.derivation, (
                   SELECT j.evaluation FROM build_job j JOIN evaluation v ON v.id = j.evaluation
                   WHERE j.derivation = b.derivation AND {live_evaluation("v")} ORDER BY j.evaluation LIMIT 1
               ), b.derivation, a.worker, a.worker_name, a.score, b.queued_at, %(now)s
        FROM asked a JOIN derivation_build b ON b.derivation = a.derivation
        WHERE b.status = {int(BuildStatus.QUEUED)} AND b.cache_available = a.cache_available
        ON CONFLICT (job_id) WHERE finished_at IS NULL DO NOTHING
        RETURNING id, evaluation, derivation
    ), attempt AS (
        INSERT INTO build_attempt (derivation, evaluation, dispatched_job, substitute, created_at)
        SELECT c.derivation, c.evaluation, c.id, a.cache_available, %(now)s
        FROM claimed c JOIN asked a ON a.derivation = c.derivation
    ), dispatched AS (
        UPDATE derivation_build b SET dispatched_at = %(now)s
        FROM claimed WHERE b.derivation = claimed.derivation
    )
    SELECT derivation, id FROM claimed
    """,
)
CLAIM_EVALUATION: Final = Statement(
    "claim_evaluation",
    f"""
    INSERT INTO dispatched_job (kind, job_id, evaluation, worker_id, worker_name, score, fetch_only,
                                queued_at, dispatched_at)
    SELECT {int(JobKind.EVAL)}, 'eval:' || v.id, v.id, %(worker)s, %(worker_name)s, %(score)s, %(fetch_only)s,
           v.updated_at, %(now)s
    FROM evaluation v
    WHERE v.id = %(evaluation)s AND v.status = ANY(%(statuses)s)
    ON CONFLICT (job_id) WHERE finished_at IS NULL DO NOTHING
    RETURNING id
    """,
)
CLOSE_ASSIGNMENT: Final = Statement(
    "close_assignment",
    """
    UPDATE dispatched_job SET finished_at = %(now)s, outcome = %(outcome)s, timeline = %(timeline)s::jsonb
    WHERE id = %(assignment)s AND finished_at IS NULL
    RETURNING kind, evaluation, derivation, fetch_only, worker_id, dispatched_at
    """,
)
OPEN_ASSIGNMENT: Final = Statement(
    "open_assignment",
    """
    SELECT kind, evaluation, derivation, fetch_only, worker_id, dispatched_at FROM dispatched_job
    WHERE id = %(assignment)s AND finished_at IS NULL
    """,
)
CLOSE_ATTEMPT: Final = Statement(
    "close_attempt",
    f"""
    UPDATE build_attempt
    SET outcome = %(outcome)s, reason = %(reason)s, failure_message = %(message)s,
        build_finished_at = %(now)s
    WHERE dispatched_job = %(assignment)s AND outcome = {int(AttemptOutcome.RUNNING)}
    """,
)
CLOSE_OPEN_ASSIGNMENTS: Final = Statement(
    "close_open_assignments",
    f"""
    UPDATE dispatched_job SET finished_at = %(now)s, outcome = {int(DispatchOutcome.ABANDONED)}
    WHERE id = ANY(%(ids)s) AND finished_at IS NULL
    RETURNING id, kind, evaluation, derivation
    """,
)
OPEN_ASSIGNMENTS_OF_WORKER: Final = Statement(
    "open_assignments_of_worker",
    "SELECT id FROM dispatched_job WHERE worker_id = %(worker)s AND finished_at IS NULL",
)
OPEN_ASSIGNMENTS_OF_JOBS: Final = Statement(
    "open_assignments_of_jobs",
    """
    UPDATE dispatched_job SET abort_sent_at = %(now)s
    WHERE job_id = ANY(%(jobs)s) AND finished_at IS NULL RETURNING job_id
    """,
)


@attrs.frozen
class Assignment:
    """An assignment's row as a report finds it."""

    kind: JobKind
    evaluation: int | None
    derivation: int | None
    fetch_only: bool
    worker_id: UUID
    dispatched_at: datetime

    @classmethod
    def of(cls, row: Sequence[Any]) -> Assignment:
        """From a row of CLOSE_ASSIGNMENT or OPEN_ASSIGNMENT."""
        kind, *rest = row
        return cls(JobKind(kind), *rest)


@attrs.frozen
class ClaimBuild(Joint[int | None]):
    """Hand a queued build to a worker (writer message).

    Answers the assignment id, None when the build is not Queued any more or somebody has it.
    """

    derivation: int
    cache_available: bool
    worker: UUID
    worker_name: str
    score: float | None = None

    stage: ClassVar[Stage] = Stage.CLAIM

    @property
    def subject(self) -> Hashable:
        """The build."""
        return "claim", self.derivation

    @classmethod
    async def apply_together(cls, tx: Transaction, messages: Sequence[Self]) -> list[int | None]:
        """Insert the open rows and the running attempts."""
        assignments = await claim_assignment(tx, messages)
        return [assignments.get(claim.derivation) for claim in messages]


async def claim_assignment(tx: Transaction, claims: Sequence[ClaimBuild]) -> dict[int, int]:
    """Hand out those builds that are still Queued as what their job was made from; the rest is dropped.
    Returns the assignment of each, by its derivation."""
    rows = await tx.rows(
        CLAIM_BUILDS,
        ids=[claim.derivation for claim in claims],
        cache_available=[claim.cache_available for claim in claims],
        workers=[str(claim.worker) for claim in claims],
        names=[claim.worker_name for claim in claims],
        scores=[claim.score for claim in claims],
        now=tx.now,
    )
    return dict(rows)


@attrs.frozen
class ClaimEvaluation:
    """Hand a queued evaluation to a worker (writer message)."""

    evaluation: int
    worker: UUID
    worker_name: str
    fetch_only: bool = False
    score: float | None = None
    # A follow-up of a fetch-only job is claimed while its evaluation stands in Fetching.
    followup: bool = False

    async def apply(self, tx: Transaction) -> int | None:
        """Insert the open row; None when the evaluation is not waiting for a worker any more."""
        expected = EvaluationStatus.FETCHING if self.followup else EvaluationStatus.QUEUED
        assignment: int | None = await tx.value(
            CLAIM_EVALUATION,
            evaluation=self.evaluation,
            worker=self.worker,
            worker_name=self.worker_name,
            score=self.score,
            fetch_only=self.fetch_only,
            statuses=[int(expected)],
            now=tx.now,
        )
        return assignment


async def open_assignment(tx: Transaction, assignment: int) -> Assignment | None:
    """The assignment's row while it is open; None when a report about it is stale."""
    rows = await tx.rows(OPEN_ASSIGNMENT, assignment=assignment)
    return Assignment.of(rows[0]) if rows else None


async def close_assignment(
    tx: Transaction, assignment: int, outcome: DispatchOutcome, timeline: Sequence[Span] = ()
) -> Assignment | None:
    """Close an open assignment; None when it was closed before."""
    rows = await tx.rows(
        CLOSE_ASSIGNMENT,
        assignment=assignment,
        outcome=outcome,
        timeline=timeline_json(timeline),
        now=tx.now,
    )
    return Assignment.of(rows[0]) if rows else None


async def close_attempt(
    tx: Transaction,
    assignment: int,
    outcome: AttemptOutcome,
    reason: int | None = None,
    message: str | None = None,
) -> None:
    """Close the running attempt of an assignment."""
    await tx.run(
        CLOSE_ATTEMPT, assignment=assignment, outcome=outcome, reason=reason, message=message, now=tx.now
    )


async def abandon_assignments(
    tx: Transaction, assignments: Collection[int]
) -> list[tuple[int, JobKind, int | None, int | None]]:
    """Close those still open as abandoned: (id, kind, evaluation, derivation) of each."""
    rows = await tx.rows(CLOSE_OPEN_ASSIGNMENTS, ids=ordered(assignments), now=tx.now)
    return [(i, JobKind(kind), evaluation, derivation) for i, kind, evaluation, derivation in rows]


async def assignments_of_worker(tx: Transaction, worker: UUID) -> list[int]:
    """The assignments a worker has open."""
    return await tx.ids(OPEN_ASSIGNMENTS_OF_WORKER, worker=worker)


async def mark_abort_sent(tx: Transaction, jobs: Collection[str]) -> list[str]:
    """Note that an abort goes out to these jobs; returns the ones that are on a worker."""
    return [row[0] for row in await tx.rows(OPEN_ASSIGNMENTS_OF_JOBS, jobs=sorted(jobs), now=tx.now)]


def timeline_json(timeline: Sequence[Span]) -> str | None:
    """A job's phase timeline as its row holds it."""
    return json.dumps([attrs.asdict(span) for span in timeline]) if timeline else None
