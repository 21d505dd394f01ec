"""Workers, candidates and scores in memory: who may run what, what is offered to whom, who is first."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.graph.candidate_reads import BuildCandidate, EvaluationCandidate
from gradient.model import (
    BuildKind,
    BuildStage,
    CachedSource,
    FlakeStep,
    InputOverride,
    JobKind,
    OutputPath,
    Repository,
    WalkMode,
)
from gradient.passes.candidates import Candidates, kind_of, visible_to
from gradient.passes.job_specs import build_spec, flake_job
from gradient.passes.pool import ActiveJob, Worker, WorkerPool, fault_of
from gradient.passes.scoring import rank, score
from gradient.sessions.offers import MAX_REQUIRED, PAGE, PAGE_PATHS, as_offer, pages
from gradient.settings.tables import Build
from gradient.wire.messages import CandidateScore, Capabilities, WorkerCapabilities

NOW = datetime(2026, 1, 1, tzinfo=UTC)
INFO = WorkerCapabilities(("x86_64-linux",), ("kvm",), 2, 1, 4, 1000)


def worker(number: int = 1, info: WorkerCapabilities | None = INFO, **facts: Any) -> Worker:
    base = Worker(UUID(int=number), f"w{number}", frozenset({"main"}), Capabilities(), NOW, info)
    for name, value in facts.items():
        setattr(base, name, value)
    return base


def build(number: int, **facts: Any) -> BuildCandidate:
    base = BuildCandidate(
        number,
        f"/nix/store/{'a' * 32}-n{number}.drv",
        f"n{number}",
        "x86_64-linux",
        (),
        False,
        False,
        False,
        False,
        None,
        None,
        NOW,
        (OutputPath("out", f"/nix/store/{'b' * 32}-n{number}"),),
        (),
    )
    return attrs.evolve(base, **facts)


def evaluation(number: int, **facts: Any) -> EvaluationCandidate:
    base = EvaluationCandidate(number, Repository("git+x"), None, (), WalkMode.PRUNED, False, NOW, ())
    return attrs.evolve(base, **facts)


# --- who may run what -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "features", "able"),
    [
        ("x86_64-linux", (), True),
        ("x86_64-linux", ("kvm",), True),
        ("x86_64-linux", ("kvm", "big-parallel"), False),
        ("aarch64-linux", (), False),
        ("builtin", (), True),
    ],
)
def test_a_build_fits_by_system_and_features(system: str, features: tuple[str, ...], able: bool) -> None:
    assert worker().can_build(system, features) is able


def test_who_cannot_build_or_has_not_said_what_it_is() -> None:
    assert not worker(info=None).can_build("builtin", ())
    assert not worker(capabilities=Capabilities(build=False)).can_build("builtin", ())
    assert not worker(info=attrs.evolve(INFO, max_concurrent_builds=0)).can_build("builtin", ())


@pytest.mark.parametrize(
    ("capabilities", "able"),
    [
        (Capabilities(), True),
        (Capabilities(fetch=False), False),
        (Capabilities(eval=False), False),
        (Capabilities(build=False), True),
    ],
)
def test_a_combined_flake_job_needs_fetch_and_eval(capabilities: Capabilities, able: bool) -> None:
    assert worker(capabilities=capabilities).can_evaluate() is able
    assert visible_to(worker(capabilities=capabilities), evaluation(1)) is able


def test_a_passthrough_and_a_builtin_run_anywhere() -> None:
    foreign = build(1, architecture="riscv64-linux", required_features=("none",))
    assert not visible_to(worker(), foreign)
    assert visible_to(worker(), attrs.evolve(foreign, cache_available=True))
    assert visible_to(worker(), build(1, architecture="builtin"))


def test_slots() -> None:
    busy = worker()
    assert (busy.free_slots(JobKind.BUILD), busy.free_slots(JobKind.EVAL)) == (2, 1)
    busy.jobs["build:1"] = ActiveJob("build:1", 1, JobKind.BUILD, 1, "n1", NOW)
    assert (busy.free_slots(JobKind.BUILD), busy.free_slots(JobKind.EVAL)) == (1, 1)
    assert not busy.assignable(JobKind.BUILD)
    busy.hungry.add(JobKind.BUILD)
    assert busy.assignable(JobKind.BUILD)
    busy.draining = True
    assert not busy.assignable(JobKind.BUILD)
    assert worker(info=None).free_slots(JobKind.BUILD) == 0


def test_a_build_that_uploads_has_left_its_slot() -> None:
    busy = worker()
    for number in (1, 2):
        job = ActiveJob(f"build:{number}", number, JobKind.BUILD, number, f"n{number}", NOW)
        busy.jobs[job.job_id] = job
    busy.entered(job, BuildStage.BUILD)
    assert busy.free_slots(JobKind.BUILD) == 0
    busy.entered(job, BuildStage.UPLOAD)
    assert busy.free_slots(JobKind.BUILD) == 1


def test_the_pool_holds_a_worker_once() -> None:
    pool, first, second = WorkerPool(), worker(), worker()
    assert pool.add(first)
    assert not pool.add(second)
    pool.remove(second)  # it never was in
    assert list(pool) == [first]
    first.jobs["eval:7"] = ActiveJob("eval:7", 1, JobKind.EVAL, 7, "evaluation 7", NOW)
    assert pool.holder("eval:7") is first
    assert pool.holder("eval:8") is None
    first.scores["eval:9"] = CandidateScore("eval:9", 0, 0, False)
    pool.forget_candidate("eval:9")
    assert first.scores == {}
    pool.remove(first)
    assert len(pool) == 0


def test_the_systems_of_the_pool_are_those_of_its_builders() -> None:
    pool = WorkerPool()
    pool.add(worker(1))
    pool.add(worker(2, attrs.evolve(INFO, architectures=("riscv64-linux", "x86_64-linux"))))
    pool.add(
        worker(3, attrs.evolve(INFO, architectures=("s390x-linux",)), capabilities=Capabilities(build=False))
    )
    pool.add(worker(4, None))
    assert pool.available_architectures == ("riscv64-linux", "x86_64-linux")


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({}, None),
        ({"architectures": (), "system_features": ()}, None),
        ({"architectures": ("a\0b",)}, "systems is empty, longer"),
        ({"system_features": ("\x1b[31m",)}, "features is empty, longer"),
        ({"system_features": ("f" * 257,)}, "features is empty, longer"),
        ({"architectures": tuple("abc" * 100)}, "more than 256 systems"),
    ],
)
def test_what_a_worker_may_say_of_itself(facts: dict[str, Any], fault: str | None) -> None:
    found = fault_of(attrs.evolve(INFO, **facts))
    assert found is None if fault is None else fault in (found or "")


# --- offers ---------------------------------------------------------------------------------------


def offered(candidates: Candidates, to: Worker, limit: int = 100) -> list[str]:
    offer, to.offered = candidates.since(to, limit)
    return [candidate.job_id for candidate in offer]


def test_an_offer_is_what_came_since_the_last_one() -> None:
    candidates, one, other = Candidates(), worker(1), worker(2)
    candidates.enter(build(1))
    candidates.enter(evaluation(2))
    assert offered(candidates, one) == ["build:1", "eval:2"]
    assert offered(candidates, one) == []
    candidates.enter(build(3))
    assert offered(candidates, one) == ["build:3"]
    assert offered(candidates, other) == ["build:1", "eval:2", "build:3"]


def test_a_job_that_returns_is_offered_to_all_again() -> None:
    candidates, one = Candidates(), worker()
    for number in (1, 2):
        candidates.enter(build(number))
    assert offered(candidates, one) == ["build:1", "build:2"]
    candidates.leave("build:1")
    assert offered(candidates, one) == []
    candidates.enter(build(1))
    assert offered(candidates, one) == ["build:1"]
    candidates.enter(build(2))  # entered again without leaving
    assert offered(candidates, one) == ["build:2"]
    assert len(candidates) == 2


def test_the_window_is_filled_in_order_and_continued() -> None:
    candidates, one = Candidates(), worker()
    for number in range(5):
        candidates.enter(build(number, architecture="riscv64-linux" if number == 1 else "x86_64-linux"))
    assert offered(candidates, one, limit=2) == ["build:0", "build:2"]
    assert offered(candidates, one, limit=2) == ["build:3", "build:4"]
    assert offered(candidates, one, limit=2) == []
    one.offered = 0  # it asks for everything
    assert offered(candidates, one) == ["build:0", "build:2", "build:3", "build:4"]


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "offer"]), st.integers(0, 6)), max_size=60))
def test_what_is_pending_was_offered_exactly_since_it_entered(steps: list[tuple[str, int]]) -> None:
    """Against a set per worker, which is what generations stand for."""
    candidates, one = Candidates(), worker()
    pending: dict[str, bool] = {}  # job -> already sent
    for step, number in steps:
        if step == "enter":
            candidates.enter(build(number))
            pending.pop(f"build:{number}", None)
            pending[f"build:{number}"] = False
        elif step == "leave":
            candidates.leave(f"build:{number}")
            pending.pop(f"build:{number}", None)
        else:
            due = [job for job, sent in pending.items() if not sent][: number + 1]
            assert offered(candidates, one, limit=number + 1) == due
            pending |= dict.fromkeys(due, True)
        assert [candidate.job_id for candidate in candidates] == list(pending)


def test_kinds_are_kept_apart() -> None:
    candidates = Candidates()
    candidates.enter(build(1))
    candidates.enter(evaluation(1))
    assert [c.job_id for c in candidates.of_kind(JobKind.EVAL)] == ["eval:1"]
    assert [c.job_id for c in candidates.of_kind(JobKind.BUILD)] == ["build:1"]
    assert "eval:1" in candidates
    assert "eval:2" not in candidates
    assert kind_of(evaluation(1)) is JobKind.EVAL


def test_pages_are_bounded_in_candidates_and_in_paths() -> None:
    few = [build(number) for number in range(2 * PAGE + 1)]
    assert [len(page) for page in pages(few)] == [PAGE, PAGE, 1]
    paths = tuple(f"/nix/store/{'c' * 32}-i{i}" for i in range(PAGE_PATHS // 4))
    warm = [build(number, required_paths=paths) for number in range(7)]
    assert [len(page) for page in pages(warm)] == [3, 3, 1]
    assert [c.derivation for page in pages(warm) for c in page if isinstance(c, BuildCandidate)] == list(
        range(7)
    )
    assert list(pages([])) == []
    huge = build(1, required_paths=paths * 10)
    assert [len(page) for page in pages([huge, huge])] == [1, 1]
    assert len(as_offer(huge).required_paths) == MAX_REQUIRED


def test_an_offer_says_what_a_worker_needs_to_score_it() -> None:
    offer = as_offer(build(1, required_paths=("/nix/store/in",), required_features=("kvm",)))
    assert [path.path for path in offer.required_paths] == ["/nix/store/in"]
    assert offer.output_paths == (f"/nix/store/{'b' * 32}-n1",)
    assert (offer.architecture, offer.required_features) == ("x86_64-linux", ("kvm",))
    source = CachedSource("/nix/store/src")
    assert as_offer(evaluation(1, repository=None, cached=source)).required_paths[0].path == "/nix/store/src"
    assert as_offer(evaluation(1)).required_paths == ()


# --- scores ---------------------------------------------------------------------------------------


def test_what_was_asked_for_first_goes_first() -> None:
    plain, asked = build(1), build(2, prioritized=True)
    assert [s.candidate for s in rank([plain, asked], {}, NOW)] == [asked, plain]


def test_who_has_the_inputs_is_preferred_and_nobody_waits_for_ever() -> None:
    cold = CandidateScore("build:1", 3, 500 * 2**20, False)
    warm = CandidateScore("build:2", 0, 0, False)
    jobs = [build(1), build(2)]
    assert [s.candidate.job_id for s in rank(jobs, {"build:1": cold, "build:2": warm}, NOW)] == [
        "build:2",
        "build:1",
    ]
    old = build(1, queued_at=NOW - timedelta(minutes=20))
    assert rank([old, build(2)], {"build:1": cold, "build:2": warm}, NOW)[0].candidate is old
    # Outputs that are here already need no inputs.
    assert score(build(1), attrs.evolve(cold, outputs_present=True), NOW) == score(build(1), None, NOW)


def test_scores_are_bounded() -> None:
    hostile = CandidateScore("build:1", 2**63, 2**64 - 1, False)
    assert score(build(1), hostile, NOW) >= 0
    ages = build(1, queued_at=NOW - timedelta(days=1000))
    assert score(ages, None, NOW) == score(build(1), None, NOW) + 4000
    early = build(1, queued_at=NOW + timedelta(days=1))
    assert score(early, None, NOW) == score(build(1), None, NOW)


def test_ties_go_to_the_longer_wait_and_then_to_the_smaller_number() -> None:
    hours = timedelta(hours=5)  # beyond what waiting counts for
    older, newer = build(9, queued_at=NOW - 2 * hours), build(3, queued_at=NOW - hours)
    assert [s.candidate for s in rank([newer, older], {}, NOW)] == [older, newer]
    assert [s.candidate.job_id for s in rank([build(10), build(9)], {}, NOW)] == ["build:9", "build:10"]


# --- jobs -----------------------------------------------------------------------------------------


def test_the_kind_of_a_build() -> None:
    fixed = build(1, architecture="builtin", is_fixed_output=True)
    assert build_spec(build(1), Build()).kind is BuildKind.BUILD
    assert build_spec(fixed, Build()).kind is BuildKind.DOWNLOAD
    assert build_spec(attrs.evolve(fixed, cache_available=True), Build()).kind is BuildKind.SUBSTITUTE
    assert build_spec(build(1, architecture="builtin"), Build()).kind is BuildKind.BUILD


def test_limits_come_from_the_derivation_or_the_settings() -> None:
    settings = Build(default_timeout_secs=100, default_max_silent_secs=50)
    spec = build_spec(build(1), settings)
    assert (spec.timeout_secs, spec.max_silent_secs) == (100, 50)
    spec = build_spec(build(1, timeout_secs=7, max_silent_secs=3), settings)
    assert (spec.timeout_secs, spec.max_silent_secs) == (7, 3)


def test_a_flake_job_has_all_steps() -> None:
    override = InputOverride("nixpkgs", "github:x/y")
    job = flake_job(
        evaluation(1, wildcards=("checks.*",), walk_mode=WalkMode.FULL, input_overrides=(override,))
    )
    assert job.steps == tuple(FlakeStep)
    assert (job.wildcards, job.full_walk, job.input_overrides) == (("checks.*",), True, (override,))
    assert job.repository == Repository("git+x")
    assert not flake_job(evaluation(1)).full_walk
