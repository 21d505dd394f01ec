"""Transitions of shared builds: started, built, failed, lost, tried again. Layer: graph.

Each report works through its open assignment: closing the row and writing the status are one step, so
a report that comes twice, or after somebody else closed the row, changes nothing.
Source: seed "Jobs", Build Jobs, Reports, Failures, Abort and Lost Workers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from datetime import timedelta
from typing import ClassVar, Final, Self
from uuid import UUID

import attrs

from gradient.graph.assignments import (
    abandon_assignments,
    assignments_of_worker,
    close_assignment,
    close_attempt,
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
from gradient.graph.joint import Joint, Stage
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
# Sizes by assignment and output. Answers the open assignments, with what metrics need.
STORE_OUTPUTS: Final = Statement(
    "store_build_outputs",
    """
    WITH job AS (
        SELECT q.id, q.derivation, q.worker_id, r.substituted
        FROM unnest(%(assignments)s::bigint[], %(substituted)s::boolean[]) AS r (assignment, substituted)
        JOIN dispatched_job q ON q.id = r.assignment AND q.finished_at IS NULL
    ), marked AS (
        UPDATE derivation_build b SET substituted = job.substituted FROM job
        WHERE b.derivation = job.derivation AND b.substituted <> job.substituted
    ), sized AS (
        UPDATE derivation_output o SET nar_size = r.nar_size
        FROM job JOIN unnest(%(owners)s::bigint[], %(names)s::text[], %(sizes)s::bigint[])
            AS r (assignment, name, nar_size) ON r.assignment = job.id
        WHERE o.derivation = job.derivation AND o.name = r.name AND o.nar_size IS DISTINCT FROM r.nar_size
          AND r.nar_size IS NOT NULL
    )
    SELECT id, derivation, worker_id FROM job
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
    "drop_build_products", "DELETE FROM build_product WHERE derivation = ANY(%(derivations)s)"
)
INSERT_PRODUCTS: Final = Statement(
    "insert_build_products",
    """
    INSERT INTO build_product (derivation, output, file_type, subtype, name, path, size)
    SELECT * FROM unnest(%(derivations)s::bigint[], %(outputs)s::text[], %(types)s::text[],
                         %(subtypes)s::text[], %(names)s::text[], %(paths)s::text[], %(sizes)s::bigint[])
    """,
)
INSERT_METRICS: Final = Statement(
    "insert_derivation_metrics",
    """
    INSERT INTO derivation_metric (derivation, history_name, architecture, build_time_ms, peak_ram_mb,
        cpu_time_ms, avg_cpu_pct, disk_read_bytes, disk_write_bytes, oom_killed, concurrent_builds,
        build_cores, cpu_core_score, worker_id, created_at)
    SELECT d.id, coalesce(d.pname, d.name), d.architecture, r.build_time_ms, r.peak_ram_mb, r.cpu_time_ms,
        r.avg_cpu_pct, r.disk_read_bytes, r.disk_write_bytes, r.oom_killed, r.concurrent_builds,
        r.build_cores, r.cpu_core_score, r.worker_id, %(now)s
    FROM jsonb_to_recordset(%(metrics)s::jsonb) AS r (derivation bigint, worker_id uuid,
        build_time_ms integer, peak_ram_mb integer, cpu_time_ms integer, avg_cpu_pct real,
        disk_read_bytes bigint, disk_write_bytes bigint, oom_killed boolean, concurrent_builds integer,
        build_cores integer, cpu_core_score integer)
    JOIN derivation d ON d.id = r.derivation
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
class StoreBuildOutput(Joint[None]):
    """What was built (writer message): sizes, products, metrics, the `substituted` flag."""

    assignment: int
    outputs: tuple[BuiltOutput, ...]
    substituted: bool
    metrics: BuildMetrics | None = None

    stage: ClassVar[Stage] = Stage.OUTPUT

    @property
    def subject(self) -> Hashable:
        """The assignment."""
        return self.assignment

    @classmethod
    async def apply_together(cls, tx: Transaction, messages: Sequence[Self]) -> list[None]:
        """Store it; dropped where the assignment is closed."""
        sizes = [(m.assignment, output.name, output.nar_size) for m in messages for output in m.outputs]
        rows = await tx.rows(
            STORE_OUTPUTS,
            assignments=[message.assignment for message in messages],
            substituted=[message.substituted for message in messages],
            owners=[assignment for assignment, _, _ in sizes],
            names=[name for _, name, _ in sizes],
            sizes=[size for _, _, size in sizes],
        )
        by_assignment = {message.assignment: message for message in messages}
        found = [(by_assignment[assignment], derivation, worker) for assignment, derivation, worker in rows]
        await _store_products(tx, {derivation: message.outputs for message, derivation, _ in found})
        await _store_metrics(
            tx, [(d, worker, m.metrics) for m, d, worker in found if m.metrics and not m.substituted]
        )
        return [None] * len(messages)


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
            await _store_metrics(tx, [(job.derivation, job.worker_id, self.metrics)])
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
        else:
            await settle_held(tx, [job.derivation])
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


async def _store_products(tx: Transaction, outputs: Mapping[int, Sequence[BuiltOutput]]) -> None:
    """The products of builds, by derivation, in place of earlier ones."""
    rows = [
        (derivation, output.name, product)
        for derivation, built in outputs.items()
        for output in built
        for product in output.products
    ]
    if not rows:
        return
    await tx.run(DROP_PRODUCTS, derivations=ordered(derivation for derivation, _, _ in rows))
    products = [product for _, _, product in rows]
    await tx.run(
        INSERT_PRODUCTS,
        derivations=[derivation for derivation, _, _ in rows],
        outputs=[name for _, name, _ in rows],
        types=[product.file_type for product in products],
        subtypes=[product.subtype for product in products],
        names=[product.name for product in products],
        paths=[product.path for product in products],
        sizes=[product.size for product in products],
    )


async def _store_metrics(tx: Transaction, measured: Sequence[tuple[int, UUID, BuildMetrics]]) -> None:
    """What builds took, by derivation and worker."""
    rows = [
        {"derivation": derivation, "worker_id": str(worker), **attrs.asdict(metrics)}
        for derivation, worker, metrics in measured
    ]
    if rows:
        await tx.run(INSERT_METRICS, metrics=json.dumps(rows), now=tx.now)


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
