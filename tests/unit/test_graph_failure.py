"""What a failed attempt leads to: every kind, attempt, cache and loop, against the seed's table."""

from __future__ import annotations

import itertools

import pytest

from gradient.graph.failure import MAX_DOUBLINGS, Decision, FailedAttempt, RetryLimits, backoff_secs, decide
from gradient.model import AttemptOutcome, AttemptReason, BuildStatus, FailureKind

LIMITS = RetryLimits(max_attempts=3, substitute_miss_threshold=2, inputs_unavailable_max_loops=3)
K, S, R = FailureKind, BuildStatus, AttemptReason
FAILED, ABORTED = AttemptOutcome.FAILED, AttemptOutcome.ABORTED


def again(reason: AttemptReason | None, attempt: int) -> Decision:
    return Decision(S.FAILED_TRANSIENT, FAILED, reason, attempt)


def final(status: BuildStatus, reason: AttemptReason | None, attempt: int) -> Decision:
    return Decision(status, FAILED, reason, attempt, cascade=True)


def missed(attempt: int) -> Decision:
    return Decision(S.QUEUED, FAILED, R.SUBSTITUTE_UNAVAILABLE, attempt)


EXHAUSTED = Decision(S.CREATED, FAILED, R.SUBSTITUTE_UNAVAILABLE, 0, exhaust_substitution=True)

TABLE = [
    (FailedAttempt(K.TRANSIENT, 0), again(None, 1)),
    (FailedAttempt(K.TRANSIENT, 1), again(None, 2)),
    (FailedAttempt(K.TRANSIENT, 2), final(S.FAILED_PERMANENT, None, 3)),
    (FailedAttempt(K.TRANSIENT, 9), final(S.FAILED_PERMANENT, None, 10)),
    # What an upstream cache has takes the miss path after its last attempt.
    (FailedAttempt(K.TRANSIENT, 0, cache_available=True), again(None, 1)),
    (FailedAttempt(K.TRANSIENT, 2, cache_available=True), missed(2)),
    (FailedAttempt(K.TRANSIENT, 2, cache_available=True, misses=1), EXHAUSTED),
    (FailedAttempt(K.PERMANENT, 0), final(S.FAILED_PERMANENT, R.BUILDER_NONZERO, 1)),
    (FailedAttempt(K.TIMEOUT, 1), final(S.FAILED_TIMEOUT, R.WALL_CLOCK_TIMEOUT, 2)),
    (FailedAttempt(K.CORRUPT_EVAL_CACHE, 0), final(S.FAILED_PERMANENT, R.BUILDER_NONZERO, 1)),
    # Requeued at once, without an attempt; built normally after the second miss.
    (FailedAttempt(K.SUBSTITUTE_UNAVAILABLE, 0, cache_available=True), missed(0)),
    (FailedAttempt(K.SUBSTITUTE_UNAVAILABLE, 1, cache_available=True), missed(1)),
    (FailedAttempt(K.SUBSTITUTE_UNAVAILABLE, 2, cache_available=True, misses=1), EXHAUSTED),
    # A miss of what no cache is said to have counts as an outage, or it would go round for ever.
    (FailedAttempt(K.SUBSTITUTE_UNAVAILABLE, 0), again(None, 1)),
    (FailedAttempt(K.SUBSTITUTE_UNAVAILABLE, 2), final(S.FAILED_PERMANENT, None, 3)),
    (FailedAttempt(K.INPUTS_UNAVAILABLE, 0), again(R.INPUTS_UNAVAILABLE, 1)),
    (FailedAttempt(K.INPUTS_UNAVAILABLE, 2), final(S.FAILED_PERMANENT, R.INPUTS_UNAVAILABLE, 3)),
    (FailedAttempt(K.INPUTS_UNAVAILABLE, 0, loops=2), again(R.INPUTS_UNAVAILABLE, 1)),
    (FailedAttempt(K.INPUTS_UNAVAILABLE, 0, loops=3), final(S.FAILED_PERMANENT, R.INPUTS_UNAVAILABLE, 1)),
    (
        FailedAttempt(K.INPUTS_UNAVAILABLE, 0, cache_available=True, loops=3),
        final(S.FAILED_PERMANENT, R.INPUTS_UNAVAILABLE, 1),
    ),
    (FailedAttempt(K.INPUTS_UNAVAILABLE, 2, cache_available=True), missed(2)),
    # No attempt, no reason, no cascade.
    (FailedAttempt(K.ABORTED, 1), Decision(S.ABORTED, ABORTED, None, 1)),
    (FailedAttempt(K.CANCELED, 2), Decision(S.QUEUED, ABORTED, None, 2)),
    # Killed for memory: Transient, whatever the worker sent.
    (FailedAttempt(K.PERMANENT, 0, oom_killed=True), again(R.OOM, 1)),
    (FailedAttempt(K.TIMEOUT, 2, oom_killed=True), final(S.FAILED_PERMANENT, R.OOM, 3)),
    (FailedAttempt(K.INPUTS_UNAVAILABLE, 0, loops=3, oom_killed=True), again(R.OOM, 1)),
]


