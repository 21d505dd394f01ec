"""Transitions of evaluations: creation, phases, parking, the verdict, abort. Layer: graph.

Source: seeds "Jobs" (Reports, Failures, Abort), "Queueing and Counters" (Evaluation Verdict),
"Waiting and Recovery".
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

import attrs

from gradient.graph.assignments import close_assignment, mark_abort_sent, open_assignment
from gradient.graph.batch_checks import drv_path
from gradient.graph.counters import count_at_the_end, eval_counters, recount_evaluations
from gradient.graph.messages import add_messages
from gradient.graph.moves import JobAbort
from gradient.graph.predicates import any_of, live_evaluation
from gradient.graph.reachability import eval_blocked
from gradient.graph.release import release_evaluation_need
from gradient.graph.repair import RepairScope, repair_build_graph
from gradient.graph.statements import Statement
from gradient.graph.transaction import Rejected, Transaction, ordered
from gradient.model import (
    ABORTABLE,
    EVALUATION_ACTIVE,
    EVALUATION_EVALUATING,
    EVALUATION_RUNNING,
    REQUEUEABLE,
    CachedSource,
    DispatchOutcome,
    EvaluationKind,
    EvaluationStatus,
    FailureKind,
    JobKind,
    MessageLevel,
    Repository,
    Span,
    WalkMode,
)

# Dispatches after which a lost worker fails the evaluation (seed "Jobs", Lost Worker).
MAX_EVAL_DISPATCHES: Final = 10
# Where an evaluation stands whose stream has ended; one that waits before has never been Building.
AFTER_EVALUATION: Final = frozenset({EvaluationStatus.BUILDING, EvaluationStatus.WAITING})

INSERT_EVALUATION: Final = Statement(
    "insert_evaluation",
    """
    INSERT INTO evaluation (project, task, kind, walk_mode, repository, commit, flake_source, wildcards,
                            started_by, source_comment, concurrent, created_at, updated_at)
    SELECT p.id, %(task)s, %(kind)s, %(walk_mode)s, %(repository)s, %(commit)s, %(flake_source)s::jsonb,
           %(wildcards)s, %(started_by)s, %(comment)s, %(task)s::bigint IS NULL, %(now)s, %(now)s
    FROM project p WHERE p.name = %(project)s
    RETURNING id
    """,
)
# One writer of the status: stamps and history go with it, and a parked reason goes away.
SET_STATUS: Final = Statement(
    "set_evaluation_status",
    f"""
    WITH moved AS (
        UPDATE evaluation v
        SET status = %(status)s, updated_at = %(now)s, waiting_reason = %(reason)s::jsonb,
            waiting_since = CASE WHEN %(reason)s::jsonb IS NULL THEN NULL ELSE %(now)s::timestamptz END,
            fetch_started_at = CASE WHEN %(status)s = {int(EvaluationStatus.FETCHING)}
                               THEN coalesce(fetch_started_at, %(now)s) ELSE fetch_started_at END,
            eval_flake_started_at = CASE WHEN %(status)s = {int(EvaluationStatus.EVALUATING_FLAKE)}
                               THEN coalesce(eval_flake_started_at, %(now)s) ELSE eval_flake_started_at END,
            eval_drv_started_at = CASE WHEN %(status)s = {int(EvaluationStatus.EVALUATING_DERIVATION)}
                               THEN coalesce(eval_drv_started_at, %(now)s) ELSE eval_drv_started_at END,
            building_started_at = CASE WHEN %(status)s = {int(EvaluationStatus.BUILDING)}
                               THEN coalesce(building_started_at, %(now)s) ELSE building_started_at END,
            finished_at = CASE WHEN {live_evaluation("v").replace("v.status", "%(status)s")}
                          THEN NULL ELSE %(now)s::timestamptz END
        WHERE v.id = %(evaluation)s AND v.status = ANY(%(allowed)s) AND v.status <> %(status)s
        RETURNING v.id
    )
    INSERT INTO phase_event (evaluation, status, at) SELECT id, %(status)s, %(now)s FROM moved
    RETURNING evaluation
    """,
)
SET_WAITING_REASON: Final = Statement(
    "set_waiting_reason",
    f"""
    UPDATE evaluation SET waiting_reason = %(reason)s::jsonb, updated_at = %(now)s,
           waiting_since = CASE WHEN %(goes_on)s THEN waiting_since ELSE %(now)s::timestamptz END
    WHERE id = %(evaluation)s AND status = {int(EvaluationStatus.WAITING)}
      AND waiting_reason IS DISTINCT FROM %(reason)s::jsonb
    RETURNING id
    """,
)
IS_CLAIMED: Final = Statement(
    "evaluation_is_claimed",
    "SELECT EXISTS (SELECT FROM dispatched_job WHERE job_id = %(job)s AND finished_at IS NULL)",
)
# A named derivation whose subtree is not recorded to its leaves, though the walk has ended.
WALK_GAP: Final = Statement(
    "walk_gap",
    """
    SELECT gap.hash, gap.name, gap.walked FROM build_job j, LATERAL (
        SELECT d.id, d.hash, d.name, d.walked FROM derivation d
        WHERE d.id = j.derivation AND (NOT d.walked OR d.unwalked_inputs > 0) OFFSET 0) gap
    WHERE j.evaluation = %(evaluation)s ORDER BY gap.walked, gap.id LIMIT 1
    """,
)
# Whether something it walked was un-walked meanwhile; asked once.
TAKE_WALK_LOST: Final = Statement(
    "take_walk_lost",
    "UPDATE evaluation SET walk_lost = false WHERE id = %(evaluation)s AND walk_lost RETURNING id",
)
SET_FLAKE_SOURCE: Final = Statement(
    "set_flake_source",
    "UPDATE evaluation SET flake_source = %(source)s::jsonb, commit = coalesce(%(rev)s, commit)"
    " WHERE id = %(evaluation)s",
)
SET_STATS: Final = Statement(
    "set_evaluation_stats",
    """
    INSERT INTO evaluation_metric (evaluation, attributes, derivations, failed_attributes, fetch_ms, eval_ms,
                                   walk_ms, peak_rss_mb)
    VALUES (%(evaluation)s, %(attributes)s, %(derivations)s, %(failed_attributes)s, %(fetch_ms)s, %(eval_ms)s,
            %(walk_ms)s, %(peak_rss_mb)s)
    ON CONFLICT (evaluation) DO UPDATE
    SET attributes = excluded.attributes, derivations = excluded.derivations,
        failed_attributes = excluded.failed_attributes, fetch_ms = excluded.fetch_ms,
        eval_ms = excluded.eval_ms, walk_ms = excluded.walk_ms, peak_rss_mb = excluded.peak_rss_mb
    """,
)
COUNT_DISPATCHES: Final = Statement(
    "count_eval_dispatches",
    f"""
    SELECT count(*), count(*) FILTER (WHERE outcome <> {int(DispatchOutcome.ABANDONED)}) FROM dispatched_job
    WHERE evaluation = %(evaluation)s AND kind = {int(JobKind.EVAL)}
    """,
)
IS_PAST_EVALUATION: Final = Statement(
    "evaluation_is_past_evaluation",
    f"""
    SELECT v.building_started_at IS NOT NULL AND {any_of("v.status", AFTER_EVALUATION)}
    FROM evaluation v WHERE v.id = %(evaluation)s
    """,
)
# Evaluations past their evaluation phase that name one of these, and whose counters say "done".
TO_FINISH: Final = Statement(
    "evaluations_to_finish",
    f"""
    SELECT v.id FROM evaluation v
    WHERE v.id IN (SELECT j.evaluation FROM build_job j WHERE j.derivation = ANY(%(ids)s))
      AND v.building_started_at IS NOT NULL
      AND {any_of("v.status", AFTER_EVALUATION)}
      AND v.active_shared_builds + coalesce((SELECT sum(x.active) FROM evaluation_shared_build_delta x
                                             WHERE x.evaluation = v.id), 0) <= 0
    """,
)
# No row before the stream has ended: one that waits for a worker meanwhile has nothing to finish yet.
HAS_FAILED: Final = Statement(
    "evaluation_has_failed",
    f"""
    WITH named AS MATERIALIZED (SELECT derivation FROM build_job WHERE evaluation = %(evaluation)s)
    SELECT EXISTS (SELECT FROM evaluation_message m
                   WHERE m.evaluation = %(evaluation)s AND m.level = {int(MessageLevel.ERROR)})
        OR EXISTS (SELECT FROM named, LATERAL (
                       SELECT FROM derivation_build b
                       WHERE b.derivation = named.derivation AND {any_of("b.status", REQUEUEABLE)}
                       OFFSET 0) failed)
    FROM evaluation v WHERE v.id = %(evaluation)s AND v.building_started_at IS NOT NULL
    """,
)
IS_LIVE: Final = Statement(
    "evaluation_is_live", f"SELECT {live_evaluation('v')} FROM evaluation v WHERE v.id = %(evaluation)s"
)


# --- status ---------------------------------------------------------------------------------------


async def is_live(tx: Transaction, evaluation: int) -> bool:
    """Whether an evaluation exists and has not ended."""
    return bool(await tx.value(IS_LIVE, evaluation=evaluation))


async def set_status(
    tx: Transaction,
    evaluation: int,
    status: EvaluationStatus,
    allowed: Collection[EvaluationStatus],
    reason: dict[str, Any] | None = None,
) -> bool:
    """Move an evaluation to `status` from one of `allowed`; False when it stands elsewhere."""
    moved = await tx.ids(
        SET_STATUS,
        evaluation=evaluation,
        status=status,
        allowed=sorted(allowed),
        reason=None if reason is None else json.dumps(reason),
        now=tx.now,
    )
    if moved:
        tx.moves.evaluations[evaluation] = status
    return bool(moved)


@attrs.frozen
class CreateEvaluation:
    """A new evaluation in Queued (writer message); exactly one of `repository` and `cached` is set.

    Answers its id. Raises Rejected for an unknown project and for no source or two. Not idempotent: the
    caller sends it once.
    """

    project: str
    repository: Repository | None = None
    cached: CachedSource | None = None
    wildcards: tuple[str, ...] = ()
    task: int | None = None
    kind: EvaluationKind = EvaluationKind.NORMAL
    walk_mode: WalkMode = WalkMode.PRUNED
    started_by: str | None = None
    comment: str | None = None

    async def apply(self, tx: Transaction) -> int:
        """Insert the row."""
        if (self.repository is None) == (self.cached is None):
            raise Rejected("an evaluation has one source: a repository or a store path")
        evaluation: int | None = await tx.value(
            INSERT_EVALUATION,
            project=self.project,
            task=self.task,
            kind=self.kind,
            walk_mode=self.walk_mode,
            repository=self.repository.url if self.repository else None,
            commit=self.repository.commit if self.repository else None,
            flake_source=json.dumps(attrs.asdict(self.cached)) if self.cached else None,
            wildcards=self.wildcards,
            started_by=self.started_by,
            comment=self.comment,
            now=tx.now,
        )
        if evaluation is None:
            raise Rejected(f"there is no project {self.project!r}")
        tx.moves.evaluations[evaluation] = EvaluationStatus.QUEUED
        return evaluation


# --- reports of a flake job -----------------------------------------------------------------------

# The statuses a phase report may come from: a cached follow-up skips Fetching.
_BEFORE: Final = {
    EvaluationStatus.FETCHING: {EvaluationStatus.QUEUED},
    EvaluationStatus.EVALUATING_FLAKE: {EvaluationStatus.QUEUED, EvaluationStatus.FETCHING},
    EvaluationStatus.EVALUATING_DERIVATION: {EvaluationStatus.QUEUED} | EVALUATION_RUNNING,
}


@attrs.frozen
class EvaluationPhase:
    """A worker's Fetching, EvaluatingFlake or EvaluatingDerivations (writer message)."""

    assignment: int
    status: EvaluationStatus

    async def apply(self, tx: Transaction) -> bool:
        """Move the evaluation on; False when the assignment is closed or the evaluation over: the job must
        stop."""
        job = await open_assignment(tx, self.assignment)
        if job is None or job.evaluation is None:
            return False
        await set_status(tx, job.evaluation, self.status, _BEFORE[self.status])
        return await is_live(tx, job.evaluation)


