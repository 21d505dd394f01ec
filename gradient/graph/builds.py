"""Transitions of shared builds: started, built, failed, lost, tried again. Layer: graph.

Each report works through its open assignment: closing the row and writing the status are one step, so
a report that comes twice, or after somebody else closed the row, changes nothing.
Source: seed "Jobs", Build Jobs, Reports, Failures, Abort and Lost Workers.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Final
from uuid import UUID

import attrs

from gradient.graph.assignments import (
    Assignment,
    abandon_assignments,
    assignments_of_worker,
    close_assignment,
    close_attempt,
    open_assignment,
    timeline_json,
)
from gradient.graph.can_start import became_fetchable, promote, unpromote_ungated
from gradient.graph.demote import heal_missing_inputs
from gradient.graph.dependency_failure import cascade_dependency_failed
from gradient.graph.evaluations import lose_evaluations, requeue_evaluation
from gradient.graph.failure import (
    MAX_DOUBLINGS,
    Decision,
    FailedAttempt,
    RetryLimits,
    backoff_secs,
    decide,
)
from gradient.graph.locks import proven
from gradient.graph.moves import BuildChange
from gradient.graph.need import need_after, settle_held, skip_unwanted, thaw_wanted, update_and_settle_need
from gradient.graph.predicates import any_of, present_predicate
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import (
    AttemptOutcome,
    AttemptReason,
    BuildMetrics,
    BuildStatus,
    BuiltOutput,
    DispatchOutcome,
    FailureKind,
    JobKind,
    Span,
)

# Workers lost in a row after which a build is given up (seed "Jobs", Lost Worker).
MAX_LOST_WORKERS: Final = 10
# Bytes of a failure message kept with its attempt.
MAX_FAILURE_MESSAGE: Final = 8 * 1024

# Through the open assignment: nothing happens when it is closed. Answers the status it found.
START_BUILD: Final = Statement(
    "start_build",
    f"""
    WITH job AS (
        SELECT derivation FROM dispatched_job WHERE id = %(assignment)s AND finished_at IS NULL
    ), attempt AS (
        UPDATE build_attempt a SET build_started_at = %(now)s FROM job
        WHERE a.dispatched_job = %(assignment)s AND a.outcome = {int(AttemptOutcome.RUNNING)}
          AND a.build_started_at IS NULL
    ), started AS (
        UPDATE derivation_build b SET status = {int(BuildStatus.BUILDING)}, updated_at = %(now)s FROM job
        WHERE b.derivation = job.derivation AND b.status = {int(BuildStatus.QUEUED)}
    )
    SELECT b.derivation, b.status FROM job JOIN derivation_build b ON b.derivation = job.derivation
    """,
)
STORE_OUTPUT: Final = Statement(
    "store_build_output",
    """
    WITH job AS (
        SELECT derivation FROM dispatched_job WHERE id = %(assignment)s AND finished_at IS NULL
    ), marked AS (
        UPDATE derivation_build b SET substituted = %(substituted)s FROM job
        WHERE b.derivation = job.derivation AND b.substituted <> %(substituted)s
    ), sized AS (
        UPDATE derivation_output o SET nar_size = r.nar_size
        FROM job, unnest(%(names)s::text[], %(sizes)s::bigint[]) AS r (name, nar_size)
        WHERE o.derivation = job.derivation AND o.name = r.name AND o.nar_size IS DISTINCT FROM r.nar_size
          AND r.nar_size IS NOT NULL
    )
    SELECT derivation FROM job
    """,
)
# The state of an open assignment's build, its row locked.
REPORTED_STATE: Final = Statement(
    "reported_state",
    f"""
    SELECT b.derivation, b.status, b.substituted, b.blocking_deps, {present_predicate("b.derivation")}
    FROM dispatched_job q JOIN derivation_build b ON b.derivation = q.derivation
    WHERE q.id = %(assignment)s AND q.finished_at IS NULL FOR NO KEY UPDATE OF b
    """,
)
COMPLETE_BUILD: Final = Statement(
    "complete_build",
    f"""
    WITH closed AS (
        UPDATE dispatched_job
        SET finished_at = %(now)s, outcome = {int(DispatchOutcome.COMPLETED)}, timeline = %(timeline)s::jsonb
        WHERE id = %(assignment)s
    ), attempt AS (
        UPDATE build_attempt SET outcome = %(outcome)s, build_finished_at = %(now)s
        WHERE dispatched_job = %(assignment)s AND outcome = {int(AttemptOutcome.RUNNING)}
    )
    UPDATE derivation_build SET status = %(status)s, updated_at = %(now)s
    WHERE derivation = %(derivation)s AND status IN ({int(BuildStatus.QUEUED)}, {int(BuildStatus.BUILDING)})
    """,
)
BUILD_STATE: Final = Statement(
    "build_state",
    f"""
    SELECT b.status, b.attempt, b.cache_available, b.substituted, {present_predicate("b.derivation")}
    FROM derivation_build b WHERE b.derivation = %(derivation)s FOR NO KEY UPDATE
    """,
)
WRITE_BUILD_STATUS: Final = Statement(
    "write_build_status",
    """
    UPDATE derivation_build SET status = %(status)s, attempt = %(attempt)s, updated_at = %(now)s
    WHERE derivation = %(derivation)s
    """,
)
GIVE_UP_SUBSTITUTION: Final = Statement(
    "give_up_substitution",
    "UPDATE derivation_build SET cache_available = false WHERE derivation = %(derivation)s",
)
DROP_PRODUCTS: Final = Statement(
    "drop_build_products", "DELETE FROM build_product WHERE derivation = %(derivation)s"
)
INSERT_PRODUCTS: Final = Statement(
    "insert_build_products",
    """
    INSERT INTO build_product (derivation, output, file_type, subtype, name, path, size)
    SELECT %(derivation)s, * FROM unnest(%(outputs)s::text[], %(types)s::text[], %(subtypes)s::text[],
                                         %(names)s::text[], %(paths)s::text[], %(sizes)s::bigint[])
    """,
)
INSERT_METRIC: Final = Statement(
    "insert_derivation_metric",
    """
    INSERT INTO derivation_metric (derivation, history_name, architecture, build_time_ms, peak_ram_mb,
        cpu_time_ms, avg_cpu_pct, disk_read_bytes, disk_write_bytes, oom_killed, concurrent_builds,
        build_cores, cpu_core_score, worker_id, created_at)
    SELECT d.id, coalesce(d.pname, d.name), d.architecture, %(build_time_ms)s, %(peak_ram_mb)s,
        %(cpu_time_ms)s, %(avg_cpu_pct)s, %(disk_read_bytes)s, %(disk_write_bytes)s, %(oom_killed)s,
        %(concurrent_builds)s, %(build_cores)s, %(cpu_core_score)s, %(worker)s, %(now)s
    FROM derivation d WHERE d.id = %(derivation)s
    """,
)
COUNT_FAILURES: Final = Statement(
    "count_attempt_failures",
    f"""
    SELECT count(*) FILTER (WHERE a.reason = {int(AttemptReason.SUBSTITUTE_UNAVAILABLE)}
                            AND a.evaluation IS NOT DISTINCT FROM %(evaluation)s),
           count(*) FILTER (WHERE a.reason = {int(AttemptReason.INPUTS_UNAVAILABLE)})
    FROM build_attempt a WHERE a.derivation = %(derivation)s AND a.outcome = {int(AttemptOutcome.FAILED)}
    """,
)
REQUEUE_BUILDING: Final = Statement(
    "requeue_building",
    f"""
    UPDATE derivation_build SET status = {int(BuildStatus.QUEUED)}, queued_at = %(now)s, updated_at = %(now)s
    WHERE derivation = ANY(%(ids)s) AND status = {int(BuildStatus.BUILDING)} RETURNING derivation
    """,
)
LOSE_ATTEMPTS: Final = Statement(
    "lose_attempts",
    f"""
    UPDATE build_attempt
    SET outcome = {int(AttemptOutcome.ABORTED)}, reason = {int(AttemptReason.WORKER_LOST)},
        build_finished_at = %(now)s
    WHERE dispatched_job = ANY(%(assignments)s) AND outcome = {int(AttemptOutcome.RUNNING)}
    """,
)
# The newest attempts of each, all of them lost workers: the streak that gives a build up.
LOST_STREAKS: Final = Statement(
    "lost_streaks",
    f"""
    SELECT own.derivation FROM unnest(%(ids)s::bigint[]) AS own (derivation), LATERAL (
        SELECT count(*) FILTER (WHERE newest.reason = {int(AttemptReason.WORKER_LOST)}) AS lost FROM (
            SELECT a.reason FROM build_attempt a WHERE a.derivation = own.derivation
            ORDER BY a.id DESC LIMIT %(limit)s
        ) newest
    ) streak
    WHERE streak.lost >= %(limit)s
    """,
)
GIVE_UP: Final = Statement(
    "give_up_builds",
    f"""
    UPDATE derivation_build b SET status = {int(BuildStatus.FAILED_PERMANENT)}, updated_at = %(now)s
    FROM (SELECT derivation, status FROM derivation_build
          WHERE derivation = ANY(%(ids)s) AND {any_of("status", {BuildStatus.CREATED, BuildStatus.QUEUED})}
          ORDER BY derivation FOR NO KEY UPDATE) before
    WHERE b.derivation = before.derivation RETURNING b.derivation, before.status
    """,
)
# One row per step of the backoff: `due[n]` is the latest `updated_at` that try n may start again from.
# Every try beyond the last step waits as long as that one.
RETRY_TRANSIENT: Final = Statement(
    "retry_transient",
    f"""
    UPDATE derivation_build b
    SET status = {int(BuildStatus.QUEUED)}, queued_at = %(now)s, updated_at = %(now)s
    FROM unnest(%(attempts)s::smallint[], %(due)s::timestamptz[]) AS step (attempt, due)
    WHERE b.status = {int(BuildStatus.FAILED_TRANSIENT)} AND step.attempt = least(b.attempt, %(last)s)
      AND b.updated_at <= step.due
    RETURNING b.derivation
    """,
)


# --- reports --------------------------------------------------------------------------------------


@attrs.frozen
class BuildStarted:
    """A worker's Building (writer message). Answers False when the job must stop: the build was aborted,
    or the assignment is closed."""

    assignment: int

    async def apply(self, tx: Transaction) -> bool:
        """Queued becomes Building."""
        rows = await tx.rows(START_BUILD, assignment=self.assignment, now=tx.now)
        if not rows:
            return False
        derivation, status = rows[0]
        if status == BuildStatus.QUEUED:
            tx.moves.change([BuildChange(derivation, BuildStatus.QUEUED, BuildStatus.BUILDING)])
        return status in {BuildStatus.QUEUED, BuildStatus.BUILDING}


@attrs.frozen
class StoreBuildOutput:
    """What was built (writer message): sizes, products, metrics, the `substituted` flag."""

    assignment: int
    outputs: tuple[BuiltOutput, ...]
    substituted: bool
    metrics: BuildMetrics | None = None

    async def apply(self, tx: Transaction) -> None:
        """Store it; dropped when the assignment is closed."""
        derivation: int | None = await tx.value(
            STORE_OUTPUT,
            assignment=self.assignment,
            substituted=self.substituted,
            names=[output.name for output in self.outputs],
            sizes=[output.nar_size for output in self.outputs],
        )
        if derivation is None:
            return
        await _store_products(tx, derivation, self.outputs)
        if self.metrics and not self.substituted:
            job = await open_assignment(tx, self.assignment)
            if job is not None:
                await _store_metrics(tx, job, self.metrics)


@attrs.frozen
class BuildCompleted:
    """JobCompleted of a build (writer message): every output was uploaded before it.

    Answers False when an output is missing in the cache all the same; the attempt then failed.
    """

    assignment: int
    limits: RetryLimits
    timeline: tuple[Span, ...] = ()

    async def apply(self, tx: Transaction) -> bool:
        """Close the assignment, write the success, and let the builds above it go on."""
        rows = await tx.rows(REPORTED_STATE, assignment=self.assignment)
        if not rows:
            return False
        derivation, found, substituted, blocking_deps, present = rows[0]
        if not present:
            missing = "the worker reported success, but not every output arrived in the cache"
            await BuildFailed(self.assignment, FailureKind.TRANSIENT, missing, self.limits).apply(tx)
            return False
        status = BuildStatus.SUBSTITUTED if substituted else BuildStatus.COMPLETED
        written = await tx.run(
            COMPLETE_BUILD,
            assignment=self.assignment,
            derivation=derivation,
            outcome=AttemptOutcome.SUBSTITUTED if substituted else AttemptOutcome.BUILT,
            status=status,
            timeline=timeline_json(self.timeline),
            now=tx.now,
        )
        # A committed Aborted is never overwritten by a late success.
        if written:
            tx.moves.change([BuildChange(derivation, BuildStatus(found), status)])
            await became_fetchable(tx, proven(tx, [derivation]), [derivation])
            if blocking_deps:
                await update_and_settle_need(tx, [derivation])
        return True


@attrs.frozen
class BuildFailed:
    """JobFailed of a build (writer message). `missing_paths` are hash parts and belong to
    InputsUnavailable: inputs that the cache lists and could not give."""

    assignment: int
    kind: FailureKind
    error: str
    limits: RetryLimits
    oom_killed: bool = False
    metrics: BuildMetrics | None = None
    timeline: tuple[Span, ...] = ()
    missing_paths: tuple[str, ...] = ()

    async def apply(self, tx: Transaction) -> None:
        """Decide, close the attempt, write the status, fail what needs it, have its inputs made again."""
        canceled = self.kind in {FailureKind.CANCELED, FailureKind.ABORTED}
        outcome = DispatchOutcome.ABANDONED if canceled else DispatchOutcome.FAILED
        job = await close_assignment(tx, self.assignment, outcome, self.timeline)
        if job is None or job.derivation is None:
            return
        if self.metrics and self.oom_killed:
            await _store_metrics(tx, job, self.metrics)
        status, attempt, cache_available, _, _ = (await tx.rows(BUILD_STATE, derivation=job.derivation))[0]
        misses, loops = (await tx.rows(COUNT_FAILURES, derivation=job.derivation, evaluation=job.evaluation))[
            0
        ]
        failed = FailedAttempt(self.kind, attempt, cache_available, misses, loops, self.oom_killed)
        decision = decide(failed, self.limits)
        message = None if decision.outcome is AttemptOutcome.ABORTED else _cut(self.error)
        await close_attempt(tx, self.assignment, decision.outcome, decision.reason, message)
        if status in {BuildStatus.QUEUED, BuildStatus.BUILDING}:
            await _apply_decision(tx, job.derivation, BuildStatus(status), decision)
        unavailable = decision.reason is AttemptReason.INPUTS_UNAVAILABLE
        if unavailable and self.missing_paths and loops < self.limits.inputs_unavailable_max_loops:
            await heal_missing_inputs(tx, job.derivation, self.missing_paths, job.dispatched_at)


async def _apply_decision(tx: Transaction, derivation: int, old: BuildStatus, decision: Decision) -> None:
    await _write_status(tx, derivation, old, decision.status, decision.attempt)
    if decision.exhaust_substitution:
        await tx.run(GIVE_UP_SUBSTITUTION, derivation=derivation)
    if decision.cascade:
        await cascade_dependency_failed(tx, [derivation])
    await need_after(tx, [BuildChange(derivation, old, decision.status)])
    match decision.status:
        case BuildStatus.QUEUED:
            tx.moves.returned.add(f"build:{derivation}")
            await _settle_requeued(tx, [derivation])
        case BuildStatus.CREATED:
            # Its inputs are needed from here on.
            await update_and_settle_need(tx, [derivation], only_gains=True)
            await settle_held(tx, [derivation])
            await skip_unwanted(tx, [derivation])
            await promote(tx, [derivation])
        case BuildStatus.FAILED_TRANSIENT:
            await settle_held(tx, [derivation])
        case BuildStatus.ABORTED:
            # Wanted again while its worker was still stopping: the abort was the last evaluation's matter.
            await thaw_wanted(tx, [derivation])


async def _settle_requeued(tx: Transaction, ids: Collection[int]) -> None:
    """Queued again by a report: done where every output was uploaded all the same, out of the queue where
    the conditions no longer hold, Skipped where nobody needs it any more."""
    await settle_held(tx, ids)
    await unpromote_ungated(tx, ids)
    await skip_unwanted(tx, ids)


async def _write_status(
    tx: Transaction, derivation: int, old: BuildStatus, new: BuildStatus, attempt: int
) -> None:
    await tx.run(WRITE_BUILD_STATUS, derivation=derivation, status=new, attempt=attempt, now=tx.now)
    tx.moves.change([BuildChange(derivation, old, new)])


async def _store_products(tx: Transaction, derivation: int, outputs: Collection[BuiltOutput]) -> None:
    rows = [(output.name, product) for output in outputs for product in output.products]
    if not rows:
        return
    await tx.run(DROP_PRODUCTS, derivation=derivation)
    await tx.run(
        INSERT_PRODUCTS,
        derivation=derivation,
        outputs=[name for name, _ in rows],
        types=[product.file_type for _, product in rows],
        subtypes=[product.subtype for _, product in rows],
        names=[product.name for _, product in rows],
        paths=[product.path for _, product in rows],
        sizes=[product.size for _, product in rows],
    )


async def _store_metrics(tx: Transaction, job: Assignment, metrics: BuildMetrics) -> None:
    await tx.run(
        INSERT_METRIC, derivation=job.derivation, worker=job.worker_id, now=tx.now, **attrs.asdict(metrics)
    )


def _cut(text: str) -> str:
    """At most MAX_FAILURE_MESSAGE bytes, cut between characters."""
    data = text.replace("\0", "").encode(errors="replace")
    if len(data) <= MAX_FAILURE_MESSAGE:
        return data.decode()
    return data[:MAX_FAILURE_MESSAGE].decode(errors="ignore") + " [cut]"


# --- handed back, lost, tried again ---------------------------------------------------------------


@attrs.frozen
class ReturnAssignment:
    """A worker declined a job it was assigned (writer message): it goes back for others."""

    assignment: int

    async def apply(self, tx: Transaction) -> None:
        """Close the assignment as abandoned."""
        job = await close_assignment(tx, self.assignment, DispatchOutcome.ABANDONED)
        if job is None:
            return
        await close_attempt(tx, self.assignment, AttemptOutcome.ABORTED)
        if job.evaluation is not None and job.kind is JobKind.EVAL:
            await requeue_evaluation(tx, job.evaluation)
        elif job.derivation is not None:
            await requeue_builds(tx, [job.derivation])


@attrs.frozen
class LoseAssignments:
    """The worker of these assignments is gone (writer message)."""

    assignments: tuple[int, ...]

    async def apply(self, tx: Transaction) -> None:
        """Builds back to Queued, evaluations back to waiting; those lost too often fail."""
        await _lose(tx, self.assignments)


@attrs.frozen
class LoseWorker:
    """A worker is gone (writer message), with every assignment it holds: also one whose claim was still
    on its way when the session ended."""

    worker: UUID

    async def apply(self, tx: Transaction) -> None:
        """As LoseAssignments."""
        await _lose(tx, await assignments_of_worker(tx, self.worker))


async def _lose(tx: Transaction, assignments: Collection[int]) -> None:
    closed = await abandon_assignments(tx, assignments)
    await tx.run(LOSE_ATTEMPTS, assignments=[i for i, *_ in closed], now=tx.now)
    builds = [derivation for _, kind, _, derivation in closed if kind is JobKind.BUILD and derivation]
    await requeue_builds(tx, ordered(builds))
    await _give_up_lost(tx, builds)
    evaluations = [e for _, kind, e, _ in closed if kind is JobKind.EVAL and e is not None]
    await lose_evaluations(tx, evaluations)


async def requeue_builds(tx: Transaction, builds: Collection[int]) -> None:
    """Back for others: what a worker had, whether it had begun or not."""
    if not builds:
        return
    requeued = await tx.ids(REQUEUE_BUILDING, ids=builds, now=tx.now)
    tx.moves.change(BuildChange(i, BuildStatus.BUILDING, BuildStatus.QUEUED) for i in requeued)
    tx.moves.returned.update(f"build:{i}" for i in builds)
    await _settle_requeued(tx, builds)


async def _give_up_lost(tx: Transaction, builds: Collection[int]) -> None:
    """Builds that took ten workers in a row with them."""
    if not builds:
        return
    streaks = await tx.ids(LOST_STREAKS, ids=builds, limit=MAX_LOST_WORKERS)
    if streaks:
        rows = await tx.rows(GIVE_UP, ids=streaks, now=tx.now)
        changes = [BuildChange(i, BuildStatus(old), BuildStatus.FAILED_PERMANENT) for i, old in rows]
        tx.moves.change(changes)
        await cascade_dependency_failed(tx, [c.derivation for c in changes])
        await need_after(tx, changes)


@attrs.frozen
class RetryTransient:
    """Queue the transient failures whose backoff is over (writer message); answers how many."""

    limits: RetryLimits

    async def apply(self, tx: Transaction) -> int:
        """Back to Queued, and out of the queue again where the conditions no longer hold."""
        attempts = range(1, MAX_DOUBLINGS + 2)
        due = [tx.now - timedelta(seconds=backoff_secs(attempt, self.limits)) for attempt in attempts]
        requeued = await tx.ids(
            RETRY_TRANSIENT, attempts=list(attempts), due=due, last=attempts[-1], now=tx.now
        )
        tx.moves.change(BuildChange(i, BuildStatus.FAILED_TRANSIENT, BuildStatus.QUEUED) for i in requeued)
        await _settle_requeued(tx, requeued)
        return len(requeued)