@pytest.mark.parametrize(("failed", "decision"), TABLE)
def test_the_table(failed: FailedAttempt, decision: Decision) -> None:
    assert decide(failed, LIMITS) == decision


EVERYTHING = [
    FailedAttempt(kind, attempt, available, misses, loops, oom)
    for kind, attempt, available, misses, loops, oom in itertools.product(
        FailureKind, range(5), (False, True), range(3), range(5), (False, True)
    )
]


def test_what_holds_for_every_failure() -> None:
    for failed in EVERYTHING:
        decision = decide(failed, LIMITS)
        final_failure = decision.status in {S.FAILED_PERMANENT, S.FAILED_TIMEOUT}
        assert decision.cascade is final_failure, failed
        # Whatever is tried again without a backoff is bounded: by misses, or by being the server's wish.
        if decision.status is S.QUEUED and decision.outcome is FAILED:
            assert failed.cache_available, failed
            assert failed.misses + 1 < LIMITS.substitute_miss_threshold, failed
        if decision.exhaust_substitution:
            assert failed.cache_available, failed
            assert (decision.status, decision.attempt) == (S.CREATED, 0), failed
        if decision.status is S.FAILED_TRANSIENT:
            assert failed.attempt < decision.attempt < LIMITS.max_attempts, failed
        stopped = failed.kind in {K.ABORTED, K.CANCELED} and not failed.oom_killed
        assert (decision.outcome is ABORTED) is stopped, failed


def test_every_failure_ends_within_the_attempts() -> None:
    for kind, available in itertools.product(FailureKind, (False, True)):
        if kind in {K.CANCELED, K.ABORTED}:
            continue
        failed, rounds = FailedAttempt(kind, 0, available), 0
        while (decision := decide(failed, LIMITS)).cascade is False:
            rounds += 1
            assert rounds < 10, (kind, available)
            missing = decision.reason is R.SUBSTITUTE_UNAVAILABLE
            failed = FailedAttempt(
                kind,
                decision.attempt,
                failed.cache_available and not decision.exhaust_substitution,
                failed.misses + missing,
                failed.loops + (decision.reason is R.INPUTS_UNAVAILABLE),
            )


def test_the_backoff_doubles_up_to_a_point() -> None:
    limits = RetryLimits(retry_backoff_secs=30)
    assert [backoff_secs(attempt, limits) for attempt in (0, 1, 2, 3, 4)] == [30, 30, 60, 120, 240]
    most = 30 << MAX_DOUBLINGS
    assert backoff_secs(MAX_DOUBLINGS + 1, limits) == backoff_secs(10**6, limits) == most
    assert backoff_secs(3, RetryLimits(retry_backoff_secs=0)) == 0
