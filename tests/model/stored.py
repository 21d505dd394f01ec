"""What PostgreSQL holds, as the same facts the model has, and the maintained columns beside them."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import attrs

from gradient.graph.pg import Connection, fetch_all
from gradient.model import (
    AttemptOutcome,
    AttemptReason,
    BuildStatus,
    DispatchOutcome,
    EdgeKind,
    EvaluationKind,
    EvaluationStatus,
    JobKind,
    MessageLevel,
)
from tests.model import rules
from tests.model.facts import Assignment, Attempt, Build, Derivation, Evaluation, Facts
from tests.model.rules import Counted


@attrs.define
class Stored:
    """The facts of the database, and its columns by derivation or evaluation."""

    facts: Facts
    unwalked_inputs: dict[str, int]
    missing_runtime_deps: dict[str, int]
    blocking_deps: dict[str, int]
    fetchable: set[str]
    wanted: set[str]
    # By derivation: its outputs that are marked as cached.
    is_cached: dict[str, set[str]]
    # Columns and unfolded deltas together.
    counters: dict[int, Counted]
    derivation_ids: dict[int, str]
    # Derivations by id, as often as they have a shared build.
    shared_builds: list[str]
    ledger: int

    @classmethod
    def of(cls, facts: Facts) -> Stored:
        """What the database must hold when these are the facts."""
        return cls(
            facts,
            unwalked_inputs={name: rules.unwalked_inputs(facts, name) for name in facts.derivations},
            missing_runtime_deps={name: rules.missing_runtime_deps(facts, name) for name in facts.builds},
            blocking_deps={name: rules.blocking_deps(facts, name) for name in facts.builds},
            fetchable=rules.fetchable(facts),
            wanted=rules.wanted(facts),
            is_cached={
                name: set(derivation.outputs.values()) & set(facts.cached)
                for name, derivation in facts.derivations.items()
            },
            counters={evaluation: rules.counters(facts, evaluation) for evaluation in facts.evaluations},
            derivation_ids=dict(enumerate(facts.derivations)),
            shared_builds=list(facts.builds),
            ledger=0,
        )


_ERROR = int(MessageLevel.ERROR)
_RECOVERY = int(EvaluationKind.DRV_RECOVERY)
# One round trip: a soak reads this after each of a million steps.
_PICTURE = f"""
    SELECT
      (SELECT json_agg(json_build_array(id, name, walked, unwalked_inputs)) FROM derivation),
      (SELECT json_agg(json_build_array(derivation, name, package, is_cached)) FROM derivation_output),
      (SELECT json_agg(json_build_array(derivation, store_path)) FROM derivation_input_source),
      (SELECT json_agg(json_build_array(derivation, dependency, kind)) FROM derivation_dependency),
      (SELECT json_agg(json_build_array(derivation, status, updated_at, probed, cache_available, substituted,
                                        attempt, fetchable, wanted, blocking_deps, missing_runtime_deps))
       FROM derivation_build),
      (SELECT json_agg(json_build_array(
           v.id, v.status, v.created_at, v.task, v.building_started_at IS NOT NULL, v.walk_lost,
           EXISTS (SELECT FROM evaluation_message m WHERE m.evaluation = v.id AND m.level = {_ERROR}),
           CASE WHEN v.waiting_reason ->> 'kind' = 'graph_stuck' THEN v.waiting_since END,
           v.kind = {_RECOVERY}, v.recovers,
           v.named_shared_builds + coalesce(l.named, 0), v.active_shared_builds + coalesce(l.active, 0),
           v.failed_shared_builds + coalesce(l.failed, 0), v.queued_shared_builds + coalesce(l.queued, 0),
           v.building_shared_builds + coalesce(l.building, 0)) ORDER BY v.id)
       FROM evaluation v LEFT JOIN (
           SELECT evaluation, sum(named) AS named, sum(active) AS active, sum(failed) AS failed,
                  sum(queued) AS queued, sum(building) AS building
           FROM evaluation_shared_build_delta GROUP BY evaluation) l ON l.evaluation = v.id),
      (SELECT json_agg(json_build_array(evaluation, derivation, aborted)) FROM build_job),
      (SELECT json_agg(json_build_array(evaluation, eval, derivation)) FROM entry_point),
      (SELECT json_agg(json_build_array(package, file_hash IS NOT NULL, "references", created_at))
       FROM cached_path),
      (SELECT json_agg(json_build_array(id, kind, worker_id, evaluation, derivation, dispatched_at, outcome)
                       ORDER BY id)
       FROM dispatched_job),
      (SELECT json_agg(json_build_array(derivation, dispatched_job, evaluation, outcome, reason) ORDER BY id)
       FROM build_attempt),
      (SELECT count(*) FROM evaluation_shared_build_delta)
