"""Shared builds fail: what that means for the build, for what needs it, and for its inputs. Layer: graph.

`failure.decide` says what becomes of the build, purely; here it is written.
Source: seed "Jobs", Failures.
"""

from __future__ import annotations

from typing import Final

import attrs

from gradient.graph.assignments import close_assignment, close_attempt
from gradient.graph.build_outputs import store_metrics
from gradient.graph.can_start import promote
from gradient.graph.demote import heal_missing_inputs
from gradient.graph.dependency_failure import cascade_dependency_failed
from gradient.graph.failure import Decision, FailedAttempt, RetryLimits, decide
from gradient.graph.moves import BuildChange
from gradient.graph.need import need_after, settle_held, skip_unwanted, thaw_wanted, update_and_settle_need
from gradient.graph.requeue import settle_requeued
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction
from gradient.model import (
    AttemptOutcome,
    AttemptReason,
    BuildMetrics,
    BuildStatus,
    DispatchOutcome,
    FailureKind,
    Span,
)

# Bytes of a failure message kept with its attempt.
MAX_FAILURE_MESSAGE: Final = 8 * 1024

BUILD_STATE: Final = Statement(
    "build_state",
    """
    SELECT b.status, b.attempt, b.cache_available
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
COUNT_FAILURES: Final = Statement(
    "count_attempt_failures",
    f"""
    SELECT count(*) FILTER (WHERE a.reason = {int(AttemptReason.SUBSTITUTE_UNAVAILABLE)}
                            AND a.evaluation IS NOT DISTINCT FROM %(evaluation)s),
           count(*) FILTER (WHERE a.reason = {int(AttemptReason.INPUTS_UNAVAILABLE)})
    FROM build_attempt a WHERE a.derivation = %(derivation)s AND a.outcome = {int(AttemptOutcome.FAILED)}
    """,
)


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
            await store_metrics(tx, [(job.derivation, job.worker_id, self.metrics)])
        ((status, attempt, cache_available),) = await tx.rows(BUILD_STATE, derivation=job.derivation)
        counted = await tx.rows(COUNT_FAILURES, derivation=job.derivation, evaluation=job.evaluation)
        ((misses, loops),) = counted
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
            await settle_requeued(tx, [derivation])
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


async def _write_status(
    tx: Transaction, derivation: int, old: BuildStatus, new: BuildStatus, attempt: int
) -> None:
    await tx.run(WRITE_BUILD_STATUS, derivation=derivation, status=new, attempt=attempt, now=tx.now)
    tx.moves.change([BuildChange(derivation, old, new)])


def _cut(text: str) -> str:
    """At most MAX_FAILURE_MESSAGE bytes, cut between characters."""
    data = text.replace("\0", "").encode(errors="replace")
    if len(data) <= MAX_FAILURE_MESSAGE:
        return data.decode()
    return data[:MAX_FAILURE_MESSAGE].decode(errors="ignore") + " [cut]"
