"""Shared builds start and succeed. Layer: graph.

Each report works through its open assignment: closing the row and writing the status are one step, so
a report that comes twice, or after somebody else closed the row, changes nothing.
Source: seed "Jobs", Build Jobs, Reports.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar, Final, Self

import attrs

from gradient.graph.assignments import timeline_json
from gradient.graph.build_failures import BuildFailed
from gradient.graph.can_start import became_fetchable
from gradient.graph.failure import RetryLimits
from gradient.graph.joint import Joint, Stage
from gradient.graph.locks import proven
from gradient.graph.moves import BuildChange
from gradient.graph.need import settle_held, update_and_settle_need
from gradient.graph.predicates import any_of, present_predicate
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction
from gradient.model import AttemptOutcome, BuildStatus, DispatchOutcome, FailureKind, Span

# Through the open assignments: nothing happens where one is closed. Answers the status it found.
START_BUILDS: Final = Statement(
    "start_builds",
    f"""
    WITH job AS (
        SELECT q.id, b.derivation, b.status FROM dispatched_job q
        JOIN derivation_build b ON b.derivation = q.derivation
        WHERE q.id = ANY(%(assignments)s) AND q.finished_at IS NULL
        ORDER BY b.derivation FOR NO KEY UPDATE OF b
    ), attempt AS (
        UPDATE build_attempt a SET build_started_at = %(now)s FROM job
        WHERE a.dispatched_job = job.id AND a.outcome = {int(AttemptOutcome.RUNNING)}
          AND a.build_started_at IS NULL
    ), started AS (
        UPDATE derivation_build b SET status = {int(BuildStatus.BUILDING)}, updated_at = %(now)s FROM job
        WHERE b.derivation = job.derivation AND b.status = {int(BuildStatus.QUEUED)}
    )
    SELECT id, derivation, status FROM job
    """,
)
# The states of open assignments' builds, their rows locked.
REPORTED_STATES: Final = Statement(
    "reported_states",
    f"""
    SELECT q.id, b.derivation, b.status, b.substituted, b.blocking_deps, {present_predicate("b.derivation")}
    FROM dispatched_job q JOIN derivation_build b ON b.derivation = q.derivation
    WHERE q.id = ANY(%(assignments)s) AND q.finished_at IS NULL
    ORDER BY b.derivation FOR NO KEY UPDATE OF b
    """,
)
# Answers the builds that end by it: a committed Aborted is never overwritten by a late success.
COMPLETE_BUILDS: Final = Statement(
    "complete_builds",
    f"""
    WITH ended AS (
        SELECT * FROM unnest(%(assignments)s::bigint[], %(derivations)s::bigint[], %(statuses)s::smallint[],
                             %(outcomes)s::smallint[], %(timelines)s::text[])
            AS r (assignment, derivation, status, outcome, timeline)
    ), closed AS (
        UPDATE dispatched_job q
        SET finished_at = %(now)s, outcome = {int(DispatchOutcome.COMPLETED)}, timeline = e.timeline::jsonb
        FROM ended e WHERE q.id = e.assignment
    ), attempt AS (
        UPDATE build_attempt a SET outcome = e.outcome, build_finished_at = %(now)s
        FROM ended e WHERE a.dispatched_job = e.assignment AND a.outcome = {int(AttemptOutcome.RUNNING)}
    )
    UPDATE derivation_build b SET status = e.status, updated_at = %(now)s
    FROM ended e WHERE b.derivation = e.derivation
      AND {any_of("b.status", {BuildStatus.QUEUED, BuildStatus.BUILDING})}
    RETURNING b.derivation
    """,
)


@attrs.frozen
class BuildStarted(Joint[bool]):
    """A worker's Building (writer message). Answers False when the job must stop: the build was aborted,
    or the assignment is closed."""

    assignment: int

    stage: ClassVar[Stage] = Stage.START

    @property
    def subject(self) -> Hashable:
        """The assignment."""
        return self.assignment

    @classmethod
    async def apply_together(cls, tx: Transaction, messages: Sequence[Self]) -> list[bool]:
        """Queued becomes Building."""
        rows = await tx.rows(START_BUILDS, assignments=[m.assignment for m in messages], now=tx.now)
        tx.moves.change(
            BuildChange(derivation, BuildStatus.QUEUED, BuildStatus.BUILDING)
            for _, derivation, status in rows
            if status == BuildStatus.QUEUED
        )
        running = {BuildStatus.QUEUED, BuildStatus.BUILDING}
        going_on = {assignment for assignment, _, status in rows if status in running}
        return [message.assignment in going_on for message in messages]


@attrs.frozen
class BuildCompleted(Joint[bool]):
    """JobCompleted of a build (writer message): every output was uploaded before it.

    Answers False when an output is missing in the cache all the same; the attempt then failed.
    """

    assignment: int
    limits: RetryLimits
    timeline: tuple[Span, ...] = ()

    stage: ClassVar[Stage] = Stage.COMPLETION

    @property
    def subject(self) -> Hashable:
        """The assignment."""
        return self.assignment

    @classmethod
    async def apply_together(cls, tx: Transaction, messages: Sequence[Self]) -> list[bool]:
        """Close the assignments, write the successes, and let the builds above them go on."""
        rows = await tx.rows(REPORTED_STATES, assignments=[message.assignment for message in messages])
        found = {assignment: _Reported(*state) for assignment, *state in rows}
        complete = [m for m in messages if m.assignment in found and found[m.assignment].present]
        await _complete(tx, [(message, found[message.assignment]) for message in complete])
        for message in messages:
            if message.assignment in found and not found[message.assignment].present:
                await message._fail(tx)
        succeeded = {message.assignment for message in complete}
        return [message.assignment in succeeded for message in messages]

    async def _fail(self, tx: Transaction) -> None:
        missing = "the worker reported success, but not every output arrived in the cache"
        await BuildFailed(self.assignment, FailureKind.TRANSIENT, missing, self.limits).apply(tx)


@attrs.frozen
class _Reported:
    """A build as the report of its success finds it."""

    derivation: int
    status: BuildStatus = attrs.field(converter=BuildStatus)
    substituted: bool
    blocking_deps: int
    present: bool

    @property
    def success(self) -> BuildStatus:
        return BuildStatus.SUBSTITUTED if self.substituted else BuildStatus.COMPLETED

    @property
    def outcome(self) -> AttemptOutcome:
        return AttemptOutcome.SUBSTITUTED if self.substituted else AttemptOutcome.BUILT


async def _complete(tx: Transaction, reports: Sequence[tuple[BuildCompleted, _Reported]]) -> None:
    """Builds whose outputs are all there end as successes."""
    if not reports:
        return
    written = set(
        await tx.ids(
            COMPLETE_BUILDS,
            assignments=[message.assignment for message, _ in reports],
            derivations=[found.derivation for _, found in reports],
            statuses=[found.success for _, found in reports],
            outcomes=[found.outcome for _, found in reports],
            timelines=[timeline_json(message.timeline) for message, _ in reports],
            now=tx.now,
        )
    )
    # Aborted and wanted again meanwhile: what could not begin anew yet need not.
    await settle_held(tx, [found.derivation for _, found in reports if found.derivation not in written])
    if not written:
        return
    ended = [found for _, found in reports if found.derivation in written]
    tx.moves.change(BuildChange(found.derivation, found.status, found.success) for found in ended)
    await became_fetchable(tx, proven(tx, written), written)
    await update_and_settle_need(tx, [found.derivation for found in ended if found.blocking_deps])
