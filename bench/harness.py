"""How a metric is measured: alternating pairs of our run and the baseline's, and the median of their ratios.

Pairs rather than two series: whatever else the machine does in that moment slows both sides. What has no
other side is a `Figure`: it measures itself, against a number.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

import attrs

PAIRS: Final = 5

# One run of one side, everything fresh that must be; returns the seconds that count.
Run: TypeAlias = Callable[[], float]


@attrs.frozen
class Sides:
    """What is compared. `baseline` is the exact command that `theirs` runs."""

    ours: Run
    theirs: Run
    baseline: str


@attrs.frozen
class Metric:
    """A metric. `prepare` gets an empty folder, and cleans up what lies outside it."""

    name: str
    prepare: Callable[[Path], AbstractContextManager[Sides]]
    pairs: int = PAIRS


@attrs.frozen
class Options:
    """What the command line says: a graph to measure with, and whether to measure at full scale too."""

    graph: Path | None = None
    scale: bool = False


@attrs.frozen
class Result:
    """A measured metric: medians in seconds, and the median of the pairs' ratios, ours over theirs.

    A figure has whatever unit it says, and a baseline only if it is compared with one. `limit` is what it
    must keep, in words, and `kept` whether it does.
    """

    metric: str
    value: float
    unit: str
    baseline: str | None = None
    baseline_value: float | None = None
    ratio: float | None = None
    limit: str | None = None
    kept: bool | None = None
    details: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Figure:
    """A metric that measures itself. `run` gets an empty folder."""

    name: str
    run: Callable[[str, Path, Options], Result]
    # Takes minutes: only with --scale.
    scale: bool = False

    def result(self, folder: Path, options: Options) -> Result:
        """Measure it."""
        return self.run(self.name, folder, options)


def measure(metric: Metric, folder: Path) -> Result:
    """Run the metric's pairs, after one that does not count: it fills caches on both sides."""
    with metric.prepare(folder) as sides:
        _pair(sides, ours_first=True)
        pairs = [_pair(sides, ours_first=bool(number % 2)) for number in range(metric.pairs)]
    return Result(
        metric=metric.name,
        value=round(median(ours for ours, _ in pairs), 4),
        unit="s",
        baseline=sides.baseline,
        baseline_value=round(median(theirs for _, theirs in pairs), 4),
        ratio=round(median(ours / theirs for ours, theirs in pairs), 3),
    )


def say(what: str) -> None:
    """What is being done now, for who waits for the figures."""
    print(f"# {what}", file=sys.stderr, flush=True)


def timed(action: Callable[[], object]) -> float:
    """The seconds `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _pair(sides: Sides, *, ours_first: bool) -> tuple[float, float]:
    if ours_first:
        ours = sides.ours()
        return ours, sides.theirs()
    theirs = sides.theirs()
    return sides.ours(), theirs
