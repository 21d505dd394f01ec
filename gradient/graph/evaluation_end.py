"""How an evaluation ends: by its verdict, an error, an abort, or too many lost workers. Layer: graph.

Source: seeds "Queueing and Counters" (Evaluation Verdict), "Jobs" (Failures, Abort and Lost Workers).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs

from gradient.graph.assignments import mark_abort_sent
from gradient.graph.counters import count_at_the_end, eval_counters, recount_evaluations
from gradient.graph.evaluations import set_status
from gradient.graph.messages import add_messages
from gradient.graph.moves import JobAbort
from gradient.graph.predicates import any_of, past_walk
from gradient.graph.reachability import eval_blocked
from gradient.graph.release import release_evaluation_need
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import (
    ABORTABLE,
    EVALUATION_ACTIVE,
    EVALUATION_AFTER_WALK,
    EVALUATION_EVALUATING,
    REQUEUEABLE,
    DispatchOutcome,
    EvaluationStatus,
    JobKind,
    MessageLevel,
)

# Dispatches after which a lost worker fails the evaluation (seed "Jobs", Lost Worker).
MAX_EVAL_DISPATCHES: Final = 10

COUNT_DISPATCHES: Final = Statement(
    "count_eval_dispatches",
    f"""
    SELECT count(*), count(*) FILTER (WHERE outcome <> {int(DispatchOutcome.ABANDONED)}) FROM dispatched_job
    WHERE evaluation = %(evaluation)s AND kind = {int(JobKind.EVAL)}
    """,
)
# Evaluations past their walk that name one of these, and whose counters say "done".
TO_FINISH: Final = Statement(
    "evaluations_to_finish",
    f"""
    SELECT v.id FROM evaluation v
    WHERE v.id IN (SELECT j.evaluation FROM build_job j WHERE j.derivation = ANY(%(ids)s))
      AND {past_walk("v")}
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
    return await set_status(tx, evaluation, verdict, EVALUATION_AFTER_WALK)


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


async def lose_evaluations(tx: Transaction, evaluations: Collection[int]) -> None:
    """Their worker is gone: they wait for one, or fail when that happened too often. The waiting pass puts
    them back into the queue as soon as a worker can take them, and renews the reason until then."""
    for evaluation in ordered(evaluations):
        dispatches, _ = (await tx.rows(COUNT_DISPATCHES, evaluation=evaluation))[0]
        if dispatches >= MAX_EVAL_DISPATCHES:
            why = f"given up after {dispatches} workers were lost in the middle of it"
            await fail_evaluation(tx, evaluation, "evaluation", why)
            continue
        for capability, running in (("fetch", {EvaluationStatus.FETCHING}), ("eval", EVALUATION_EVALUATING)):
            reason = {"kind": "eval_workers", "capability": capability, "connected_workers": 0}
            await set_status(tx, evaluation, EvaluationStatus.WAITING, running, reason)
        # One that had not begun is Queued still.
        tx.moves.returned.add(f"eval:{evaluation}")


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
