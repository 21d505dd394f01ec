"""The one definition of each predicate, as SQL text over named aliases. Pure.

A statement never spells a status number or a queue condition itself: it embeds one of these. The SQL
function bodies of `schema/` repeat some of them; tests/graph/test_predicates.py holds both together.

Aliases by convention: `b` derivation_build, `d` derivation, `j` build_job, `v` evaluation.
Source: seed "Queueing and Counters".
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from gradient.model import (
    BUILDER_STATUSES,
    CASCADE_TARGET,
    EVALUATION_ACTIVE,
    EVALUATION_AFTER_WALK,
    NEED_BUILD_STATUSES,
    TERMINAL_FAILURE,
    TERMINAL_SUCCESS,
    AttemptOutcome,
    AttemptReason,
    BuildStatus,
    EdgeKind,
    EvaluationStatus,
)


def any_of(column: str, members: Iterable[IntEnum]) -> str:
    """`column IN (…)` over pinned numbers, in order."""
    return f"{column} IN ({', '.join(str(int(member)) for member in sorted(members))})"


def runtime_edge(e: str = "e") -> str:
    """A NAR of the one above refers to the one below."""
    return any_of(f"{e}.kind", {EdgeKind.RUNTIME, EdgeKind.BOTH})


def build_edge(e: str = "e") -> str:
    """The one below is a build input."""
    return any_of(f"{e}.kind", {EdgeKind.BUILD, EdgeKind.BOTH})


def live_evaluation(v: str = "v") -> str:
    """The evaluation has not ended."""
    return any_of(f"{v}.status", EVALUATION_ACTIVE)


def past_walk(v: str = "v") -> str:
    """The walk of the evaluation is over and it has not ended: it waits for nothing but its builds. One that
    waits for a worker before has never been Building."""
    return f"({v}.building_started_at IS NOT NULL AND {any_of(f'{v}.status', EVALUATION_AFTER_WALK)})"


def recorded_predicate(d: str = "d") -> str:
    """The subtree of a derivation is recorded down to its leaves: where a worker's walk stops."""
    return f"({d}.walked AND {d}.unwalked_inputs = 0)"


# --- what a shared build is -----------------------------------------------------------------------


def present_predicate(derivation: str) -> str:
    """At least one output row, and every output's NAR in the cache. Without rows nothing is present."""
    return (
        f"(EXISTS (SELECT FROM derivation_output o WHERE o.derivation = {derivation})"
        f" AND NOT EXISTS (SELECT FROM derivation_output o WHERE o.derivation = {derivation}"
        " AND NOT o.is_cached))"
    )


def shared_build_complete_predicate(b: str = "b") -> str:
    """The complete closure: present, and so is everything it refers to."""
    return f"({b}.missing_runtime_deps = 0 AND {present_predicate(f'{b}.derivation')})"


def fetchable_predicate(b: str = "b") -> str:
    """What the column `fetchable` must say."""
    return f"({any_of(f'{b}.status', TERMINAL_SUCCESS)} AND {shared_build_complete_predicate(b)})"


def held_predicate(b: str = "b") -> str:
    """It waits for a build that it does not need: our cache holds it with everything it refers to. A job
    that is out finishes undisturbed."""
    waits = any_of(f"{b}.status", CASCADE_TARGET | {BuildStatus.SKIPPED})
    return f"({waits} AND {shared_build_complete_predicate(b)} AND {unassigned_predicate(b)})"


def open_predicate(b: str = "b") -> str:
    """Still to be made: builders, Skipped, Aborted, and a success with a missing dependency."""
    return f"(NOT {b}.fetchable AND NOT {any_of(f'{b}.status', TERMINAL_FAILURE)})"


def builder_predicate(b: str = "b", d: str = "d") -> str:
    """A shared build that will be built from its inputs, so that the need for it is need for them."""
    return (
        f"({d}.walked AND {b}.probed AND NOT {b}.cache_available"
        f" AND {any_of(f'{b}.status', BUILDER_STATUSES)})"
    )


def non_passthrough_predicate(b: str = "b") -> str:
    """Not served by an upstream cache."""
    return f"(NOT {b}.cache_available)"


# --- queue conditions -----------------------------------------------------------------------------


