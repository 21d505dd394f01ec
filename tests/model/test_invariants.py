"""Each invariant can fail, and all 36 are somewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import attrs
import pytest

from gradient.model import BuildStatus, DispatchOutcome, EdgeKind, EvaluationStatus, JobKind
from tests.model import invariants, rules
from tests.model.facts import Assignment, Attempt, Build, Derivation, Evaluation, Facts
from tests.model.graph import START
from tests.model.stored import Stored

S = BuildStatus


def world() -> Stored:
    """`top` is built from `low`, which is queued; `top` refers to `lib`, which is done."""
    facts = Facts(
        derivations={name: Derivation(True, {"out": name}) for name in ("top", "low", "lib")},
        edges={("top", "low"): EdgeKind.BUILD, ("top", "lib"): EdgeKind.BOTH},
        builds={
            "top": Build(S.CREATED, START),
            "low": Build(S.QUEUED, START),
            "lib": Build(S.COMPLETED, START),
        },
        evaluations={1: Evaluation(EvaluationStatus.BUILDING, START, evaluated=True)},
        names={(1, name): False for name in ("top", "low", "lib")},
        entry_points={(1, "attr"): "top"},
        cached={"lib": (), "top.drv": (), "low.drv": (), "lib.drv": ()},
    )
    return Stored.of(facts)


def assign(facts: Facts, name: str, outcome: DispatchOutcome | None = None) -> None:
    number = len(facts.assignments)
    facts.assignments[number] = Assignment(JobKind.BUILD, UUID(int=1), 1, name, START, outcome)
    facts.attempts.append(Attempt(name, number, 1))


def column(name: str, key: Any, value: Any) -> Callable[[Stored], None]:
    return lambda stored: getattr(stored, name).__setitem__(key, value)


def fact(change: Callable[[Facts], object]) -> Callable[[Stored], None]:
    """Changes the facts, and every column with them."""

    def apply(stored: Stored) -> None:
        change(stored.facts)
        fresh = Stored.of(stored.facts)
        for field in attrs.fields(Stored):
            setattr(stored, field.name, getattr(fresh, field.name))

    return apply


def build(name: str, **values: Any) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        facts.builds[name] = attrs.evolve(facts.builds[name], **values)

    return change


def twice(facts: Facts) -> None:
    assign(facts, "low")
    assign(facts, "low")


def stub(facts: Facts) -> None:
    facts.derivations["low"].walked = False


def without_outputs(stored: Stored) -> None:
    stored.facts.derivations["lib"].outputs.clear()


def unbacked(stored: Stored) -> None:
    del stored.facts.cached["lib"]


def runs_on(facts: Facts) -> None:
    assign(facts, "low", DispatchOutcome.ABANDONED)


def recovered_twice(facts: Facts) -> None:
    for number in (2, 3):
        facts.evaluations[number] = Evaluation(EvaluationStatus.QUEUED, START, is_recovery=True, recovers=1)


def one_path(facts: Facts) -> None:
    facts.derivations["top"].outputs["out"] = "lib"


def behind_a_passthrough(stored: Stored) -> None:
    """`top` is served by an upstream, and `low` is wanted all the same."""
    fact(build("top", status=S.QUEUED, cache_available=True))(stored)
    stored.wanted.add("low")


def left_wanting(facts: Facts) -> None:
    build("top", status=S.COMPLETED)(facts)
    build("low", status=S.COMPLETED)(facts)
    facts.cached |= {"top": (), "low": ()}


def unnamed(facts: Facts) -> None:
    del facts.names[1, "low"]
    build("low", status=S.CREATED)(facts)


BROKEN: dict[str, Callable[[Stored], None]] = {
    "1 counters >= 0": column("blocking_deps", "top", -1),
    "2 unwalked_inputs": column("unwalked_inputs", "top", 1),
    "3 missing_runtime_deps": column("missing_runtime_deps", "top", 1),
    "4 fetchable": lambda stored: stored.fetchable.discard("lib"),
    "5 blocking_deps": column("blocking_deps", "top", 0),
    "6 wanted": lambda stored: stored.wanted.discard("low"),
    "7 Queued": fact(build("top", status=S.QUEUED)),
    "8 nothing startable unqueued": fact(build("low", status=S.CREATED)),
    "9 Building": fact(build("low", status=S.BUILDING)),
    "10 one open row a job": fact(twice),
    "11 one shared build a derivation": lambda stored: stored.shared_builds.append("low"),
    "12 no outputs": without_outputs,
    "13 stubs": fact(stub),
    "14 not probed": fact(build("low", probed=False)),
    "15 own .drv": fact(lambda facts: facts.cached.pop("low.drv")),
    "16 fetchable closure": unbacked,
    "17 Skipped": fact(build("low", status=S.SKIPPED)),
    "18 Created and unwanted": fact(lambda facts: facts.entry_points.clear()),
    "19 passthrough inputs": behind_a_passthrough,
    "25 evaluation counters": column("counters", 1, rules.Counted(3, 2, 0, 0, 0)),
    "26 finished": fact(left_wanting),
    "28 names": fact(unnamed),
    "29 attempts": fact(runs_on),
    "35 attempt <= maxAttempts": fact(build("low", attempt=4)),
    "is_cached": column("is_cached", "low", {"low"}),
    "held NARs": fact(lambda facts: facts.cached.update(low=())),
    "lost .drv": fact(recovered_twice),
    "one path, two makers": fact(one_path),
    "no evaluation waits": lambda stored: None,
    "nothing is left": lambda stored: None,
    "every assignment is closed": fact(lambda facts: assign(facts, "low")),
}
CHECKS = {**invariants.ALWAYS, **invariants.SETTLED, **invariants.ADOPTED, **invariants.QUIET}


@pytest.mark.parametrize("name", CHECKS)
def test_each_can_fail(name: str) -> None:
    stored = world()
    assert list(invariants.violations(stored, {**invariants.ALWAYS, **invariants.SETTLED})) == []
    BROKEN[name](stored)
    assert [line for line in invariants.violations(stored, {name: CHECKS[name]}) if line.startswith(name)]


def test_completed_means_nothing_failed() -> None:
    before, after = world(), world()
    after.facts.evaluations[1].status = EvaluationStatus.COMPLETED
    build("low", status=S.FAILED_PERMANENT)(after.facts)
    failure, blocked = invariants.completed_names_no_failure(after, before)
    assert failure.startswith("27")
    assert blocked.startswith("26")
    assert invariants.completed_names_no_failure(after, after) == []


def test_nothing_waits_above_a_failure() -> None:
    stored = world()
    assert invariants.nothing_waits_above_a_lasting_failure(stored, 1) == []
    build("low", status=S.FAILED_PERMANENT)(stored.facts)
    (line,) = invariants.nothing_waits_above_a_lasting_failure(stored, 1)
    assert line == "31 above a failure: top above ['low']"
    build("top", cache_available=True)(stored.facts)
    assert invariants.nothing_waits_above_a_lasting_failure(stored, 1) == []


def test_all_36_are_somewhere() -> None:
    names = [*CHECKS, *invariants.ELSEWHERE]
    numbers = sorted(int(name.split()[0]) for name in names if name[0].isdigit())
    assert numbers == list(range(1, 37))
    for name, file in invariants.ELSEWHERE.items():
        number = name.split()[0]
        text = (Path(__file__).parents[1] / file).read_text()
        assert re.search(rf"[Ii]nvariants? ([0-9, and]+ )?{number}\b", text), (
            f"{file} does not speak of {number}"
        )
