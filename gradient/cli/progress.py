"""What is known of a running evaluation, folded from the server's events. Pure; time is an argument.

`fold` takes one event and returns what happened by it, for those who print lines; those who draw a
picture read the state. A snapshot in the middle of a stream (after a lost connection) is compared with
the state, so that what happened meanwhile is told as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, TypeAlias

import attrs

from gradient.cli.text import Tail, clean
from gradient.model import EVALUATION_TERMINAL, BuildStatus

# Build statuses by their labels; Created and Queued share one.
_STATUSES: Final = {status.label: status for status in BuildStatus}
_ENDED: Final = frozenset(status.label for status in EVALUATION_TERMINAL)

RUNNING: Final = BuildStatus.BUILDING
DONE: Final = frozenset({BuildStatus.COMPLETED, BuildStatus.SUBSTITUTED})
FAILED: Final = frozenset({BuildStatus.FAILED_PERMANENT, BuildStatus.FAILED_TIMEOUT})
# Ended without having failed by itself.
NOT_TRIED: Final = frozenset({BuildStatus.DEPENDENCY_FAILED, BuildStatus.ABORTED})
# Ended for this evaluation, well or not; and what leaves a log behind that the next try does not go on with.
_OVER: Final = DONE | FAILED | NOT_TRIED
_FAILED_BEFORE: Final = FAILED | {BuildStatus.FAILED_TRANSIENT}

# Waiting reasons that end only when somebody connects another worker.
_NEEDS_A_WORKER: Final = frozenset({"workers", "eval_workers"})


@attrs.define(eq=False)
class Build:
    """A build of the evaluation. Times are the server's, in seconds since the epoch."""

    id: int
    name: str = ""
    drv_path: str | None = None
    status: BuildStatus = BuildStatus.QUEUED
    worker: str | None = None
    started: float | None = None
    finished: float | None = None
    error: str | None = None
    # Why it waits or was not tried, in the server's words.
    reason: str | None = None
    # It had ended before this evaluation was made: nothing that the user waited for. What had failed is tried
    # again, mostly.
    earlier: bool = False
    tail: Tail = attrs.field(factory=Tail, repr=False)

    def took(self, now: float) -> float | None:
        """Seconds it has been building, or has built; None when that is unknown."""
        if self.started is None:
            return None
        end = now if self.status is RUNNING else self.finished
        return None if end is None else max(0.0, end - self.started)


@attrs.frozen
class Moved:
    """A build has another status than before."""

    build: Build
    before: BuildStatus


@attrs.frozen
class Turned:
    """The evaluation has another status."""

    status: str


@attrs.frozen
class Waits:
    """The evaluation waits, or we for the server, and why."""

    words: str


@attrs.frozen
class Said:
    """A message about the evaluation. `level` is Error, Warning or Notice."""

    level: str
    source: str
    message: str


Happening: TypeAlias = Moved | Turned | Waits | Said


@attrs.define(eq=False)
class Counters:
    """The server's count of an evaluation's builds."""

    named: int = 0
    active: int = 0
    failed: int = 0
    queued: int = 0
    building: int = 0