@attrs.frozen
class StoreFetchResult:
    """The fetched source of an evaluation (writer message)."""

    evaluation: int
    source: CachedSource

    async def apply(self, tx: Transaction) -> None:
        """Store it."""
        source = json.dumps(attrs.asdict(self.source))
        await tx.run(SET_FLAKE_SOURCE, evaluation=self.evaluation, source=source, rev=self.source.rev)


@attrs.frozen
class StoreEvalStats:
    """Evaluation metrics (writer message)."""

    evaluation: int
    attributes: int
    derivations: int
    failed_attributes: int
    fetch_ms: int | None = None
    eval_ms: int | None = None
    walk_ms: int | None = None
    peak_rss_mb: int | None = None

    async def apply(self, tx: Transaction) -> None:
        """Store them."""
        await tx.run(SET_STATS, **attrs.asdict(self))


@attrs.frozen
class EvalStreamCompleted:
    """JobCompleted of a flake job (writer message): every batch is recorded.

    A fetch-only job leaves its evaluation in Fetching for the follow-up and answers True. Otherwise the
    evaluation turns Building, and ends at once when nothing blocks it.
    """

    assignment: int
    timeline: tuple[Span, ...] = ()

    async def apply(self, tx: Transaction) -> bool:
        """Close the assignment and move on; answers whether a follow-up job is due."""
        job = await close_assignment(tx, self.assignment, DispatchOutcome.COMPLETED, self.timeline)
        if job is None or job.evaluation is None:
            return False
        if job.fetch_only:
            return True
        gap = await tx.rows(WALK_GAP, evaluation=job.evaluation)
        if gap and await tx.ids(TAKE_WALK_LOST, evaluation=job.evaluation):
            await requeue_evaluation(tx, job.evaluation)
        elif gap:
            await fail_evaluation(tx, job.evaluation, "evaluation", _gap_in_words(*gap[0]))
        elif await set_status(tx, job.evaluation, EvaluationStatus.BUILDING, EVALUATION_EVALUATING):
            await repair_build_graph(tx, job.evaluation, RepairScope.EVAL)
            await check_evaluation_done(tx, job.evaluation)
        else:
            early = {EvaluationStatus.QUEUED, EvaluationStatus.FETCHING}
            why = "the worker ended its job without evaluating anything"
            await fail_evaluation(tx, job.evaluation, "evaluation", why, early)
        return False


