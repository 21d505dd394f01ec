"""Progress as a live tree, as users of nix-output-monitor know it: what fails, runs, waits and was built.

A pure function from the state and the time to what is drawn; `display.py` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from gradient.cli.plain import how_far
from gradient.cli.progress import DONE, FAILED, NOT_TRIED, RUNNING, Build, Progress
from gradient.cli.text import seconds, why_failed
from gradient.model import BuildStatus

# Rows that are not builds: address, evaluation, two waiting reasons, "more", sums, and one to spare.
_FRAME_ROWS: Final = 7
# Builds that were just finished, so that short ones are seen at all.
RECENT: Final = 3
# A terminal of a height that is not known (0) gets a screen of the smallest usual size.
_SMALL_SCREEN: Final = 24

_RUNNING, _BUILT, _WAITING, _FAILED, _SKIPPED = "⏵", "✔", "⏸", "⚠", "⊘"
_LOG_STYLE: Final = "dim"


def draw(progress: Progress, now: float, height: int = 0) -> RenderableType:
    """The whole picture at `now` (seconds since the epoch), for a terminal of `height` rows."""
    tree = Tree(Text(progress.title, style="bold"), guide_style="dim")
    if words := how_far(progress) or _phase(progress):
        tree.add(Text(words, style="cyan"))
    rows = max(4, (height or _SMALL_SCREEN) - _FRAME_ROWS)
    hidden = _add(tree, [*_branches(progress, now)], rows)
    if hidden:
        tree.add(Text(f"… and {hidden} more", style="dim"))
    for words in filter(None, (progress.waiting, progress.server)):
        tree.add(Text(f"{_WAITING} {words}", style="yellow"))
    return Group(tree, sums(progress, now))


def _add(tree: Tree, branches: Sequence[Tree], rows: int) -> int:
    """Add what fits into `rows`; the number of those that do not."""
    for position, branch in enumerate(branches):
        size = 1 + len(branch.children)
        if size > rows:
            return len(branches) - position
        tree.children.append(branch)
        rows -= size
    return 0


def _branches(progress: Progress, now: float) -> Iterator[Tree]:
    """The builds worth a row, the most important first."""
    for build in progress.fresh(*FAILED):
        yield _failed(build)
    for build in progress.having(RUNNING):
        yield Tree(_row(_RUNNING, "yellow", build, now, _where(build), " "))
    for build in progress.having(BuildStatus.FAILED_TRANSIENT):
        yield Tree(_row(_WAITING, "yellow", build, now, build.reason or build.error or ""))
    for build in progress.fresh(*NOT_TRIED):
        yield Tree(_row(_SKIPPED, "red", build, now, build.reason or build.status.label))
    for build in progress.fresh(*DONE)[-RECENT:]:
        yield Tree(_row(_BUILT, "green", build, now, ""))


def _failed(build: Build) -> Tree:
    """A failed build with the end of its log."""
    branch = Tree(_row(_FAILED, "red", build, 0, why_failed(build.error)))
    for line in build.tail.lines:
        branch.add(Text(line, style=_LOG_STYLE, no_wrap=True, overflow="ellipsis"))
    return branch


def _row(mark: str, style: str, build: Build, now: float, remark: str, separator: str = ": ") -> Text:
    row = Text.assemble((f"{mark} ", style), (build.name, f"bold {style}"), no_wrap=True, overflow="ellipsis")
    took = build.took(now)
    if took is not None:
        row.append(f" {seconds(took)}", style="dim")
    if remark:
        row.append(f"{separator}{remark}", style="default")
    return row


def _where(build: Build) -> str:
    return f"on {build.worker}" if build.worker else ""


def _phase(progress: Progress) -> str:
    return {"Queued": "queued", "Fetching": "fetching the flake"}.get(
        progress.status, "evaluating" if progress.status.startswith("Evaluating") else ""
    )


def sums(progress: Progress, now: float) -> Text:
    """One line of totals: `∑ ⏵ 1 │ ✔ 12 │ ⏸ 30 │ ⚠ 1 │ ⊘ 4 │ 12s`; ⊘, not tried, only if there is any."""
    counters = progress.counters
    failed, not_tried = len(progress.fresh(*FAILED)), len(progress.fresh(*NOT_TRIED))
    # The server names at most a thousand builds at once; its counters know all of them.
    done = max(len(progress.having(*DONE)), counters.named - counters.active - counters.failed)
    running = len(progress.having(RUNNING))
    parts = [
        (f"{_RUNNING} {running}", "yellow" if running else "dim"),
        (f"{_BUILT} {done}", "green" if done else "dim"),
        (f"{_WAITING} {max(0, counters.active - running)}", "dim"),
        (f"{_FAILED} {failed}", "red" if failed else "dim"),
        *([(f"{_SKIPPED} {not_tried}", "red")] if not_tried else []),
        (seconds(now - progress.started), "default"),
    ]
    line = Text.assemble(("∑ ", "bold"), no_wrap=True)
    for position, part in enumerate(parts):
        line.append(" │ " if position else "", style="dim")
        line.append(*part)
    return line
