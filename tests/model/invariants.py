"""The invariants of the graph by their numbers, over what the database holds.

`ALWAYS` holds after every transaction and inside one, `SETTLED` after a transaction, `ADOPTED` after the
consistency check, `QUIET` when nothing is on a worker, queued or still to be sent. Those that speak of an
event are asserted where the event is, in the steps or beside them: `ELSEWHERE` says where. All 36 are
accounted for (test_invariants).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from gradient.model import (
    AttemptOutcome,
    BuildStatus,
    EvaluationStatus,
)
from tests.model import rules
from tests.model.facts import Facts
from tests.model.stored import Stored

S = BuildStatus
Found: TypeAlias = Iterable[str]
Check: TypeAlias = Callable[[Stored], Found]


def _with(facts: Facts, *statuses: BuildStatus) -> list[str]:
    return sorted(name for name, build in facts.builds.items() if build.status in statuses)


# --- always ---------------------------------------------------------------------------------------


def no_counter_is_negative(stored: Stored) -> Found:
    for column in (stored.unwalked_inputs, stored.missing_runtime_deps, stored.blocking_deps):
        yield from (f"{name}: {count}" for name, count in column.items() if count < 0)
    for evaluation, counted in stored.counters.items():
        if rules.is_live(stored.facts, evaluation) and min(_counts(counted)) < 0:
            yield f"evaluation {evaluation}: {counted}"


def _counts(counted: rules.Counted) -> tuple[int, ...]:
    return counted.named, counted.active, counted.failed, counted.queued, counted.building


def unwalked_inputs_is_its_recount(stored: Stored) -> Found:
    for name, count in stored.unwalked_inputs.items():
        if count != (right := rules.unwalked_inputs(stored.facts, name)):
            yield f"{name}: {count}, not {right}"


def missing_runtime_deps_is_its_recount(stored: Stored) -> Found:
    for name, count in stored.missing_runtime_deps.items():
        if count != (right := rules.missing_runtime_deps(stored.facts, name)):
            yield f"{name}: {count}, not {right}"


def fetchable_is_its_predicate(stored: Stored) -> Found:
    return sorted(stored.fetchable ^ rules.fetchable(stored.facts))


def blocking_deps_is_its_recount(stored: Stored) -> Found:
    for name, count in stored.blocking_deps.items():
        if count != (right := rules.blocking_deps(stored.facts, name)):
            yield f"{name}: {count}, not {right}"


def wanted_is_the_walk_of_the_whole_table(stored: Stored) -> Found:
    return sorted((stored.wanted ^ rules.wanted(stored.facts)) & rules.open_builds(stored.facts))


def queued_means_that_the_conditions_hold(stored: Stored) -> Found:
    gated = rules.gated(stored.facts)
    queued = _with(stored.facts, S.QUEUED)
    return [n for n in queued if n not in gated and not rules.is_assigned(stored.facts, n)]


def what_may_start_is_queued(stored: Stored) -> Found:
    gated = rules.gated(stored.facts)
    return [n for n in _with(stored.facts, S.CREATED) if n in gated]


def building_has_one_open_assignment(stored: Stored) -> Found:
    for name in _with(stored.facts, S.BUILDING):
        if _open_jobs(stored)[f"build:{name}"] != 1:
            yield name


def at_most_one_open_row_for_a_job(stored: Stored) -> Found:
    return sorted(job for job, rows in _open_jobs(stored).items() if rows > 1)


def _open_jobs(stored: Stored) -> Counter[str]:
    """Open rows by job; that of a flake job outlives its evaluation."""
    jobs = stored.facts.assignments.values()
    return Counter(a.job_id for a in jobs if a.outcome is None and (a.derivation or a.evaluation))


def at_most_one_shared_build_for_a_derivation(stored: Stored) -> Found:
    return sorted(name for name, rows in Counter(stored.shared_builds).items() if rows > 1)


def without_outputs_nothing_is_fetchable(stored: Stored) -> Found:
    empty = {name for name, d in stored.facts.derivations.items() if not d.outputs}
    return sorted(empty & (stored.fetchable | rules.complete(stored.facts)))


def a_stub_is_never_queued_or_building(stored: Stored) -> Found:
    stubs = {name for name, d in stored.facts.derivations.items() if not d.walked}
    unassigned = {name for name in stubs if not rules.is_assigned(stored.facts, name)}
    return sorted(unassigned & set(_with(stored.facts, S.QUEUED, S.BUILDING)))


def what_was_not_probed_is_never_queued(stored: Stored) -> Found:
    builds = stored.facts.builds
    return [
        n for n in _with(stored.facts, S.QUEUED) if not builds[n].probed and not builds[n].cache_available
    ]


def a_queued_builder_has_its_drv(stored: Stored) -> Found:
    facts = stored.facts
    return [
        n
        for n in _with(facts, S.QUEUED)
        if not facts.builds[n].cache_available
        and f"{n}.drv" not in facts.cached
        and not rules.is_assigned(facts, n)
    ]


def fetchable_reaches_only_what_is_backed(stored: Stored) -> Found:
    facts = stored.facts
    for top in sorted(stored.fetchable):
        reached, due = set(), {top}
        while due:
            name = due.pop()
            reached.add(name)
            due |= {low for low, kind in rules.below(facts, name) if rules.is_runtime(kind)} - reached
        yield from (f"{top} reaches {name}" for name in reached if not rules.present(facts, name))


def skipped_means_not_wanted(stored: Stored) -> Found:
    facts = stored.facts
    live = {name for (v, _), name in facts.entry_points.items() if rules.is_live(facts, v)}
    skipped = set(_with(facts, S.SKIPPED))
    done = rules.fetchable(facts)
    return sorted(skipped & ((stored.wanted - done) | (live & rules.wanting_entry_points(facts))))


def created_and_unwanted_does_not_last(stored: Stored) -> Found:
    created = set(_with(stored.facts, S.CREATED))
    return sorted(created - stored.wanted - rules.wanting_entry_points(stored.facts))


def nothing_is_wanted_through_a_passthrough(stored: Stored) -> Found:
    """Every wanted row has another reason: an entry point, or a wanted row above that leads to it over a
    runtime edge or is a builder."""
    facts = stored.facts
    opened = rules.open_builds(facts)
    for name in sorted(stored.wanted & opened):
        reasons = [
            high
            for high in rules.above(facts, name)
            if high in stored.wanted & opened
            and (rules.is_runtime(facts.edges[high, name]) or rules.is_builder(facts, high))
        ]
        if not reasons and name not in rules.wanting_entry_points(facts):
            yield name


def columns_and_deltas_are_the_recount(stored: Stored) -> Found:
    for evaluation, counted in stored.counters.items():
        right = rules.counters(stored.facts, evaluation)
        if rules.is_live(stored.facts, evaluation) and counted != right:
            yield f"evaluation {evaluation}: {counted}, not {right}"


def nothing_blocks_what_is_finished_nor_is_left_unfinished(stored: Stored) -> Found:
    for evaluation, row in stored.facts.evaluations.items():
        waits = row.evaluated and row.status in {EvaluationStatus.BUILDING, EvaluationStatus.WAITING}
        if waits and not rules.counters(stored.facts, evaluation).active:
            yield f"evaluation {evaluation} waits for nothing"


def completed_names_no_failure(stored: Stored, before: Stored) -> list[str]:
    """Of what ended since `before`: later a retired output may be built again and fail. Nor does it name
    what is still to be built."""
    lines = []
    for evaluation, row in stored.facts.evaluations.items():
        old = before.facts.evaluations.get(evaluation, row)
        if row.status is EvaluationStatus.COMPLETED and old.status is not row.status:
            counted = rules.counters(stored.facts, evaluation)
            if counted.failed or row.has_error:
                lines.append(f"27 Completed: evaluation {evaluation}, {counted}, error {row.has_error}")
            if counted.active:
                lines.append(f"26 finished: evaluation {evaluation} though {counted.active} block it")
    return lines


def what_a_live_evaluation_reaches_is_named_by_one(stored: Stored) -> Found:
    facts = stored.facts
    named = {name for v, name in facts.names if rules.is_live(facts, v)}
    for evaluation, row in facts.evaluations.items():
        if rules.is_live(facts, evaluation) and row.evaluated:
            reached = rules.open_walk(facts, set(rules.named_by(facts, evaluation)) & stored.wanted)
            yield from (f"evaluation {evaluation} reaches {name}" for name in sorted(reached - named))


def no_attempt_runs_without_its_assignment(stored: Stored) -> Found:
    for attempt in stored.facts.attempts:
        ended = stored.facts.assignments[attempt.assignment].outcome is not None
        if attempt.outcome is AttemptOutcome.RUNNING and ended:
            yield f"{attempt.derivation}, assignment {attempt.assignment}"


def nothing_waits_above_a_lasting_failure(stored: Stored, evaluation: int) -> list[str]:
    """Within the closure of an evaluation that was repaired just now, at the end of its stream or as it was
    stuck: later failures spread as they come, and what thaws is looked at by the next repair."""
    facts = stored.facts
    row = facts.evaluations.get(evaluation)
    if row is None or not row.evaluated or not rules.is_live(facts, evaluation):
        return []
    failed, lines = set(_with(facts, *rules.FAILURE)), []
    for name in rules.named_by(facts, evaluation):
        waits = facts.builds[name].status in {S.CREATED, S.QUEUED, S.FAILED_TRANSIENT}
        lows = {low for low, _ in rules.below(facts, name)}
        if waits and not facts.builds[name].cache_available and lows & failed:
            lines.append(f"31 above a failure: {name} above {sorted(lows & failed)}")
    return lines


def no_build_tries_too_often(stored: Stored) -> Found:
    return sorted(name for name, build in stored.facts.builds.items() if build.attempt > 3)


def an_output_is_cached_when_its_nar_is(stored: Stored) -> Found:
    for name, derivation in stored.facts.derivations.items():
        held = set(derivation.outputs.values()) & set(stored.facts.cached)
        if held != stored.is_cached[name]:
            yield f"{name}: {stored.is_cached[name]}, not {held}"


def success_with_its_closure_or_what_it_lacks_is_asked_for(stored: Stored) -> Found:
    """Not one of the 36: held NARs are never waited for."""
    facts = stored.facts
    waiting = set(_with(facts, S.CREATED, S.QUEUED, S.FAILED_TRANSIENT, S.SKIPPED))
    held = waiting & rules.complete(facts)
    return sorted(name for name in held if not rules.is_assigned(facts, name))


def makers_of_one_path_do_not_wait_for_each_other(stored: Stored) -> Found:
    """No runtime edge between two derivations that make one path, nor to itself (ADR 10)."""
    facts = stored.facts
    for (high, low), kind in facts.edges.items():
        shared = set(facts.derivations[high].outputs.values()) & set(facts.derivations[low].outputs.values())
        if high == low or (rules.is_runtime(kind) and shared):
            yield f"{high} waits for {low}"


def a_lost_drv_is_brought_again_once(stored: Stored) -> Found:
    """Not one of the 36: a recovery for each evaluation at most, and none for a recovery (ADR 25)."""
    rows = stored.facts.evaluations
    recovered = Counter(row.recovers for row in rows.values() if row.recovers is not None)
    for evaluation, recoveries in recovered.items():
        if recoveries > 1 or rows[evaluation].is_recovery:
            yield f"evaluation {evaluation} has {recoveries}"


# --- when nothing moves any more ------------------------------------------------------------------


def no_evaluation_waits(stored: Stored) -> Found:
    for evaluation, row in stored.facts.evaluations.items():
        if rules.is_live(stored.facts, evaluation):
            yield f"evaluation {evaluation}: {row.status.name}"


def nothing_wanted_is_left(stored: Stored) -> Found:
    """Whatever is wanted by an evaluation that completed has been built."""
    return _with(stored.facts, S.QUEUED, S.BUILDING, S.FAILED_TRANSIENT)


def every_assignment_is_closed(stored: Stored) -> Found:
    return sorted(a.job_id for a in stored.facts.assignments.values() if a.outcome is None)


ALWAYS: Final[Mapping[str, Check]] = {
    "1 counters >= 0": no_counter_is_negative,
    "2 unwalked_inputs": unwalked_inputs_is_its_recount,
    "3 missing_runtime_deps": missing_runtime_deps_is_its_recount,
    "4 fetchable": fetchable_is_its_predicate,
    "5 blocking_deps": blocking_deps_is_its_recount,
    "6 wanted": wanted_is_the_walk_of_the_whole_table,
    "7 Queued": queued_means_that_the_conditions_hold,
    "8 nothing startable unqueued": what_may_start_is_queued,
    "9 Building": building_has_one_open_assignment,
    "10 one open row a job": at_most_one_open_row_for_a_job,
    "11 one shared build a derivation": at_most_one_shared_build_for_a_derivation,
    "12 no outputs": without_outputs_nothing_is_fetchable,
    "13 stubs": a_stub_is_never_queued_or_building,
    "14 not probed": what_was_not_probed_is_never_queued,
    "15 own .drv": a_queued_builder_has_its_drv,
    "16 fetchable closure": fetchable_reaches_only_what_is_backed,
    "17 Skipped": skipped_means_not_wanted,
    "18 Created and unwanted": created_and_unwanted_does_not_last,
    "19 passthrough inputs": nothing_is_wanted_through_a_passthrough,
    "25 evaluation counters": columns_and_deltas_are_the_recount,
    "29 attempts": no_attempt_runs_without_its_assignment,
    "35 attempt <= maxAttempts": no_build_tries_too_often,
    "is_cached": an_output_is_cached_when_its_nar_is,
    "held NARs": success_with_its_closure_or_what_it_lacks_is_asked_for,
    "lost .drv": a_lost_drv_is_brought_again_once,
    "one path, two makers": makers_of_one_path_do_not_wait_for_each_other,
}
SETTLED: Final[Mapping[str, Check]] = {
    "26 finished": nothing_blocks_what_is_finished_nor_is_left_unfinished,
}
# A retired output below a name is named by the next adoption.
ADOPTED: Final[Mapping[str, Check]] = {
    "28 names": what_a_live_evaluation_reaches_is_named_by_one,
}
QUIET: Final[Mapping[str, Check]] = {
    "no evaluation waits": no_evaluation_waits,
    "nothing is left": nothing_wanted_is_left,
    "every assignment is closed": every_assignment_is_closed,
}
# Invariants of an event rather than of a state: the file under tests/ that asserts each, by its number.
ELSEWHERE: Final[Mapping[str, str]] = {
    "20 interleavings": "graph/test_interleavings.py",
    "21 a NAR again": "model/cache_steps.py",
    "22 a batch again": "model/evaluation_steps.py",
    "23 batches permuted": "model/test_order.py",
    "24 retired and committed again": "model/cache_steps.py",
    "27 Completed": "model/pair.py",
    "30 a second consistency pass": "model/repair_steps.py",
    "31 above a failure": "model/evaluation_steps.py",
    "32 recount = incremental state": "model/pair.py",
    "33 moves": "model/pair.py",
    "34 abort": "model/evaluation_steps.py",
    "36 a committed Aborted": "model/build_steps.py",
}


def violations(stored: Stored, checks: Mapping[str, Check]) -> list[str]:
    """One line for each violation, with the invariant's name."""
    return [f"{name}: {found}" for name, check in checks.items() for found in check(stored)]
