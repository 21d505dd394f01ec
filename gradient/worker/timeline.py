"""The phases of a job and how long each took. Layer: worker, pure but for the clock of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from gradient.model import Span

# What the Job Board can draw, and the database should keep of one job.
MAX_SPANS: Final = 2000


@attrs.define
class Counted:
    """What a phase moved, filled in by whoever runs it."""

    paths: int = 0
    bytes: int = 0


class Timeline:
    """Spans of one job, in milliseconds since it began."""

    def __init__(self) -> None:
        self._began = trio.current_time()
        self._spans: list[Span] = []

    @property
    def elapsed_ms(self) -> int:
        """How long the job has run."""
        return round((trio.current_time() - self._began) * 1000)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The phases that have ended, in the order of their ends."""
        return tuple(self._spans)

    @contextmanager
    def span(self, phase: str) -> Iterator[Counted]:
        """Record the block as one phase, also when it fails or is cancelled."""
        counted, start = Counted(), self.elapsed_ms
        try:
            yield counted
        finally:
            if len(self._spans) < MAX_SPANS:
                self._spans.append(
                    Span(phase, start, self.elapsed_ms, paths=counted.paths, bytes=counted.bytes)
                )