def _gap_in_words(hash_part: str, name: str, walked: bool) -> str:
    path = drv_path(hash_part, name)
    if walked:
        return f"something that {path} needs has no record: it was taken out of the graph meanwhile"
    return f"the worker ended its job without the record of {path}, which others need"


@attrs.frozen
class EvalFailed:
    """JobFailed of a flake job (writer message). `missing_paths` are hash parts that the cache lists and
    could not give."""

    assignment: int
    kind: FailureKind
    error: str
    max_attempts: int
    timeline: tuple[Span, ...] = ()
    missing_paths: tuple[str, ...] = ()

    async def apply(self, tx: Transaction) -> None:
        """Requeue or end the evaluation, by the kind of failure (seed "Jobs", Failures)."""
        tx.moves.suspected.update(self.missing_paths)
        abandoned = self.kind in {FailureKind.CANCELED, FailureKind.ABORTED}
        outcome = DispatchOutcome.ABANDONED if abandoned else DispatchOutcome.FAILED
        job = await close_assignment(tx, self.assignment, outcome, self.timeline)
        if job is None or job.evaluation is None:
            return
        if self.kind is FailureKind.ABORTED:
            await abort_evaluation(tx, job.evaluation, self.error)
        elif self.kind is FailureKind.CANCELED or await self._may_retry(tx, job.evaluation):
            await requeue_evaluation(tx, job.evaluation)
        else:
            await fail_evaluation(tx, job.evaluation, "evaluation", self.error)

    async def _may_retry(self, tx: Transaction, evaluation: int) -> bool:
        if self.kind is not FailureKind.TRANSIENT:
            return False
        _, counted = (await tx.rows(COUNT_DISPATCHES, evaluation=evaluation))[0]
        return bool(counted < self.max_attempts)