"""


async def read(connection: Connection) -> Stored:
    """Everything, as it is now."""
    (row,) = await fetch_all(connection, _PICTURE)
    *tables, ledger = row
    derivations, outputs, sources, edges, builds, evaluations, names, entries, paths, jobs, attempts = (
        table or [] for table in tables
    )
    names_of = {i: name for i, name, *_ in derivations}
    facts = Facts()
    for _, name, walked, _ in derivations:
        facts.derivations[name] = Derivation(walked)
    for i, name, path, _ in outputs:
        facts.derivations[names_of[i]].outputs[name] = path
    for i, path in sources:
        facts.derivations[names_of[i]].sources |= set(_names([path.removeprefix("/nix/store/")]))
    facts.edges = {(names_of[high], names_of[low]): EdgeKind(kind) for high, low, kind in edges}
    for i, status, updated_at, probed, available, substituted, attempt, *_ in builds:
        when = datetime.fromisoformat(updated_at)
        build = Build(BuildStatus(status), when, probed, available, substituted, attempt)
        facts.builds[names_of[i]] = build
    for i, status, created_at, task, evaluated, walk_lost, has_error, stuck_since, *rest in evaluations:
        facts.evaluations[i] = Evaluation(
            EvaluationStatus(status),
            datetime.fromisoformat(created_at),
            task,
            evaluated,
            has_error,
            walk_lost,
            None if stuck_since is None else datetime.fromisoformat(stuck_since),
            *rest[:2],
        )
    facts.names = {(evaluation, names_of[i]): aborted for evaluation, i, aborted in names}
    facts.entry_points = {(evaluation, attr): names_of[i] for evaluation, attr, i in entries}
    facts.cached = {package: _names(refs) for package, backed, refs, _ in paths if backed}
    facts.cached_at = {package: datetime.fromisoformat(at) for package, backed, _, at in paths if backed}
    facts.assignments = {i: _assignment(names_of, *job) for i, *job in jobs}
    facts.attempts = [_attempt(names_of, *attempt) for attempt in attempts]
    by_build = {names_of[i]: columns for i, *_, columns in ((b[0], b[7:]) for b in builds)}
    return Stored(
        facts,
        unwalked_inputs={name: count for _, name, _, count in derivations},
        missing_runtime_deps={name: columns[3] for name, columns in by_build.items()},
        blocking_deps={name: columns[2] for name, columns in by_build.items()},
        fetchable={name for name, columns in by_build.items() if columns[0]},
        wanted={name for name, columns in by_build.items() if columns[1]},
        is_cached={
            name: {path for i, _, path, cached in outputs if names_of[i] == name and cached}
            for name in facts.derivations
        },
        counters={i: Counted(*counts) for i, *_, counts in ((v[0], v[10:]) for v in evaluations)},
        derivation_ids=names_of,
        shared_builds=sorted(names_of[b[0]] for b in builds),
        ledger=ledger,
    )


def _names(references: list[str]) -> tuple[str, ...]:
    """Base names without their hash part."""
    return tuple(base[33:] for base in references)


def _assignment(
    names_of: dict[int, str],
    kind: int,
    worker: str,
    evaluation: int | None,
    derivation: int | None,
    dispatched_at: str,
    outcome: int | None,
) -> Assignment:
    name = None if derivation is None else names_of[derivation]
    ended = None if outcome is None else DispatchOutcome(outcome)
    when = datetime.fromisoformat(dispatched_at)
    return Assignment(JobKind(kind), UUID(worker), evaluation, name, when, ended)


def _attempt(
    names_of: dict[int, str],
    derivation: int,
    assignment: int,
    evaluation: int | None,
    outcome: int,
    reason: int | None,
) -> Attempt:
    why = None if reason is None else AttemptReason(reason)
    return Attempt(names_of[derivation], assignment, evaluation, AttemptOutcome(outcome), why)


def differences(model: Facts, found: Stored) -> list[str]:
    """One line for each thing that the model and the database say otherwise."""
    expected = Stored.of(model)
    lines = []
    for what in (
        "derivations",
        "edges",
        "evaluations",
        "names",
        "entry_points",
        "cached",
        "cached_at",
        "assignments",
    ):
        lines += _compare(what, getattr(model, what), getattr(found.facts, what))
    lines += _compare("attempt", dict(enumerate(model.attempts)), dict(enumerate(found.facts.attempts)))
    lines += _compare("build", _builds(model), _builds(found.facts))
    for what in ("unwalked_inputs", "missing_runtime_deps", "blocking_deps", "is_cached"):
        lines += _compare(what, getattr(expected, what), getattr(found, what))
    lines += _compare("fetchable", dict.fromkeys(expected.fetchable), dict.fromkeys(found.fetchable))
    # On a row that is done the mark means nothing.
    marked = found.wanted & rules.open_builds(model)
    lines += _compare("wanted", dict.fromkeys(expected.wanted), dict.fromkeys(marked))
    # The ledger is kept for live evaluations.
    live = [v for v in model.evaluations if rules.is_live(model, v)]
    counters = {v: counted for v, counted in found.counters.items() if v in live}
    return lines + _compare("counters", {v: expected.counters[v] for v in live}, counters)


def _builds(facts: Facts) -> dict[str, tuple[Any, ...]]:
    """What counts of a shared build: when it moved only matters once it waits or has failed, its number of
    tries only while it may be tried again."""
    judged = {BuildStatus.FAILED_PERMANENT, BuildStatus.FAILED_TIMEOUT, BuildStatus.DEPENDENCY_FAILED}
    retried = {BuildStatus.CREATED, BuildStatus.QUEUED, BuildStatus.BUILDING, BuildStatus.FAILED_TRANSIENT}
    return {
        name: (
            b.status,
            b.probed,
            b.cache_available,
            b.substituted,
            b.updated_at if b.status in judged | {BuildStatus.FAILED_TRANSIENT} else None,
            b.attempt if b.status in retried else None,
        )
        for name, b in facts.builds.items()
    }


def _compare(what: str, expected: dict[Any, Any], real: dict[Any, Any]) -> list[str]:
    keys = sorted({*expected, *real}, key=repr)
    return [
        f"{what} {key}: the model says {expected.get(key, '-')}, the graph {real.get(key, '-')}"
        for key in keys
        if expected.get(key, "-") != real.get(key, "-")
    ]
