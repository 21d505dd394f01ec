"""Shows progress on stderr: a live tree on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Final, Protocol

import attrs
from rich.console import Console
from rich.live import Live

from gradient.cli.plain import PlainLines, said_now
from gradient.cli.progress import Happening, Progress, Said
from gradient.cli.tree import draw, sums

# Smooth for an eye that reads tenths of a second; one drawing takes some milliseconds.
FRAME: Final = 0.2  # seconds


class Display(Protocol):
    """Something that shows an evaluation. Its methods never wait."""

    def happened(self, happenings: Sequence[Happening]) -> None:
        """The progress has moved by these."""

    def tick(self) -> None:
        """Time has passed; called every FRAME."""

    def close(self) -> None:
        """The last look; nothing is called after it."""


def display_of(progress: Progress) -> Display:
    """The display that fits to what stderr is."""
    console = Console(stderr=True, highlight=False)
    return TreeDisplay(progress, console) if console.is_terminal else LineDisplay(progress)


@attrs.define(eq=False)
class LineDisplay:
    """A line for each thing that happens."""

    _progress: Progress
    _lines: PlainLines = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._lines = PlainLines(self._progress)

    def happened(self, happenings: Sequence[Happening]) -> None:
        """Print their lines."""
        for line in self._lines.of(happenings, time.time()):
            print(line, file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Now and then, how far the evaluation is."""
        self.happened(())

    def close(self) -> None:
        """Everything is said."""


@attrs.define(eq=False)
class TreeDisplay:
    """A tree that is drawn again and again in place; messages are printed above it. In the end its sums
    stay on the screen: what failed is told again by the report."""

    _progress: Progress
    _console: Console
    _live: Live = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # Drawn by our own ticks: rich would use a thread, which trio's tasks do not wait for.
        self._live = Live(
            console=self._console, auto_refresh=False, vertical_overflow="ellipsis", transient=True
        )
        self._live.start()

    def happened(self, happenings: Sequence[Happening]) -> None:
        """Print messages; everything else is in the picture."""
        for happening in happenings:
            if isinstance(happening, Said):
                for line in said_now(happening):
                    self._console.print(line, markup=False)

    def tick(self) -> None:
        """Draw it as it is now."""
        picture = draw(self._progress, time.time(), self._console.height)
        self._live.update(picture, refresh=True)

    def close(self) -> None:
        """Take the tree away."""
        self._live.stop()
        self._console.print(sums(self._progress, time.time()))