# --- parking --------------------------------------------------------------------------------------


@attrs.frozen
class ParkEvaluation:
    """Park an evaluation with a reason, or renew the reason of a parked one (writer message).

    `seen` is the status it was judged in: one that went on meanwhile stays as it is. `goes_on` keeps the
    time of the park: the reason changed only in its numbers.
    """

    evaluation: int
    seen: EvaluationStatus
    reason: dict[str, Any]
    goes_on: bool = False

    async def apply(self, tx: Transaction) -> None:
        """Turn it Waiting; written only when the reason's JSON changed."""
        if self.seen is not EvaluationStatus.WAITING:
            if not await self._claimed(tx):
                await set_status(tx, self.evaluation, EvaluationStatus.WAITING, {self.seen}, self.reason)
            return
        changed = await tx.ids(
            SET_WAITING_REASON,
            evaluation=self.evaluation,
            reason=json.dumps(self.reason),
            goes_on=self.goes_on,
            now=tx.now,
        )
        tx.moves.progressed.update(changed)

    async def _claimed(self, tx: Transaction) -> bool:
        """A claim leaves its evaluation Queued until the worker reports: it waits for nobody."""
        queued = self.seen is EvaluationStatus.QUEUED
        return queued and bool(await tx.value(IS_CLAIMED, job=f"eval:{self.evaluation}"))


