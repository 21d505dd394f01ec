"""The order in which derivations are read, and the batches they are published in. Layer: worker, pure.

The walk is a stack: what was found last is read first. So it goes down before it goes on, the leaves of
the first entry points come early, and their builds can start while the rest still evaluates. A parent is
always read before what is only below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import attrs

from gradient.model import DiscoveredDerivation, EntryPoint

# Seed "Jobs", Walk: derivations of one wave, and of one EvalResult.
WAVE: Final = 256
BATCH: Final = 50
# A record is smaller than its file, and a message holds 8 MiB.
BATCH_BYTES: Final = 4 * 2**20  # of `.drv` files


class Walk:
    """Which derivations are still to be read. Each is handed out once."""

    def __init__(self) -> None:
        # May name one several times: where it was found last counts.
        self._stack: list[str] = []
        self._done: set[str] = set()

    @property
    def idle(self) -> bool:
        """Whether everything found so far was handed out."""
        while self._stack and self._stack[-1] in self._done:
            self._stack.pop()
        return not self._stack

    def found(self, drv_paths: Iterable[str]) -> None:
        """Derivations that something refers to, in any order and however often."""
        self._stack.extend(path for path in drv_paths if path not in self._done)

    def again(self, drv_path: str) -> None:
        """Hand this one out once more, next."""
        self._done.discard(drv_path)
        self._stack.append(drv_path)

    def next_wave(self, limit: int = WAVE) -> list[str]:
        """The derivations to read now, newest first; empty when idle."""
        wave: list[str] = []
        while len(wave) < limit and not self.idle:
            path = self._stack.pop()
            self._done.add(path)
            wave.append(path)
        return wave


@attrs.frozen
class Read:
    """A derivation that was read: its record, and its file as it goes into the cache."""

    record: DiscoveredDerivation
    data: bytes = attrs.field(repr=False)


@attrs.frozen
class Batch:
    """What one EvalResult carries."""

    derivations: tuple[Read, ...] = ()
    entry_points: tuple[EntryPoint, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.derivations or self.entry_points)


class Batcher:
    """Collects what was read into batches, in the order of the walk.

    An entry point goes with its root derivation; when that one was published before or is known to the
    graph, with whatever comes next."""

    def __init__(self, size: int = BATCH, max_bytes: int = BATCH_BYTES) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._bytes = 0
        self._derivations: list[Read] = []
        self._entry_points: list[EntryPoint] = []
        # Entry points whose root was not read yet, by its path.
        self._waiting: defaultdict[str, list[EntryPoint]] = defaultdict(list)
        # Roots that need no reading any more.
        self._settled: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether a flush would give nothing."""
        return not self._derivations and not self._entry_points

    def enter(self, entry_point: EntryPoint) -> None:
        """An attribute was evaluated."""
        if entry_point.drv_path in self._settled:
            self._entry_points.append(entry_point)
        else:
            self._waiting[entry_point.drv_path].append(entry_point)

    def give_up(self, drv_path: str) -> list[EntryPoint]:
        """The root cannot be read: the entry points that wait for it."""
        return self._waiting.pop(drv_path, [])

    def known(self, drv_path: str) -> None:
        """The graph has this one already."""
        self._settle(drv_path)

    def read(self, derivation: Read) -> Batch | None:
        """Add a derivation; the batch that it completes, if it does."""
        self._derivations.append(derivation)
        self._bytes += len(derivation.data)
        self._settle(derivation.record.drv_path)
        full = len(self._derivations) >= self._size or self._bytes >= self._max_bytes
        return self.flush() if full else None

    def flush(self) -> Batch:
        """What was collected; empty when nothing was."""
        batch = Batch(tuple(self._derivations), tuple(self._entry_points))
        self._derivations.clear()
        self._entry_points.clear()
        self._bytes = 0
        return batch

    def _settle(self, drv_path: str) -> None:
        self._settled.add(drv_path)
        self._entry_points += self._waiting.pop(drv_path, ())
