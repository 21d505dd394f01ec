"""Why an evaluation waits: every rule, and the sentence of every reason."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import pytest

from gradient.graph.candidate_reads import BlockingKind, InFlight
from gradient.model import EvaluationStatus
from gradient.passes.waiting import (
    AbortUnbuildable,
    Finish,
    Park,
    PoolView,
    ReadBlocking,
    Unpark,
    building_verdict,
    phase_from_counters,
    unstick_due,
    words,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
S = EvaluationStatus


def pool(
    *systems: str, features: Iterable[str] = (), fetch: bool = True, evaluate: bool = True, workers: int = 1
) -> PoolView:
    have = set(features)
    return PoolView(
        workers, fetch, evaluate, systems, lambda system, wanted: system in systems and set(wanted) <= have
    )


EVERYTHING = pool("x86_64-linux")
NOBODY = pool(fetch=False, evaluate=False, workers=0)


def in_flight(status: EvaluationStatus, reason: dict[str, Any] | None = None, **facts: Any) -> InFlight:
    started = status is S.BUILDING or (reason is not None and reason["kind"] in {"workers", "graph_stuck"})
    base = InFlight(1, status, reason, None if reason is None else NOW, started, False, 5, 0)
    return attrs.evolve(base, **facts)


def blocking(system: str = "x86_64-linux", **facts: Any) -> BlockingKind:
    return attrs.evolve(BlockingKind(system, (), 2, 0, 0, "hello"), **facts)


# --- before building ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "capability"),
    [
        (NOBODY, "fetch"),
        (pool(fetch=False), "fetch"),
        (pool(evaluate=False), "eval"),
    ],
)
def test_a_queued_evaluation_without_a_worker_is_parked(view: PoolView, capability: str) -> None:
    verdict = phase_from_counters(in_flight(S.QUEUED), view)
    reason = {
        "kind": "eval_workers",
        "capability": capability,
        "connected_workers": view.connected_workers,
    }
    assert verdict == Park(reason)


def test_it_goes_back_to_the_queue_once_the_capability_is_there() -> None:
    parked = in_flight(S.WAITING, {"kind": "eval_workers", "capability": "eval", "connected_workers": 0})
    assert phase_from_counters(parked, EVERYTHING) == Unpark(S.QUEUED)
    assert isinstance(phase_from_counters(parked, NOBODY), Park)


@pytest.mark.parametrize("status", [S.QUEUED, S.FETCHING, S.EVALUATING_FLAKE, S.EVALUATING_DERIVATION])
def test_with_a_worker_nothing_is_to_do(status: EvaluationStatus) -> None:
    assert phase_from_counters(in_flight(status), EVERYTHING) is None


@pytest.mark.parametrize("status", [S.FETCHING, S.EVALUATING_FLAKE, S.EVALUATING_DERIVATION])
def test_one_on_a_worker_is_the_workers_matter(status: EvaluationStatus) -> None:
    """Losing the worker queues it again, and then it may be parked; until then it goes on."""
    assert phase_from_counters(in_flight(status), NOBODY) is None


@pytest.mark.parametrize("kind", ["approval", "no_cache", "cache_storage_full", "draining"])
@pytest.mark.parametrize("started", [False, True])
def test_parks_of_others_are_not_touched(kind: str, started: bool) -> None:
    parked = in_flight(S.WAITING, {"kind": kind}, building_started=started, active=0)
    assert phase_from_counters(parked, EVERYTHING) is None
    assert phase_from_counters(parked, NOBODY) is None


# --- building -------------------------------------------------------------------------------------


def test_counters_decide_without_a_look_at_the_builds() -> None:
    assert phase_from_counters(in_flight(S.BUILDING, active=0), NOBODY) == Finish()
    assert phase_from_counters(in_flight(S.BUILDING, building=1), NOBODY) is None
    stuck = in_flight(S.WAITING, {"kind": "graph_stuck", "pending_shared_builds": 1}, building=1)
    assert phase_from_counters(stuck, NOBODY) == Unpark(S.BUILDING)
    assert phase_from_counters(attrs.evolve(stuck, active=0, building=0), NOBODY) == Finish()
    assert phase_from_counters(in_flight(S.BUILDING), EVERYTHING) == ReadBlocking()


def test_nothing_blocks_after_all() -> None:
    assert building_verdict(in_flight(S.BUILDING), [], EVERYTHING, NOW) == Finish()


@pytest.mark.parametrize("found", [blocking(queued=1), blocking("riscv64-linux", going_on=1)])
def test_what_can_be_handed_out_or_is_tried_again_keeps_it_building(found: BlockingKind) -> None:
    assert building_verdict(in_flight(S.BUILDING), [found], EVERYTHING, NOW) is None
    parked = in_flight(S.WAITING, {"kind": "graph_stuck", "pending_shared_builds": 1})
    assert building_verdict(parked, [found], EVERYTHING, NOW) == Unpark(S.BUILDING)


def test_builds_nobody_can_hold_are_named() -> None:
    found = [blocking(), blocking("riscv64-linux", queued=1, required_features=("kvm",))]
    verdict = building_verdict(in_flight(S.BUILDING), found, EVERYTHING, NOW)
    assert verdict == Park(
        {
            "kind": "workers",
            "unmet": [
                {
                    "architecture": "riscv64-linux",
                    "required_features": ["kvm"],
                    "builds": 2,
                    "example": "hello",
                }
            ],
            "connected_workers": 1,
            "available_architectures": ["x86_64-linux"],
        }
    )


def test_a_feature_may_be_what_is_missing() -> None:
    found = [blocking(queued=1, required_features=("kvm",))]
    assert isinstance(building_verdict(in_flight(S.BUILDING), found, EVERYTHING, NOW), Park)
    able = pool("x86_64-linux", features=("kvm", "big-parallel"))
    assert building_verdict(in_flight(S.BUILDING), found, able, NOW) is None


def test_pending_builds_that_could_be_held_but_not_handed_out_are_stuck() -> None:
    verdict = building_verdict(in_flight(S.BUILDING), [blocking(builds=3)], EVERYTHING, NOW)
    assert verdict == Park({"kind": "graph_stuck", "pending_shared_builds": 3})


# --- nobody comes ---------------------------------------------------------------------------------


def parked_for(seconds: float, view: PoolView = NOBODY, **facts: Any) -> Any:
    """The verdict about an evaluation parked on riscv builds for so long."""
    found = [blocking("riscv64-linux", queued=1)]
    first = building_verdict(in_flight(S.BUILDING), found, NOBODY, NOW)
    assert isinstance(first, Park)
    evaluation = in_flight(S.WAITING, first.reason, **facts)
    return building_verdict(evaluation, found, view, NOW + timedelta(seconds=seconds))


def test_an_unbuildable_evaluation_is_given_up_after_five_minutes() -> None:
    assert isinstance(parked_for(299), Park)
    verdict = parked_for(300)
    assert verdict == AbortUnbuildable(
        "No worker came for it within 5 minutes: waits for a worker for riscv64-linux (2 builds, such as "
        "hello) (0 workers connected)"
    )


def test_a_task_may_wait_for_ever() -> None:
    assert isinstance(parked_for(10**6, wait_for_workers=True), Park)


def test_workers_that_come_and_go_do_not_start_the_five_minutes_again() -> None:
    verdict = parked_for(200, pool("x86_64-linux", workers=7))
    assert isinstance(verdict, Park)
    assert verdict.goes_on
    assert isinstance(parked_for(300, pool("x86_64-linux", workers=7)), AbortUnbuildable)


def test_another_need_starts_them_again() -> None:
    old = building_verdict(in_flight(S.BUILDING), [blocking("riscv64-linux", queued=1)], NOBODY, NOW)
    assert isinstance(old, Park)
    assert not old.goes_on
    parked = in_flight(S.WAITING, old.reason)
    found = [blocking("riscv64-linux", queued=1), blocking("aarch64-linux", queued=1)]
    verdict = building_verdict(parked, found, NOBODY, NOW + timedelta(hours=1))
    assert isinstance(verdict, Park)
    assert not verdict.goes_on


# --- words ----------------------------------------------------------------------------------------

UNMET = {"architecture": "riscv64-linux", "required_features": [], "builds": 1, "example": "hello"}


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (
            {"kind": "eval_workers", "capability": "fetch", "connected_workers": 0},
            "waits for a worker that can fetch flakes (0 workers connected)",
        ),
        (
            {"kind": "eval_workers", "capability": "eval", "connected_workers": 1},
            "waits for a worker that can evaluate (1 worker connected)",
        ),
        (
            {
                "kind": "workers",
                "unmet": [UNMET, {**UNMET, "required_features": ["kvm", "big"], "builds": 3}],
                "connected_workers": 2,
                "available_architectures": ["aarch64-linux", "x86_64-linux"],
            },
            (
                "waits for a worker for riscv64-linux (1 build, such as hello); riscv64-linux with kvm, big "
                "(3 builds, such as hello) (2 workers connected, building for aarch64-linux, x86_64-linux)"
            ),
        ),
        (
            {"kind": "graph_stuck", "pending_shared_builds": 2},
            "2 builds left, yet none can be handed out: the graph is being repaired",
        ),
        ({"kind": "draining"}, "waits while the server drains"),
        ({"kind": "approval"}, "waits for somebody to approve it"),
        ({"kind": "no_cache"}, "waits for a cache: its project is subscribed to none"),
        ({"kind": "cache_storage_full"}, "waits for room in the cache"),
        ({"kind": "something new"}, "waits (something new)"),
    ],
)
def test_every_reason_is_a_sentence(reason: dict[str, Any], sentence: str) -> None:
    assert words(reason) == sentence


def test_a_flakes_words_stay_on_one_line_and_move_no_cursor() -> None:
    need = {"architecture": "a\nb", "required_features": ["\x1b[31mred", "\r"], "builds": 1, "example": "x"}
    reason = {"kind": "workers", "unmet": [need], "connected_workers": 1, "available_architectures": []}
    assert words(reason).isprintable()
    assert "a\N{REPLACEMENT CHARACTER}b with" in words(reason)
    nameless = {**need, "architecture": "", "required_features": []}
    assert "for no system at all (1 build, such as x)" in words({**reason, "unmet": [nameless]})


# --- the heal -------------------------------------------------------------------------------------


def test_a_stuck_graph_is_healed_on_entry_and_when_its_pending_builds_change() -> None:
    def stuck(pending: int) -> dict[str, Any]:
        return {"kind": "graph_stuck", "pending_shared_builds": pending}

    verdict = Park(stuck(2))
    assert unstick_due(in_flight(S.BUILDING), verdict)
    assert unstick_due(in_flight(S.WAITING, stuck(3)), verdict)
    assert not unstick_due(in_flight(S.WAITING, stuck(2)), verdict)
    assert not unstick_due(in_flight(S.BUILDING), Park({"kind": "workers", "unmet": []}))
    assert not unstick_due(in_flight(S.BUILDING), Finish())
    assert not unstick_due(in_flight(S.BUILDING), None)