@attrs.frozen
class UnparkEvaluation:
    """Back from Waiting to Queued or Building (writer message)."""

    evaluation: int
    status: EvaluationStatus

    async def apply(self, tx: Transaction) -> None:
        """Move it; a no-op when it is not parked any more."""
        if await set_status(tx, self.evaluation, self.status, {EvaluationStatus.WAITING}):
            tx.moves.returned.add(f"eval:{self.evaluation}")


async def requeue_evaluation(tx: Transaction, evaluation: int) -> None:
    """Its job came back undone: any worker may have it."""
    await set_status(tx, evaluation, EvaluationStatus.QUEUED, EVALUATION_RUNNING)
    tx.moves.returned.add(f"eval:{evaluation}")


async def lose_evaluations(tx: Transaction, evaluations: Collection[int]) -> None:
    """Their worker is gone: they wait for one, or fail when that happened too often. The waiting pass puts
    them back into the queue as soon as a worker can take them, and renews the reason until then."""
    for evaluation in ordered(evaluations):
        dispatches, _ = (await tx.rows(COUNT_DISPATCHES, evaluation=evaluation))[0]
        if dispatches >= MAX_EVAL_DISPATCHES:
            why = f"given up after {dispatches} workers were lost in the middle of it"
            await fail_evaluation(tx, evaluation, "evaluation", why)
            continue
        for capability, running in (
            ("fetch", {EvaluationStatus.FETCHING}),
            ("eval", EVALUATION_EVALUATING),
        ):
            reason = {"kind": "eval_workers", "capability": capability, "connected_workers": 0}
            await set_status(tx, evaluation, EvaluationStatus.WAITING, running, reason)
        # One that had not begun is Queued still.
        tx.moves.returned.add(f"eval:{evaluation}")


