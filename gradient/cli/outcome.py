"""What became of an evaluation: the exit code, the object of --json, and the lines at the end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from gradient.cli.faults import Exit
from gradient.cli.plain import said as said_lines
from gradient.cli.progress import Said
from gradient.cli.text import clean, count, why_failed
from gradient.model import BuildStatus

# Entry points that are listed, of those that were built and of the others; scripts use --json.
MAX_LISTED: Final = 30
# Dependents of one failed derivation that are listed.
MAX_DEPENDENTS: Final = 10

_BUILT: Final = frozenset({BuildStatus.COMPLETED.label, BuildStatus.SUBSTITUTED.label})
_FAILED: Final = frozenset({BuildStatus.FAILED_PERMANENT.label, BuildStatus.FAILED_TIMEOUT.label})

_EVAL_FAILED: Final = "EvalFailed"  # of the API: an entry point without a build


@attrs.frozen
class Outcome:
    """The end of an evaluation, from its last snapshot. `gave_up`: why we aborted it, if we did; `tails`:
    the last log lines of builds, as far as they came by."""

    snapshot: dict[str, Any]
    gave_up: str | None = None
    tails: Mapping[int, Sequence[str]] = attrs.field(factory=dict)

    @property
    def status(self) -> str:
        """Completed, Failed or Aborted."""
        return str(self.snapshot["status"])

    @property
    def exit(self) -> Exit:
        """0 when everything was built."""
        return Exit.BUILT if self.status == "Completed" else Exit.FAILED

    @property
    def entry_points(self) -> list[dict[str, Any]]:
        """The entry points as --json lists them."""
        names = ("attr", "status", "drv_path", "outputs")
        return [{name: point[name] for name in names} for point in self.snapshot["entry_points"]]

    @property
    def errors(self) -> list[dict[str, str]]:
        """Everything that went wrong: in the evaluation, in builds, in waiting."""
        return [*self._errors()]

    def _errors(self) -> Iterator[dict[str, str]]:
        for message in self.snapshot["messages"]:
            if message["level"] == "Error":
                yield {"source": message["source"], "message": message["message"]}
        for build in self.snapshot["builds"]:
            if build["status"] in _FAILED:
                yield {"source": build["drv_path"], "message": build["error"] or "the build failed"}
        if self.gave_up:
            yield {"source": "waiting", "message": self.gave_up}

    @property
    def first_failed(self) -> str | None:
        """The name of the first derivation that failed: what `gradient log` takes."""
        failed = (build["name"] for build in self.snapshot["builds"] if build["status"] in _FAILED)
        return next(map(clean, failed), None)

    def lines(self) -> Iterator[str]:
        """For people: what was built and where, what failed, what is missing because of it, and a sum."""
        yield from self._built_lines()
        yield from self._failed_lines()
        yield from self._other_lines()
        yield from self._missing_lines()
        yield self._sum()

    def _built_lines(self) -> Iterator[str]:
        built = [point for point in self.snapshot["entry_points"] if point["status"] in _BUILT]
        for point in built[:MAX_LISTED]:
            yield f"built {clean(point['attr'])}"
            for name, path in sorted(point["outputs"].items(), key=lambda pair: pair[0] != "out"):
                yield f"  {path}{'' if name == 'out' else f' ({name})'}"
        if len(built) > MAX_LISTED:
            yield f"built {len(built) - MAX_LISTED} more"

    def _failed_lines(self) -> Iterator[str]:
        """Each failed derivation, the end of its log, and the builds that were not tried because of it."""
        for build in self.snapshot["builds"]:
            if build["status"] in _FAILED:
                yield f"failed {build['drv_path']}"
                yield f"  {why_failed(build['error']) or 'the build failed'}"
                yield from (f"  > {line}" for line in self.tails.get(build["build"], ()))
                yield from _needed_by(self._dependents(build["build"]))

    def _dependents(self, failed: int) -> list[str]:
        """The derivations that were not tried because this build failed."""
        return [
            str(other["drv_path"])
            for other in self.snapshot["builds"]
            if any(cause["build"] == failed for cause in other.get("causes", ()))
        ]

    def _other_lines(self) -> Iterator[str]:
        for message in self.snapshot["messages"]:
            if message["level"] == "Error":
                said = Said("error", clean(message["source"]), clean(message["message"]))
                yield from said_lines(said)
        if self.gave_up:
            yield f"given up: {self.gave_up}"

    def _missing_lines(self) -> Iterator[str]:
        """The entry points that were not built, and why: last, where they are seen."""
        builds = {build["build"]: build for build in self.snapshot["builds"]}
        missing = [point for point in self.snapshot["entry_points"] if point["status"] not in _BUILT]
        for point in missing[:MAX_LISTED]:
            yield f"not built {clean(point['attr'])}: {_why_missing(point, builds.get(point['build'], {}))}"
        if len(missing) > MAX_LISTED:
            yield f"not built: {len(missing) - MAX_LISTED} more"

    def _sum(self) -> str:
        points = self.snapshot["entry_points"]
        if not points:
            return f"{self.status}: nothing to build"
        built = sum(point["status"] in _BUILT for point in points)
        return f"{self.status}: {built} of {count(len(points), 'entry point')} built"


def _needed_by(dependents: Sequence[str]) -> Iterator[str]:
    yield from (f"  needed by {path}" for path in dependents[:MAX_DEPENDENTS])
    if len(dependents) > MAX_DEPENDENTS:
        yield f"  needed by {len(dependents) - MAX_DEPENDENTS} more"


def _why_missing(point: Mapping[str, Any], build: Mapping[str, Any]) -> str:
    """Why an entry point was not built, given its build ({} when there is none, or none is shown)."""
    if point["status"] == _EVAL_FAILED:
        return "it does not evaluate"
    if point["status"] in _FAILED:
        return why_failed(build.get("error")) or "it failed"
    return clean(build.get("reason") or "") or str(point["status"]).lower()