def drv_present_predicate(d: str = "d") -> str:
    """The derivation's own `.drv` NAR is in the cache."""
    return f"EXISTS (SELECT FROM cached_path p WHERE p.hash = {d}.hash AND p.file_hash IS NOT NULL)"


def gates_predicate(b: str = "b", d: str = "d") -> str:
    """The queue conditions; a passthrough needs only the first three."""
    return (
        f"({d}.walked AND {b}.wanted"
        f" AND EXISTS (SELECT FROM build_job j WHERE j.derivation = {b}.derivation)"
        f" AND ({b}.cache_available OR ({b}.probed AND {b}.blocking_deps = 0"
        f" AND {drv_present_predicate(d)})))"
    )


def promotable_predicate(b: str = "b", d: str = "d") -> str:
    """Created, and every queue condition holds."""
    return f"({b}.status = {int(BuildStatus.CREATED)} AND {gates_predicate(b, d)})"


def unassigned_predicate(b: str = "b") -> str:
    """No open assignment: a job handed out is never recalled by the queue."""
    return (
        f"NOT EXISTS (SELECT FROM dispatched_job q WHERE q.derivation = {b}.derivation"
        " AND q.finished_at IS NULL)"
    )


# --- what stays failed or aborted -----------------------------------------------------------------


def deterministic_failure(b: str = "b") -> str:
    """The builder itself has failed it: tried again without being asked, it would fail again."""
    return (
        f"EXISTS (SELECT FROM build_attempt a WHERE a.derivation = {b}.derivation"
        f" AND a.outcome = {int(AttemptOutcome.FAILED)} AND a.reason = {int(AttemptReason.BUILDER_NONZERO)})"
    )


def marked_aborted(derivation: str) -> str:
    """It was aborted for some evaluation, and nobody has retried it."""
    return f"EXISTS (SELECT FROM build_job j WHERE j.derivation = {derivation} AND j.aborted)"


def aborted_in_live(derivation: str) -> str:
    """It was aborted for an evaluation that has not ended: it is a failure of that one."""
    return (
        "EXISTS (SELECT FROM build_job j JOIN evaluation v ON v.id = j.evaluation"
        f" WHERE j.derivation = {derivation} AND j.aborted AND {live_evaluation('v')})"
    )


def asked_for(derivation: str) -> str:
    """A live evaluation names it in which it was not aborted."""
    return (
        "EXISTS (SELECT FROM build_job j JOIN evaluation v ON v.id = j.evaluation"
        f" WHERE j.derivation = {derivation} AND NOT j.aborted AND {live_evaluation('v')})"
    )


def held_by_abort(b: str = "b") -> str:
    """Its abort holds: no live evaluation asks for it but those it was aborted for, and what still wants it
    from before does not bring it back."""
    return (
        f"({b}.status = {int(BuildStatus.ABORTED)} AND {marked_aborted(f'{b}.derivation')}"
        f" AND NOT {asked_for(f'{b}.derivation')})"
    )


# --- need and verdict -----------------------------------------------------------------------------


def wanting_entry_point(derivation: str) -> str:
    """An entry point of this derivation that wants it: one of an evaluation that was not aborted, whose
    build was not aborted there. Completed and Failed evaluations still want their entry points."""
    # OFFSET 0: looked up for each row, and never read once of all the entry points there have been.
    return (
        "EXISTS (SELECT FROM entry_point t JOIN evaluation v ON v.id = t.evaluation"
        " LEFT JOIN build_job j ON j.evaluation = t.evaluation AND j.derivation = t.derivation"
        f" WHERE t.derivation = {derivation} AND v.status <> {int(EvaluationStatus.ABORTED)}"
        " AND NOT coalesce(j.aborted, false) OFFSET 0)"
    )


def steps_over(e: str = "e", b: str = "b", d: str = "d") -> str:
    """The open walk goes from row `b` over edge `e`: runtime edges always, build edges from builders."""
    return f"({runtime_edge(e)} OR {builder_predicate(b, d)})"


def blocks_evaluation(b: str = "b") -> str:
    """This named shared build keeps its evaluation waiting."""
    return (
        f"(({any_of(f'{b}.status', NEED_BUILD_STATUSES)} AND {b}.wanted)"
        f" OR {any_of(f'{b}.status', {BuildStatus.QUEUED, BuildStatus.BUILDING})})"
    )
