"""Live events: what changed, told to whoever watches. Layer: sessions, in memory.

Publishing is synchronous and never waits: the graph writer calls it after each commit, and a reader that
waits for the writer must not be waited for. So a watcher is not sent events; it keeps what is new for
it - which builds changed, not how often - and its reader takes that when it gets to it. Only log text
can pile up: beyond a limit it is dropped and the reader is told that it lags.

The hub knows no database: a watcher says which builds it wants to hear of, and reads the rest itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from gradient.graph.moves import Moves

# Log text that waits for a slow reader: some seconds of a noisy build.
MAX_PENDING_LOG: Final = 256 * 1024  # bytes


@attrs.frozen
class Progress:
    """How far a flake job is; `attributes_total` None while attributes are still being discovered."""

    attributes_done: int
    attributes_total: int | None
    derivations: int


@attrs.frozen
class LogText:
    """A piece of a build's log, as the builder wrote it."""

    build: int
    data: bytes


@attrs.frozen
class News:
    """What became new since the last time: read the rows it names."""

    evaluation: bool = False  # its status or waiting reason moved
    progressed: bool = False  # names, messages or entry points were added
    builds: frozenset[int] = frozenset()
    log: tuple[LogText, ...] = ()
    progress: Progress | None = None
    lagged: bool = False  # log text was dropped
    stopping: bool = False  # the server begins to stop


@attrs.define(eq=False)
class Watch:
    """One watcher, read by one task. `builds` is the reader's: it adds the builds it wants to hear of."""

    evaluation: int | None
    builds: set[int]
    # The hub has closed: no news will come.
    closed: bool = False
    _evaluation_moved: bool = False
    _progressed: bool = False
    _changed: set[int] = attrs.field(factory=set)
    _log: list[LogText] = attrs.field(factory=list)
    _log_size: int = 0
    _progress: Progress | None = None
    _lagged: bool = False
    _stopping: bool = False
    _stirred: trio.Event = attrs.field(factory=trio.Event)

    async def wait(self) -> None:
        """Return when there is news, or the hub has closed."""
        await self._stirred.wait()

    def take(self) -> News:
        """What is new since the last call; a snapshot read after it misses nothing."""
        news = News(
            self._evaluation_moved,
            self._progressed,
            frozenset(self._changed),
            tuple(self._log),
            self._progress,
            self._lagged,
            self._stopping,
        )
        self._evaluation_moved = self._progressed = self._lagged = self._stopping = False
        self._progress, self._log_size = None, 0
        self._changed.clear()
        self._log.clear()
        if not self.closed:
            self._stirred = trio.Event()
        return news

    def _see(self, moves: Moves) -> None:
        if self.evaluation is not None:
            self._evaluation_moved |= self.evaluation in moves.evaluations
            self._progressed |= self.evaluation in moves.progressed
        changed = self.builds.intersection(moves.builds)
        self._changed |= changed
        if changed or self._evaluation_moved or self._progressed:
            self._stirred.set()

    def _see_log(self, text: LogText) -> None:
        if text.build not in self.builds:
            return
        if self._log_size + len(text.data) > MAX_PENDING_LOG:
            self._lagged = True
        else:
            self._log.append(text)
            self._log_size += len(text.data)
        self._stirred.set()

    def _see_progress(self, progress: Progress) -> None:
        self._progress = progress
        self._stirred.set()

    def _see_stop(self) -> None:
        self._stopping = True
        self._stirred.set()

    def _close(self) -> None:
        self.closed = True
        self._stirred.set()


@attrs.define(eq=False)
class LiveHub:
    """Everybody who watches. No method waits."""

    _watches: set[Watch] = attrs.field(factory=set, init=False)
    _stopping: bool = attrs.field(default=False, init=False)
    _closed: bool = attrs.field(default=False, init=False)

    @property
    def stopping(self) -> bool:
        """The server begins to stop."""
        return self._stopping

    @property
    def closed(self) -> bool:
        """The server stops: streams end."""
        return self._closed

    def publish(self, moves: Moves) -> None:
        """What a transaction moved; called after its commit."""
        for watch in self._watches:
            watch._see(moves)

    def publish_log(self, build: int, data: bytes) -> None:
        """A piece of a build's log."""
        for watch in self._watches:
            watch._see_log(LogText(build, data))

    def publish_progress(self, evaluation: int, progress: Progress) -> None:
        """How far the flake job of an evaluation is."""
        for watch in self._watches:
            if watch.evaluation == evaluation:
                watch._see_progress(progress)

    @contextmanager
    def watch(self, evaluation: int | None = None, builds: set[int] | None = None) -> Iterator[Watch]:
        """Watch an evaluation, builds, or both, from now on. Open it before reading the first snapshot."""
        watch = Watch(evaluation, set() if builds is None else builds)
        self._watches.add(watch)
        if self._closed:
            watch._close()
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def stop(self) -> None:
        """The server hands out nothing more."""
        self._stopping = True
        for watch in self._watches:
            watch._see_stop()

    def close(self) -> None:
        """End every watch, also those to come: the first phase of stopping HTTP."""
        self._closed = True
        for watch in self._watches:
            watch._close()