@attrs.define(eq=False)
class Progress:
    """The state of one evaluation. `started` is when the user began to wait for it."""

    started: float
    # What is evaluated, in the shortest words that tell.
    title: str = "evaluation"
    status: str = "Queued"
    # When the server made it, by the server's clock.
    created: float | None = None
    # Why it waits, in words, and since when (by the clock of `fold`) it needs a worker that is not there.
    waiting: str | None = None
    needs_worker_since: float | None = None
    # Why we wait for the server, in words; the evaluation may go on without being seen.
    server: str | None = None
    counters: Counters = attrs.field(factory=Counters)
    attributes_done: int = 0
    attributes_total: int | None = None
    derivations: int = 0
    builds: dict[int, Build] = attrs.field(factory=dict)
    _messages: set[Said] = attrs.field(factory=set)

    @property
    def errors(self) -> int:
        """How many errors of the evaluation were told."""
        return sum(said.level == "Error" for said in self._messages)

    @property
    def ended(self) -> bool:
        """Whether the evaluation has its verdict."""
        return self.status in _ENDED

    def having(self, *statuses: BuildStatus) -> list[Build]:
        """The builds with one of these statuses, in the order in which they became known."""
        return [build for build in self.builds.values() if build.status in statuses]

    def fresh(self, *statuses: BuildStatus) -> list[Build]:
        """Those of them that ended, if they did, while the user waits."""
        return [build for build in self.having(*statuses) if not build.earlier]

    def fold(self, event: dict[str, Any], now: float) -> list[Happening]:
        """Take in one event at `now` (seconds of any clock); what happened by it.

        An event of an unknown kind tells nothing. Raises KeyError, TypeError, ValueError or AttributeError
        for one that is not in order.
        """
        return [*self._happenings(event, now)]

    def _happenings(self, event: dict[str, Any], now: float) -> Iterator[Happening]:
        match event.get("event"):
            case "snapshot":
                yield from self._snapshot(event, now)
            case "evaluation":
                yield from self._state(event, now)
            case "build":
                yield from self._build(event)
            case "message":
                yield from self._message(event)
            case "progress":
                self._attributes(event)
            case "log":
                self._of(event).tail.add(event["text"])
            case "stopping":
                yield from self.away("is stopping: its next start goes on")
            case "end":
                yield from self._turn(event["status"])

    def away(self, why: str) -> list[Happening]:
        """The server is waited for, until its next snapshot; the first reason is told."""
        if self.server is not None:
            return []
        self.server = f"waits for the server, which {why}"
        return [Waits(self.server)]

    def _snapshot(self, event: dict[str, Any], now: float) -> Iterator[Happening]:
        self.server = None
        self.created = _epoch(event.get("created_at"))
        yield from self._state(event, now)
        for message in event.get("messages", ()):
            yield from self._message(message)
        for build in sorted(event.get("builds", ()), key=_when):
            yield from self._build(build)

    def _state(self, event: dict[str, Any], now: float) -> Iterator[Happening]:
        counters = event.get("counters", {})
        self.counters = Counters(**{name: counters.get(name, 0) for name in attrs.fields_dict(Counters)})
        yield from self._turn(event["status"])
        yield from self._wait(event.get("waiting"), now)

    def _turn(self, status: str) -> Iterator[Happening]:
        if status != self.status:
            self.status = status
            yield Turned(status)
            if self.ended:
                yield from self._failed_earlier()

    def _wait(self, waiting: dict[str, Any] | None, now: float) -> Iterator[Happening]:
        kind = waiting["reason"].get("kind") if waiting else None
        if kind not in _NEEDS_A_WORKER or self.status != "Waiting":
            self.needs_worker_since = None
        elif self.needs_worker_since is None:
            self.needs_worker_since = now
        before, self.waiting = self.waiting, clean(waiting["words"]) if waiting else None
        if self.waiting is not None and self.waiting != before:
            yield Waits(self.waiting)

    def _build(self, event: dict[str, Any]) -> Iterator[Happening]:
        build = self._of(event)
        before, build.status = build.status, _STATUSES.get(event["status"], build.status)
        build.name = clean(event.get("name") or build.name)
        build.drv_path = event.get("drv_path") or build.drv_path
        build.worker, build.error, build.reason = (
            clean(value) if (value := event.get(name)) else None for name in ("worker", "error", "reason")
        )
        self._times(build, event)
        was_earlier, build.earlier = build.earlier, self._ended_earlier(build)
        if before in _FAILED_BEFORE and build.status is not before:
            build.tail = Tail()
        if not build.earlier and (was_earlier or build.status is not before):
            yield Moved(build, before)

    def _ended_earlier(self, build: Build) -> bool:
        if self.ended or build.status not in _OVER or build.finished is None or self.created is None:
            return False
        return build.finished < self.created

    def _failed_earlier(self) -> Iterator[Happening]:
        """What had failed before and was not tried again is why this evaluation failed, too."""
        for build in self.having(*FAILED, *NOT_TRIED):
            if build.earlier:
                build.earlier = False
                yield Moved(build, build.status)

    def _times(self, build: Build, event: dict[str, Any]) -> None:
        at = _epoch(event.get("at"))
        build.started = _epoch(event.get("started_at")) or build.started
        if build.status is RUNNING:
            build.started, build.finished = build.started or at, None
        else:
            build.finished = _epoch(event.get("finished_at")) or at

    def _message(self, event: dict[str, Any]) -> Iterator[Happening]:
        said = Said(event["level"], clean(event.get("source") or ""), clean(event["message"]))
        if said not in self._messages:
            self._messages.add(said)
            yield said

    def _attributes(self, event: dict[str, Any]) -> None:
        self.attributes_done = event["attributes_done"]
        self.attributes_total = event["attributes_total"]
        self.derivations = event["derivations"]

    def _of(self, event: dict[str, Any]) -> Build:
        number = event["build"]
        if number not in self.builds:
            self.builds[number] = Build(number, name=f"build {number}")
        return self.builds[number]


def _when(build: dict[str, Any]) -> tuple[bool, float]:
    """The order in which builds are told: as they moved, and behind all others what was not tried."""
    return build["status"] == BuildStatus.DEPENDENCY_FAILED.label, _epoch(build.get("at")) or 0.0


def _epoch(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()
