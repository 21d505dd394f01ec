"""States in words, and logs as plain text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gradient.graph.build_reads import BuildRow
from gradient.graph.failure_causes import Cause
from gradient.model import AttemptReason, BuildStatus
from gradient.web.words import REASONS, STATUS_WORDS, count, duration, plain_log, why_not_built

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def build(status: BuildStatus, **facts: Any) -> BuildRow:
    ready = {
        "wanted": True,
        "walked": True,
        "probed": True,
        "cache_available": False,
        "blocking_deps": 0,
        "attempt": 0,
        "drv_present": True,
        "substituted": False,
    }
    nothing = dict.fromkeys(("started_at", "finished_at", "error", "worker"))
    return BuildRow(
        build=1,
        hash="h",
        name="hello",
        status=status,
        architecture="x86_64-linux",
        required_features=facts.pop("required_features", []),
        updated_at=NOW,
        attempts=0,
        **{**ready, **nothing, **facts},
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"wanted": False}, "is not needed by anything that is left to build"),
        ({"walked": False, "probed": False}, "waits for its derivation to be recorded"),
        ({"probed": False, "blocking_deps": 2}, "waits for the answer of the upstream caches"),
        ({"blocking_deps": 1, "drv_present": False}, "waits for 1 dependency"),
        ({"blocking_deps": 3}, "waits for 3 dependencies"),
        ({"drv_present": False}, "waits for its .drv file to be uploaded"),
        ({}, "is about to be queued"),
    ],
)
def test_a_created_build_names_the_first_condition_it_lacks(facts: dict[str, Any], words: str) -> None:
    assert why_not_built(build(BuildStatus.CREATED, **facts), ()) == words


def test_a_queued_build_names_the_worker_it_waits_for() -> None:
    row = build(BuildStatus.QUEUED, required_features=["kvm", "big-parallel"])
    assert why_not_built(row, ()) == "waits for a free worker for x86_64-linux with kvm, big-parallel"


def test_a_dependency_failure_names_the_build_that_failed() -> None:
    row = build(BuildStatus.DEPENDENCY_FAILED)
    failed = Cause(7, "openssl-3.0", BuildStatus.FAILED_PERMANENT)
    aborted = Cause(8, "curl-8", BuildStatus.ABORTED)
    assert why_not_built(row, [failed]) == "openssl-3.0 failed"
    assert why_not_built(row, [failed, aborted]) == "openssl-3.0, curl-8 failed"
    assert why_not_built(row, [aborted]) == "curl-8 was aborted"
    assert why_not_built(row, []) == "a dependency failed"


def test_what_runs_or_has_ended_waits_for_nothing() -> None:
    for status in (BuildStatus.BUILDING, BuildStatus.COMPLETED, BuildStatus.FAILED_PERMANENT):
        assert why_not_built(build(status), ()) is None


def test_every_status_has_words() -> None:
    assert set(STATUS_WORDS) == {*(status.label for status in BuildStatus), "EvalFailed"}


def test_every_reason_of_an_attempt_has_words() -> None:
    assert set(REASONS) == set(AttemptReason)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59.4, "59 s"), (125, "2 min 5 s"), (3780, "1 h 3 min"), (-5, "0 s")]
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(NOW, NOW + timedelta(seconds=seconds)) == words


def test_no_duration_without_both_ends() -> None:
    assert duration(None, NOW) == duration(NOW, None) == ""


def test_counting() -> None:
    assert [count(n, "build") for n in (0, 1, 2)] == ["0 builds", "1 build", "2 builds"]


@pytest.mark.parametrize(
    ("log", "text"),
    [
        (b"plain\n", "plain\n"),
        (b"\x1b[1;31merror:\x1b[0m no", "error: no"),
        (b"\x1b]0;title\x07a \x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\", "a link"),
        (b"\x1b(Bcharset \x1bcreset", "charset reset"),
        (b"10%\r50%\r100%\ndone\r\n", "100%\ndone\n"),
        (b"tab\tstays, bell\x07 and \x9b\x00 go", "tab\tstays, bell and \ufffd go"),
        (b"no utf-8: \xff", "no utf-8: \ufffd"),
        (b"an escape at the end \x1b[3", "an escape at the end 3"),
    ],
)
def test_a_log_as_text(log: bytes, text: str) -> None:
    assert plain_log(log) == text