# --- the end --------------------------------------------------------------------------------------


async def check_evaluation_done(tx: Transaction, evaluation: int) -> bool:
    """Write the verdict once no blocking shared build is left; True when it was written."""
    counters = (await eval_counters(tx, [evaluation])).get(evaluation)
    if counters is None or counters.active > 0:
        return False
    if await eval_blocked(tx, evaluation):
        # The zero is contradicted: the counters have drifted.
        await recount_evaluations(tx.connection, [evaluation])
        return False
    failed = await tx.value(HAS_FAILED, evaluation=evaluation)
    if failed is None:
        return False
    verdict = EvaluationStatus.FAILED if failed else EvaluationStatus.COMPLETED
    return await set_status(tx, evaluation, verdict, AFTER_EVALUATION)


async def finish_evaluations(tx: Transaction) -> None:
    """Finish every evaluation that names what this transaction ended or stopped wanting."""
    unsettled = [
        i for i in tx.moves.unsettled if i not in tx.moves.builds or tx.moves.builds[i].new not in ABORTABLE
    ]
    tx.moves.unsettled.clear()
    if unsettled:
        for evaluation in await tx.ids(TO_FINISH, ids=ordered(unsettled)):
            await check_evaluation_done(tx, evaluation)


@attrs.frozen
class FinishEvaluation:
    """Check an evaluation whose counters say that nothing blocks it (writer message)."""

    evaluation: int

    async def apply(self, tx: Transaction) -> bool:
        """Write the verdict if it is due."""
        return await check_evaluation_done(tx, self.evaluation)


async def fail_evaluation(
    tx: Transaction,
    evaluation: int,
    source: str,
    error: str,
    allowed: Collection[EvaluationStatus] = EVALUATION_ACTIVE,
) -> None:
    """End an evaluation with an error, unless it has ended. What it named is still wanted by its entry
    points."""
    if await set_status(tx, evaluation, EvaluationStatus.FAILED, allowed):
        await add_messages(tx, evaluation, MessageLevel.ERROR, source, [error])


@attrs.frozen
class FailEvaluation:
    """Fail an evaluation from the server's side (writer message)."""

    evaluation: int
    source: str
    error: str

    async def apply(self, tx: Transaction) -> None:
        """End it with the error, and stop its flake job."""
        await fail_evaluation(tx, self.evaluation, self.source, self.error)
        await abort_jobs(tx, [f"eval:{self.evaluation}"], self.error)


async def abort_evaluation(tx: Transaction, evaluation: int, reason: str) -> bool:
    """Abort an evaluation and the builds that no other live evaluation wants; False when it had ended."""
    if not await set_status(tx, evaluation, EvaluationStatus.ABORTED, EVALUATION_ACTIVE):
        return False
    await add_messages(tx, evaluation, MessageLevel.NOTICE, "abort", [reason], repeat=True)
    ended = await release_evaluation_need(tx, evaluation)
    await count_at_the_end(tx, evaluation)
    await abort_jobs(tx, [f"eval:{evaluation}", *(f"build:{i}" for i in ended)], reason)
    return True


async def abort_jobs(tx: Transaction, jobs: Collection[str], reason: str) -> None:
    """Those of `jobs` that are on a worker stop there."""
    tx.moves.aborts += [JobAbort(job, reason) for job in await mark_abort_sent(tx, jobs)]


@attrs.frozen
class AbortEvaluation:
    """Abort an evaluation (writer message), with a warning for its page when there is one."""

    evaluation: int
    reason: str
    warning: str | None = None

    async def apply(self, tx: Transaction) -> bool:
        """Abort it; False when it had ended already."""
        if not await abort_evaluation(tx, self.evaluation, self.reason):
            return False
        if self.warning:
            await add_messages(tx, self.evaluation, MessageLevel.WARNING, "scheduler", [self.warning])
        return True
