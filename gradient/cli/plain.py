"""Progress as lines, one for each thing that happens. Pure; for logs and pipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import attrs

from gradient.cli.progress import FAILED, Build, Happening, Moved, Progress, Said, Turned, Waits
from gradient.cli.text import count, seconds, why_failed
from gradient.model import BuildStatus

# The source of a message about an attribute.
_ATTRIBUTE: Final = "nix-eval:"
# How often a long evaluation says how far it is.
SAY_EVERY: Final = 10.0  # seconds
WAIT_BEFORE_SAYING: Final = 2.0  # seconds

EVALUATING: Final = frozenset({"EvaluatingFlake", "EvaluatingDerivation"})
_PHASES: Final = {
    "Fetching": "fetching the flake",
    "EvaluatingFlake": "evaluating",
    "EvaluatingDerivation": "reading derivations",
}


@attrs.define(eq=False)
class PlainLines:
    """Turns what happens into lines; remembers only when it last said how far the evaluation is."""

    _progress: Progress
    _said_at: float = attrs.field(default=float("-inf"), init=False)
    _said: str = attrs.field(default="", init=False)
    # A reason to wait that is told when it lasts: a worker that just connects is no news.
    _waits: tuple[str, float] | None = attrs.field(default=None, init=False)

    def of(self, happenings: Iterable[Happening], now: float) -> Iterator[str]:
        """The lines for `happenings`; without any, now and then how far it is."""
        for happening in happenings:
            yield from self._of(happening, now)
        yield from self._how_far(now)
        yield from self._why_it_waits(now)

    def _of(self, happening: Happening, now: float) -> Iterator[str]:
        match happening:
            case Turned(status):
                yield from self._turned(status)
            case Waits(words):
                self._waits = words, now
            case Said():
                yield from said_now(happening)
            case Moved(build, before):
                yield from _moved(build, before)

    def _turned(self, status: str) -> Iterator[str]:
        if status in _PHASES:
            yield _PHASES[status]
        elif status == "Building":
            yield to_build(self._progress)

    def _how_far(self, now: float) -> Iterator[str]:
        words = how_far(self._progress)
        if words and words != self._said and now - self._said_at >= SAY_EVERY:
            self._said_at, self._said = now, words
            yield words

    def _why_it_waits(self, now: float) -> Iterator[str]:
        if self._waits is None:
            return
        words, since = self._waits
        if words not in (self._progress.waiting, self._progress.server):
            self._waits = None
        elif now - since >= WAIT_BEFORE_SAYING:
            self._waits = None
            yield words


def to_build(progress: Progress) -> str:
    """How much there is to do, and whether all was well so far: `building 3 of 12 derivations`."""
    counters = progress.counters
    all = count(counters.named, "derivation")
    some = all if counters.active >= counters.named else f"{counters.active} of {all}"
    errors = f"; {count(progress.errors, 'error')} so far, told at the end" if progress.errors else ""
    return f"building {some}{errors}"


def how_far(progress: Progress) -> str:
    """How far the evaluation of attributes is, "" before its first one and afterwards."""
    if progress.status not in EVALUATING or not progress.attributes_done:
        return ""
    total = "" if progress.attributes_total is None else f" of {progress.attributes_total}"
    attributes = f"{progress.attributes_done}{total} attributes"
    return f"evaluating: {attributes}, {count(progress.derivations, 'derivation')}"


def said(message: Said) -> Iterator[str]:
    """A message, its further lines indented."""
    first, *rest = message.message.strip().removeprefix("error: ").splitlines() or [""]
    yield f"{message.level.lower()}: {about(message.source)}{first}"
    yield from (f"    {line}".rstrip() for line in rest)


def said_now(message: Said) -> Iterator[str]:
    """A message as it comes. An error the report at the end tells: here is only which attribute has one."""
    if message.level != "Error":
        yield from said(message)
    elif message.source.startswith(_ATTRIBUTE):
        yield f"does not evaluate: {message.source.removeprefix(_ATTRIBUTE)}"


def about(source: str) -> str:
    """The attribute that a message is about, before a colon; "" when it is about the whole evaluation."""
    return f"{source.removeprefix(_ATTRIBUTE)}: " if source not in ("", "evaluation") else ""


def failure(build: Build) -> str:
    """What a failed build is called: its name, how long it took, and why it failed."""
    took = build.took(0)
    time = "" if took is None else f" ({seconds(took)})"
    why = "timed out" if build.status is BuildStatus.FAILED_TIMEOUT else "failed"
    reason = why_failed(build.error)
    return f"{why} {build.name}{time}{': ' + reason if reason else ''}"


def _moved(build: Build, before: BuildStatus) -> Iterator[str]:
    took = build.took(0)
    time = "" if took is None else f" ({seconds(took)})"
    match build.status:
        case BuildStatus.BUILDING:
            yield f"building {build.name}{' on ' + build.worker if build.worker else ''}"
        case BuildStatus.COMPLETED:
            yield f"built {build.name}{time}"
        case BuildStatus.SUBSTITUTED:
            yield f"substituted {build.name}"
        case status if status in FAILED:
            yield failure(build)
            yield from (f"    > {line}" for line in build.tail.lines)
        case BuildStatus.DEPENDENCY_FAILED:
            yield f"not built {build.name}: {build.reason or 'a dependency failed'}"
        case BuildStatus.ABORTED:
            yield f"aborted {build.name}"
        case BuildStatus.FAILED_TRANSIENT:
            yield f"will retry {build.name}: {build.reason or build.error or 'it was interrupted'}"
        case BuildStatus.QUEUED if before is BuildStatus.BUILDING:
            yield f"queued again {build.name}"
