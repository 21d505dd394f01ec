"""What a failed build attempt leads to: one pure decision. Layer: graph, no IO.

Source: seed "Jobs", Failures.
"""

from __future__ import annotations

from typing import Final

import attrs

from gradient.model import AttemptOutcome, AttemptReason, BuildStatus, FailureKind

# Seconds to wait before a retry never double beyond this many times.
MAX_DOUBLINGS: Final = 16


@attrs.frozen
class RetryLimits:
    """The `[build]` settings the decisions need. Seconds where a name says so."""

    max_attempts: int = 3
    retry_backoff_secs: int = 30
    substitute_miss_threshold: int = 2
    inputs_unavailable_max_loops: int = 3


@attrs.frozen
class FailedAttempt:
    """A failure as the graph knows it: `attempt` counts the failed tries before this one, `misses` the
    upstream misses and `loops` the InputsUnavailable attempts, this one excluded."""

    kind: FailureKind
    attempt: int
    cache_available: bool = False
    misses: int = 0
    loops: int = 0
    oom_killed: bool = False


@attrs.frozen
class Decision:
    """The status to write, how the attempt closes, and what else follows."""

    status: BuildStatus
    outcome: AttemptOutcome
    reason: AttemptReason | None
    attempt: int
    # Dependents fail with it.
    cascade: bool = False
    # The upstream copy is given up: the build is built normally from here on.
    exhaust_substitution: bool = False


def decide(failed: FailedAttempt, limits: RetryLimits) -> Decision:
    """What follows from a failed attempt. A build killed for memory is Transient, whatever was sent."""
    kind = FailureKind.TRANSIENT if failed.oom_killed else failed.kind
    match kind:
        case FailureKind.ABORTED:
            return Decision(BuildStatus.ABORTED, AttemptOutcome.ABORTED, None, failed.attempt)
        case FailureKind.CANCELED:
            return Decision(BuildStatus.QUEUED, AttemptOutcome.ABORTED, None, failed.attempt)
        case FailureKind.TIMEOUT:
            return _final(failed, BuildStatus.FAILED_TIMEOUT, AttemptReason.WALL_CLOCK_TIMEOUT)
        case FailureKind.SUBSTITUTE_UNAVAILABLE if failed.cache_available:
            return _missed(failed, limits)
        # A miss of what no upstream cache is said to have would be tried again at once and for ever.
        case FailureKind.TRANSIENT | FailureKind.INPUTS_UNAVAILABLE | FailureKind.SUBSTITUTE_UNAVAILABLE:
            return _maybe_again(failed, kind, limits)
        case _:
            return _final(failed, BuildStatus.FAILED_PERMANENT, AttemptReason.BUILDER_NONZERO)


def backoff_secs(attempt: int, limits: RetryLimits) -> int:
    """Seconds before try `attempt` + 1: doubling from the base."""
    return limits.retry_backoff_secs << min(max(attempt - 1, 0), MAX_DOUBLINGS)


def _final(failed: FailedAttempt, status: BuildStatus, reason: AttemptReason | None) -> Decision:
    return Decision(status, AttemptOutcome.FAILED, reason, failed.attempt + 1, cascade=True)


def _missed(failed: FailedAttempt, limits: RetryLimits) -> Decision:
    reason = AttemptReason.SUBSTITUTE_UNAVAILABLE
    if failed.misses + 1 < limits.substitute_miss_threshold:
        return Decision(BuildStatus.QUEUED, AttemptOutcome.FAILED, reason, failed.attempt)
    return Decision(BuildStatus.CREATED, AttemptOutcome.FAILED, reason, 0, exhaust_substitution=True)


def _maybe_again(failed: FailedAttempt, kind: FailureKind, limits: RetryLimits) -> Decision:
    inputs = kind is FailureKind.INPUTS_UNAVAILABLE
    reason = AttemptReason.INPUTS_UNAVAILABLE if inputs else AttemptReason.OOM if failed.oom_killed else None
    looped = inputs and failed.loops >= limits.inputs_unavailable_max_loops
    attempt = failed.attempt + 1
    if attempt < limits.max_attempts and not looped:
        return Decision(BuildStatus.FAILED_TRANSIENT, AttemptOutcome.FAILED, reason, attempt)
    if failed.cache_available and not looped:
        return _missed(failed, limits)
    return _final(failed, BuildStatus.FAILED_PERMANENT, reason)
