"""The seed's rules, worked out from the facts each time somebody asks. Pure, slow, and meant to be read
beside the seed "Queueing and Counters": each function quotes the line that it is.

Nothing here is taken from `gradient.graph`: a mistake there must show here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import attrs

from gradient.model import (
    AttemptOutcome,
    AttemptReason,
    BuildStatus,
    EdgeKind,
    EvaluationStatus,
    JobKind,
)
from tests.model.facts import Facts

S = BuildStatus
SUCCESS = {S.COMPLETED, S.SUBSTITUTED}
FAILURE = {S.FAILED_PERMANENT, S.FAILED_TIMEOUT, S.DEPENDENCY_FAILED}
BUILDERS = {S.CREATED, S.QUEUED, S.BUILDING, S.FAILED_TRANSIENT}
ENDED = {EvaluationStatus.COMPLETED, EvaluationStatus.FAILED, EvaluationStatus.ABORTED}


# --- edges ----------------------------------------------------------------------------------------


def below(facts: Facts, name: str) -> Iterator[tuple[str, EdgeKind]]:
    """Direct dependencies, every edge."""
    return ((low, kind) for (high, low), kind in facts.edges.items() if high == name)


def above(facts: Facts, name: str) -> Iterator[str]:
    """What depends on it directly, every edge."""
    return (high for high, low in facts.edges if low == name)


def is_runtime(kind: EdgeKind) -> bool:
    """kind IN (1, 2)"""
    return kind in {EdgeKind.RUNTIME, EdgeKind.BOTH}


def is_build(kind: EdgeKind) -> bool:
    """kind IN (0, 2)"""
    return kind in {EdgeKind.BUILD, EdgeKind.BOTH}


# --- walk completeness ----------------------------------------------------------------------------


def recorded(facts: Facts) -> set[str]:
    """Derivations whose whole subtree is recorded: all but the stubs and everything above a stub."""
    incomplete = {name for name, d in facts.derivations.items() if not d.walked}
    grows = True
    while grows:
        more = {h for (h, low), kind in facts.edges.items() if is_build(kind) and low in incomplete}
        grows = not more <= incomplete
        incomplete |= more
    return set(facts.derivations) - incomplete


def unwalked_inputs(facts: Facts, name: str) -> int:
    """Direct build inputs (kind IN (0, 2)) whose subtree is not recorded."""
    done = recorded(facts)
    return sum(is_build(kind) and low not in done for low, kind in below(facts, name))


# --- start condition columns ----------------------------------------------------------------------


def present(facts: Facts, name: str) -> bool:
    """Every output with a NAR in the cache. Without output rows nothing is present."""
    outputs = facts.derivations[name].outputs
    return bool(outputs) and all(path in facts.cached for path in outputs.values())


def complete(facts: Facts) -> set[str]:
    """Shared builds with a complete closure: present, and so is all they refer to, however deep."""
    missing = {name for name in facts.derivations if name not in facts.builds or not present(facts, name)}
    grows = True
    while grows:
        more = {h for (h, low), kind in facts.edges.items() if is_runtime(kind) and low in missing}
        grows = not more <= missing
        missing |= more
    return set(facts.builds) - missing


def missing_runtime_deps(facts: Facts, name: str) -> int:
    """Runtime dependencies (kind IN (1, 2)) leading to a shared build without a complete closure."""
    done = complete(facts)
    return sum(is_runtime(kind) and low not in done for low, kind in below(facts, name))


def fetchable(facts: Facts) -> set[str]:
    """Terminal success (Completed, Substituted) with a complete closure."""
    return {name for name in complete(facts) if facts.builds[name].status in SUCCESS}


def blocking_deps(facts: Facts, name: str) -> int:
    """Direct dependencies (every edge) that are not fetchable."""
    done = fetchable(facts)
    return sum(low not in done for low, _ in below(facts, name))


# --- needs build ----------------------------------------------------------------------------------


def open_builds(facts: Facts) -> set[str]:
    """Not fetchable and not in terminal failure."""
    done = fetchable(facts)
    return {name for name, b in facts.builds.items() if name not in done and b.status not in FAILURE}


def is_builder(facts: Facts, name: str) -> bool:
    """Walked, probed, not available in a cache, in BUILDER_STATUSES."""
    build = facts.builds[name]
    walked = facts.derivations[name].walked
    return walked and build.probed and not build.cache_available and build.status in BUILDERS


def wanting_entry_points(facts: Facts, of: Collection[int] | None = None) -> set[str]:
    """Entry points of an Aborted evaluation want nothing, nor does one whose build was aborted there.
    Those of a Completed or Failed evaluation still do. Of all evaluations, or of some."""
    return {
        name
        for (evaluation, _), name in facts.entry_points.items()
        if facts.evaluations[evaluation].status is not EvaluationStatus.ABORTED
        and not facts.names.get((evaluation, name), False)
        and (of is None or evaluation in of)
    }


def open_walk(facts: Facts, seeds: set[str]) -> set[str]:
    """Reaches only shared builds that are open. Seeds and all it reaches step over runtime dependencies,
    a builder also over build dependencies."""
    may_reach = open_builds(facts)
    reached: set[str] = set()
    due = seeds & may_reach
    while due:
        name = due.pop()
        reached.add(name)
        over = {low for low, kind in below(facts, name) if is_runtime(kind) or is_builder(facts, name)}
        due |= (over & may_reach) - reached
    return reached


def wanted(facts: Facts) -> set[str]:
    """Shared builds still wanted by some entry point."""
    return open_walk(facts, wanting_entry_points(facts))


# --- queue conditions -----------------------------------------------------------------------------


def is_named(facts: Facts, name: str) -> bool:
    """A build_job naming the derivation."""
    return any(named == name for _, named in facts.names)


def gated(facts: Facts) -> set[str]:
    """Shared builds that the queue conditions hold for; a passthrough needs the first three alone."""
    return {
        name
        for name in wanted(facts)
        if facts.derivations[name].walked
        and is_named(facts, name)
        and (facts.builds[name].cache_available or may_be_built(facts, name))
    }


def may_be_built(facts: Facts, name: str) -> bool:
    """Probed, nothing below it missing, and its own .drv NAR in the cache."""
    return facts.builds[name].probed and blocking_deps(facts, name) == 0 and f"{name}.drv" in facts.cached


def is_assigned(facts: Facts, name: str) -> bool:
    """An assignment of it is open."""
    return any(
        a.kind is JobKind.BUILD and a.derivation == name and a.outcome is None
        for a in facts.assignments.values()
    )


# --- what stays failed or aborted -----------------------------------------------------------------


def failed_by_its_builder(facts: Facts, name: str) -> bool:
    """A deterministic failure: some attempt is Failed with BuilderNonzero."""
    return any(
        a.derivation == name
        and (a.outcome, a.reason) == (AttemptOutcome.FAILED, AttemptReason.BUILDER_NONZERO)
        for a in facts.attempts
    )


def is_marked(facts: Facts, name: str) -> bool:
    """build_job.aborted is set for it in some evaluation."""
    return any(named == name and aborted for (_, named), aborted in facts.names.items())


def is_marked_in_live(facts: Facts, name: str) -> bool:
    """... in one that has not ended: it is a failure of that one."""
    return any(
        named == name and aborted and is_live(facts, evaluation)
        for (evaluation, named), aborted in facts.names.items()
    )


def is_held(facts: Facts, name: str) -> bool:
    """Its abort holds: no live evaluation names it in which it was not aborted (ADR 21)."""
    asked = any(
        named == name and not aborted and is_live(facts, evaluation)
        for (evaluation, named), aborted in facts.names.items()
    )
    return facts.builds[name].status is S.ABORTED and is_marked(facts, name) and not asked


# --- evaluations ----------------------------------------------------------------------------------


def is_live(facts: Facts, evaluation: int) -> bool:
    """It has not ended."""
    return facts.evaluations[evaluation].status not in ENDED


def named_by(facts: Facts, evaluation: int) -> list[str]:
    """The shared builds it names."""
    return [name for named_for, name in facts.names if named_for == evaluation]


def blocking_builds(facts: Facts) -> set[str]:
    """Those in NEED_BUILD_STATUSES that are wanted, and whatever is Queued or Building."""
    pending = {name for name in wanted(facts) if facts.builds[name].status in BUILDERS | {S.SKIPPED}}
    return pending | {name for name, b in facts.builds.items() if b.status in {S.QUEUED, S.BUILDING}}


def without_drv(facts: Facts, evaluation: int) -> set[str]:
    """Named shared builds for which nothing is missing but their own .drv, which a walk alone can bring."""
    waiting = {name for name, b in facts.builds.items() if b.status in {S.CREATED, S.QUEUED} and b.probed}
    return {
        name
        for name in waiting & wanted(facts) & set(named_by(facts, evaluation))
        if facts.derivations[name].walked
        and not facts.builds[name].cache_available
        and blocking_deps(facts, name) == 0
        and f"{name}.drv" not in facts.cached
        and not is_assigned(facts, name)
    }


@attrs.frozen
class Counted:
    """The five counters of an evaluation."""

    named: int
    active: int
    failed: int
    queued: int
    building: int


def counters(facts: Facts, evaluation: int) -> Counted:
    """Over the shared builds it names."""
    names = named_by(facts, evaluation)
    statuses = [facts.builds[name].status for name in names]
    return Counted(
        named=len(names),
        active=len(blocking_builds(facts) & set(names)),
        failed=sum(status in FAILURE | {S.ABORTED} for status in statuses),
        queued=statuses.count(S.QUEUED),
        building=statuses.count(S.BUILDING),
    )
