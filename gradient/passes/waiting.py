"""Why an evaluation waits, decided from counters and the pool; and the same in words. Pure.

Source: seed "Waiting and Recovery", Waiting Reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import attrs

from gradient.graph.candidate_reads import BlockingKind, InFlight
from gradient.model import EVALUATION_RUNNING, EvaluationStatus

# A park on the same unmet set this long is handed back: nobody will come (seed: Unbuildable abort).
UNBUILDABLE_AFTER: Final = timedelta(seconds=300)
# Parks that triggers and caches own; the waiting pass never touches them.
FOREIGN_REASONS: Final = frozenset({"approval", "no_cache", "cache_storage_full"})

CanBuild = Callable[[str, Iterable[str]], bool]


@attrs.frozen
class PoolView:
    """What the waiting rules need of the pool."""

    connected_workers: int
    can_fetch: bool
    can_evaluate: bool
    available_architectures: tuple[str, ...]
    can_build: CanBuild = attrs.field(eq=False)


@attrs.frozen
class Park:
    """Turn Waiting with this reason, or renew the reason; `goes_on`: only its numbers changed, and the
    time already waited counts."""

    reason: dict[str, Any]
    goes_on: bool = False


@attrs.frozen
class Unpark:
    """Leave Waiting."""

    status: EvaluationStatus


@attrs.frozen
class Finish:
    """The counters say that nothing blocks: confirm it and write the verdict."""


@attrs.frozen
class AbortUnbuildable:
    """Parked for too long on workers that do not exist."""

    warning: str


@attrs.frozen
class ReadBlocking:
    """The counters cannot tell: read what blocks, then decide with `building_verdict`."""


Verdict = Park | Unpark | Finish | AbortUnbuildable | ReadBlocking | None


def phase_from_counters(evaluation: InFlight, pool: PoolView) -> Verdict:
    """What to do with an evaluation, without reading a shared build. None: nothing."""
    kind = (evaluation.reason or {}).get("kind")
    if kind in FOREIGN_REASONS or kind == "draining":
        return None
    if not evaluation.building_started:
        return _before_building(evaluation, pool, kind)
    # Nor does one wait that names nothing: what its walk found is named by now.
    if evaluation.active == 0:
        return Finish()
    if evaluation.building > 0:
        waiting = evaluation.status is EvaluationStatus.WAITING
        return Unpark(EvaluationStatus.BUILDING) if waiting else None
    return ReadBlocking()


def _before_building(evaluation: InFlight, pool: PoolView, kind: str | None) -> Verdict:
    missing = "fetch" if not pool.can_fetch else "eval" if not pool.can_evaluate else None
    if evaluation.status is EvaluationStatus.WAITING and missing is None:
        return Unpark(EvaluationStatus.QUEUED) if kind == "eval_workers" else None
    if missing is None or evaluation.status in EVALUATION_RUNNING:
        return None
    reason = {"kind": "eval_workers", "capability": missing, "connected_workers": pool.connected_workers}
    return Park(reason)


def building_verdict(
    evaluation: InFlight, blocking: Sequence[BlockingKind], pool: PoolView, now: datetime
) -> Verdict:
    """What to do with an evaluation none of whose builds runs, given what blocks it."""
    if not blocking:
        return Finish()
    waiting = evaluation.status is EvaluationStatus.WAITING
    if any(b.going_on or (b.queued and _buildable(b, pool)) for b in blocking):
        return Unpark(EvaluationStatus.BUILDING) if waiting else None
    unmet = [b for b in blocking if not _buildable(b, pool)]
    if not unmet:
        return Park({"kind": "graph_stuck", "pending_shared_builds": sum(b.builds for b in blocking)})
    reason = workers_reason(unmet, pool)
    goes_on = waiting and _same_need(evaluation.reason, reason)
    if goes_on and _overdue(evaluation, now):
        return AbortUnbuildable(
            f"No worker came for it within {_minutes(UNBUILDABLE_AFTER)}: {words(reason)}"
        )
    return Park(reason, goes_on)


def _buildable(blocking: BlockingKind, pool: PoolView) -> bool:
    return pool.can_build(blocking.architecture, blocking.required_features)


def unstick_due(evaluation: InFlight, verdict: Verdict) -> bool:
    """Whether the graph is to be healed before the verdict counts: on entry to `graph_stuck`, and whenever
    the number of its pending builds has changed."""
    return (
        isinstance(verdict, Park)
        and verdict.reason["kind"] == "graph_stuck"
        and verdict.reason != evaluation.reason
    )


def workers_reason(unmet: Collection[BlockingKind], pool: PoolView) -> dict[str, Any]:
    """The `workers` reason: which systems and features nobody connected has."""
    return {
        "kind": "workers",
        "unmet": [
            {
                "architecture": b.architecture,
                "required_features": list(b.required_features),
                "builds": b.builds,
                "example": b.example,
            }
            for b in unmet
        ],
        "connected_workers": pool.connected_workers,
        "available_architectures": list(pool.available_architectures),
    }


def _same_need(old: dict[str, Any] | None, new: dict[str, Any]) -> bool:
    """The same unmet set, however many builds of it are left or workers came and went."""
    return old is not None and old.get("kind") == "workers" and _needs(old) == _needs(new)


def _needs(reason: dict[str, Any]) -> set[tuple[str, ...]]:
    return {(unmet["architecture"], *unmet["required_features"]) for unmet in reason["unmet"]}


def _overdue(evaluation: InFlight, now: datetime) -> bool:
    since = evaluation.waiting_since
    return not evaluation.wait_for_workers and since is not None and now - since >= UNBUILDABLE_AFTER


def words(reason: dict[str, Any]) -> str:
    """A waiting reason as a sentence for people."""
    kind = str(reason.get("kind"))
    workers = f"{_count(reason.get('connected_workers', 0), 'worker')} connected"
    if kind == "eval_workers":
        what = "fetch flakes" if reason["capability"] == "fetch" else "evaluate"
        return f"waits for a worker that can {what} ({workers})"
    if kind == "workers":
        needs = "; ".join(_need_in_words(unmet) for unmet in reason["unmet"])
        systems = ", ".join(reason["available_architectures"])
        return f"waits for a worker for {needs} ({workers}{systems and ', building for '}{systems})"
    if kind == "graph_stuck":
        builds = _count(reason["pending_shared_builds"], "build")
        return f"{builds} left, yet none can be handed out: the graph is being repaired"
    return _PLAIN_WORDS.get(kind, f"waits ({kind})")


_PLAIN_WORDS: Final = {
    "draining": "waits while the server drains",
    "approval": "waits for somebody to approve it",
    "no_cache": "waits for a cache: its project is subscribed to none",
    "cache_storage_full": "waits for room in the cache",
}


def _need_in_words(unmet: dict[str, Any]) -> str:
    features = ", ".join(map(_shown, unmet["required_features"]))
    needs = f" with {features}" if features else ""
    builds = f"{_count(unmet['builds'], 'build')}, such as {unmet['example']}"
    return f"{_shown(unmet['architecture'])}{needs} ({builds})"


def _shown(word: str) -> str:
    """A flake's word on one line, and nothing that a terminal would obey: it may say anything."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in word) or "no system at all"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _minutes(span: timedelta) -> str:
    return f"{span.total_seconds() / 60:.0f} minutes"
