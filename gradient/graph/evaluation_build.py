"""Abort and retry of one build of an evaluation. Layer: graph, run by the graph writer.

A person stops a build on behalf of an evaluation that names it, or asks for a failed one again. An abort
is a mark on its build job (`build_job.aborted`): it holds until somebody retries the build, or another
evaluation asks for it (docs/adr/0021).
Source: seed "Queueing and Counters", Build Abort and Retry.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Final

import attrs

from gradient.graph.counters import recount_evaluations
from gradient.graph.dependency_failure import repair_dependency_failed
from gradient.graph.evaluation_end import abort_jobs, check_evaluation_done
from gradient.graph.evaluations import set_status
from gradient.graph.messages import add_messages
from gradient.graph.moves import BuildChange
from gradient.graph.need import settle_aborted, update_and_settle_need
from gradient.graph.predicates import any_of, live_evaluation, unassigned_predicate
from gradient.graph.reachability import unfetchable_closure
from gradient.graph.release import ENTRY_POINTS_OF
from gradient.graph.repair import RepairScope, repair_build_graph, retry_closure
from gradient.graph.statements import Statement
from gradient.graph.transaction import Rejected, Transaction, ordered
from gradient.model import ABORTABLE, USER_RETRYABLE, BuildStatus, EvaluationStatus, MessageLevel

# Ended evaluations that a retry may open again, once they had come to their builds.
REOPENABLE: Final = frozenset({EvaluationStatus.FAILED, EvaluationStatus.ABORTED})

# The build of the evaluation that is asked for; without one, of a live evaluation, then of the newest.
BUILD_OF_EVALUATION: Final = Statement(
    "build_of_evaluation",
    f"""
    SELECT j.evaluation, b.status, {live_evaluation("v")},
           {any_of("v.status", REOPENABLE)} AND v.building_started_at IS NOT NULL,
           EXISTS (SELECT FROM evaluation o WHERE o.task = v.task AND o.id <> v.id
                   AND (o.id > v.id OR {live_evaluation("o")})),
           d.name
    FROM build_job j
    JOIN evaluation v ON v.id = j.evaluation
    JOIN derivation d ON d.id = j.derivation
    JOIN derivation_build b ON b.derivation = j.derivation
    WHERE j.derivation = %(build)s
      AND j.evaluation = coalesce(%(evaluation)s::bigint, j.evaluation)
    ORDER BY {live_evaluation("v")} DESC, j.evaluation DESC LIMIT 1
    FOR NO KEY UPDATE OF b
    """,
)
ABORT_BUILD: Final = Statement(
    "abort_build",
    f"""
    WITH marked AS (
        UPDATE build_job SET aborted = true WHERE evaluation = %(evaluation)s AND derivation = %(build)s
    )
    UPDATE derivation_build SET status = {int(BuildStatus.ABORTED)}, updated_at = %(now)s
    WHERE derivation = %(build)s
    """,
)
NAMED_BY_OTHERS: Final = Statement(
    "named_by_other_live_evaluations",
    f"""
    SELECT j.evaluation FROM build_job j JOIN evaluation v ON v.id = j.evaluation
    WHERE j.derivation = ANY(%(ids)s) AND j.evaluation <> %(evaluation)s AND NOT j.aborted
      AND {live_evaluation("v")}
    ORDER BY j.evaluation LIMIT 1
    """,
)
ASSIGNED_AMONG: Final = Statement(
    "assigned_among",
    f"""
    SELECT b.derivation FROM derivation_build b
    WHERE b.derivation = ANY(%(ids)s) AND NOT ({unassigned_predicate("b")})
    """,
)
CLEAR_ABORTED: Final = Statement(
    "clear_aborted_marks",
    "UPDATE build_job SET aborted = false WHERE derivation = ANY(%(ids)s) AND aborted",
)
# All of an evaluation that was aborted goes on; one that failed keeps what was aborted in it.
FORGET_ABORT: Final = Statement(
    "forget_abort_of_evaluation",
    f"""
    UPDATE build_job j SET aborted = false FROM evaluation v
    WHERE v.id = %(evaluation)s AND v.status = {int(EvaluationStatus.ABORTED)}
      AND j.evaluation = v.id AND j.aborted
    """,
)
ABORTED_OF_EVALUATION: Final = Statement(
    "aborted_builds_of_evaluation",
    f"""
    SELECT b.derivation FROM build_job j JOIN derivation_build b ON b.derivation = j.derivation
    WHERE j.evaluation = %(evaluation)s AND NOT j.aborted AND b.status = {int(BuildStatus.ABORTED)}
    """,
)


class Refusal(Enum):
    """Why a build is not aborted or retried."""

    NOT_NAMED = "not named"
    EVALUATION_FINISHED = "evaluation finished"
    WRONG_STATUS = "wrong status"
    NEEDED_BY_OTHER_EVALUATION = "needed by another evaluation"
    WORKER_STILL_STOPPING = "worker still stopping"
    NEWER_EVALUATION = "newer evaluation"
    NO_FAILED_DEPENDENCY = "no failed dependency"


class BuildRefused(Rejected):
    """An abort or a retry against the rules; the message is for a person."""

    def __init__(self, refusal: Refusal, words: str) -> None:
        super().__init__(words)
        self.refusal = refusal


@attrs.frozen
class _Found:
    """A build of an evaluation as the rules see it."""

    evaluation: int
    status: BuildStatus = attrs.field(converter=BuildStatus)
    live: bool
    reopenable: bool
    # A newer evaluation of its task, or one that has not ended.
    superseded: bool
    name: str


async def _find(tx: Transaction, build: int, evaluation: int | None) -> _Found:
    rows = await tx.rows(BUILD_OF_EVALUATION, build=build, evaluation=evaluation)
    if not rows:
        where = "" if evaluation is None else f" in evaluation {evaluation}"
        raise BuildRefused(Refusal.NOT_NAMED, f"there is no build {build}{where}")
    return _Found(*rows[0])


# --- abort ----------------------------------------------------------------------------------------


@attrs.frozen
class Aborted:
    """A build was aborted in `evaluation`, and these builds failed with it."""

    evaluation: int
    dependents: tuple[int, ...]


@attrs.frozen
class AbortBuild:
    """Stop a build that has not ended (writer message). Raises BuildRefused.

    Without `evaluation` it is aborted in the one live evaluation that names it.
    """

    build: int
    evaluation: int | None
    who: str

    async def apply(self, tx: Transaction) -> Aborted:
        """Mark and stop it, and fail what wants it in the closure of the evaluation."""
        found = await _find(tx, self.build, self.evaluation)
        if not found.live:
            raise BuildRefused(Refusal.EVALUATION_FINISHED, f"evaluation {found.evaluation} has ended")
        if found.status not in ABORTABLE:
            raise BuildRefused(Refusal.WRONG_STATUS, f"{found.name} is {found.status.label}")
        await tx.run(ABORT_BUILD, evaluation=found.evaluation, build=self.build, now=tx.now)
        tx.moves.change([BuildChange(self.build, found.status, BuildStatus.ABORTED)])
        closure = await unfetchable_closure(tx, found.evaluation)
        failed = await repair_dependency_failed(tx, found.evaluation, closure)
        await _refuse_if_needed_elsewhere(tx, found, [self.build, *failed])
        await update_and_settle_need(tx, [self.build])
        reason = f"{found.name} was aborted by {self.who}"
        await add_messages(tx, found.evaluation, MessageLevel.NOTICE, "abort", [reason], repeat=True)
        await abort_jobs(tx, [f"build:{self.build}"], reason)
        return Aborted(found.evaluation, tuple(failed))


async def _refuse_if_needed_elsewhere(tx: Transaction, found: _Found, ended: Collection[int]) -> None:
    """Nothing that another live evaluation names may end by an abort. It may name only what stands above the
    build, when its walk stopped there. Raising takes back what the abort has done."""
    other = await tx.value(NAMED_BY_OTHERS, ids=ordered(ended), evaluation=found.evaluation)
    if other is not None:
        words = f"{found.name} is needed by evaluation {other} too"
        raise BuildRefused(Refusal.NEEDED_BY_OTHER_EVALUATION, words)


# --- retry ----------------------------------------------------------------------------------------


@attrs.frozen
class Retried:
    """Failed builds wait again in `evaluation`, which was opened again for it or had not ended."""

    evaluation: int
    reopened: bool
    builds: tuple[int, ...]


@attrs.frozen
class RetryBuild:
    """Try a failed build again (writer message). Raises BuildRefused.

    Without `evaluation` it is tried again in a live evaluation that names it, else in the newest.
    """

    build: int
    evaluation: int | None
    who: str

    async def apply(self, tx: Transaction) -> Retried:
        """Open the evaluation again when it has ended, thaw the build, and what failed below and through
        it."""
        found = await _find(tx, self.build, self.evaluation)
        _check_may_go_on(found)
        if found.status not in USER_RETRYABLE:
            raise BuildRefused(Refusal.WRONG_STATUS, f"{found.name} is {found.status.label}")
        closure = await unfetchable_closure(tx, found.evaluation)
        causes, through = await retry_closure(tx, self.build, closure)
        await _check_can_thaw(tx, found, causes, through)
        await tx.run(CLEAR_ABORTED, ids=ordered(causes))
        if not found.live:
            await reopen_evaluation(tx, found.evaluation)
        thawed = ordered(causes | through)
        await repair_build_graph(tx, found.evaluation, RepairScope.RETRY, thawed)
        words = f"{found.name} was tried again by {self.who}"
        await add_messages(tx, found.evaluation, MessageLevel.NOTICE, "retry", [words], repeat=True)
        await check_evaluation_done(tx, found.evaluation)
        return Retried(found.evaluation, not found.live, tuple(thawed))


def _check_may_go_on(found: _Found) -> None:
    if found.live:
        return
    if not found.reopenable:
        words = f"evaluation {found.evaluation} has ended, and had no failed builds to go on with"
        raise BuildRefused(Refusal.EVALUATION_FINISHED, words)
    if found.superseded:
        words = f"evaluation {found.evaluation} is not the newest of its task, or another one still runs"
        raise BuildRefused(Refusal.NEWER_EVALUATION, words)


async def _check_can_thaw(
    tx: Transaction, found: _Found, causes: Collection[int], through: Collection[int]
) -> None:
    if not causes:
        words = f"nothing that {found.name} needs is failed any more: evaluate again"
        raise BuildRefused(Refusal.NO_FAILED_DEPENDENCY, words)
    # A late report of the abort would end what is tried again.
    if await tx.ids(ASSIGNED_AMONG, ids=ordered({*causes, *through})):
        words = f"a worker is still stopping {found.name}, or what it needs: try again in a moment"
        raise BuildRefused(Refusal.WORKER_STILL_STOPPING, words)


async def reopen_evaluation(tx: Transaction, evaluation: int) -> None:
    """Back to Building with an evaluation that had ended (REOPEN_EVALUATION): it can end again.

    Its counters stood still meanwhile; and what it named and was aborted is wanted again, or is no failure
    of it any more: all of it when the evaluation itself had been aborted.
    """
    await tx.run(FORGET_ABORT, evaluation=evaluation)
    await set_status(tx, evaluation, EvaluationStatus.BUILDING, REOPENABLE)
    await recount_evaluations(tx.connection, [evaluation])
    await update_and_settle_need(tx, await tx.ids(ENTRY_POINTS_OF, evaluation=evaluation), only_gains=True)
    await settle_aborted(tx, await tx.ids(ABORTED_OF_EVALUATION, evaluation=evaluation))
