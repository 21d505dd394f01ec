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

# Entry points that were built and are listed with their outputs; scripts use --json.
MAX_LISTED: Final = 30

_BUILT: Final = frozenset({BuildStatus.COMPLETED.label, BuildStatus.SUBSTITUTED.label})
_FAILED: Final = frozenset({BuildStatus.FAILED_PERMANENT.label, BuildStatus.FAILED_TIMEOUT.label})


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

    def lines(self) -> Iterator[str]:
        """For people: what failed and what depends on it, what was built and where, and a sum."""
        yield from self._built_lines()
        yield from self._failed_lines()
        yield from self._other_lines()
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
        builds = self.snapshot["builds"]
        for build in builds:
            if build["status"] in _FAILED:
                yield f"failed {build['drv_path']}"
                yield f"  {why_failed(build['error']) or 'the build failed'}"
                yield from (f"  > {line}" for line in self.tails.get(build["build"], ()))
                for other in builds:
                    if any(cause["build"] == build["build"] for cause in other.get("causes", ())):
                        yield f"  needed by {other['drv_path']}"

    def _other_lines(self) -> Iterator[str]:
        for message in self.snapshot["messages"]:
            if message["level"] == "Error":
                said = Said("error", clean(message["source"]), clean(message["message"]))
                yield from said_lines(said)
        if self.gave_up:
            yield f"given up: {self.gave_up}"

    def _sum(self) -> str:
        points = self.snapshot["entry_points"]
        built = sum(point["status"] in _BUILT for point in points)
        return f"{self.status}: {built} of {count(len(points), 'entry point')} built"
