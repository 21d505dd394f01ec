"""An evaluation from its creation to its end: its events, in a display, over lost connections.

With `give_up_after`, an evaluation that for so long has needed a worker which is not there is aborted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import attrs
import trio

from gradient.cli.api import Api, ServerRefused
from gradient.cli.display import FRAME, Display
from gradient.cli.events import EventLines
from gradient.cli.faults import ServerUnreachable
from gradient.cli.progress import FAILED, Happening, Moved, Progress
from gradient.cli.text import TAIL_LINES, Tail
from gradient.nursery.backoff import Backoff

# The server sends a blank line at least every 10 s; this long without one, the connection is dead.
SILENCE: Final = 45.0  # seconds
# How long a server may be away, for a restart, before we stop waiting for it.
AWAY_LIMIT: Final = 60.0  # seconds
# Failed builds whose log is asked for; of others there is what came by itself.
MAX_TAILS: Final = 20


@attrs.define(eq=False)
class Follower:
    """Follows one evaluation."""

    api: Api
    evaluation: int
    progress: Progress
    display: Display
    give_up_after: float = math.inf
    # Why it was given up, if it was.
    gave_up: str | None = attrs.field(default=None, init=False)
    _tails: int = attrs.field(default=0, init=False)
    # While the server is away: since when.
    _away_since: float | None = attrs.field(default=None, init=False)

    async def run(self) -> None:
        """Return once the evaluation has ended.

        Raises ServerUnreachable when the server stays away, and what Api raises; in a group. Cancelled,
        the evaluation goes on without us."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._draw)
                await self._follow()
                nursery.cancel_scope.cancel()
        finally:
            self.display.close()

    async def _draw(self) -> None:
        while True:
            self.display.tick()
            await trio.sleep(FRAME)

    async def _follow(self) -> None:
        pause = Backoff(first=0.1, longest=5.0)
        while not self.progress.ended:
            try:
                async with self.api.events(self.evaluation) as lines:
                    await self._read(lines, pause)
            except ServerUnreachable as error:
                if self._away_for() > AWAY_LIMIT:
                    raise ServerUnreachable(
                        f"{error}; evaluation {self.evaluation} goes on once it is back"
                    ) from error
                self._tell(self.progress.away(f"does not answer, for {AWAY_LIMIT:g} s at most"))
            await trio.sleep(0 if self.progress.ended else pause.next_pause())

    def _away_for(self) -> float:
        """Seconds since the server was last heard of."""
        if self._away_since is None:
            self._away_since = trio.current_time()
        return trio.current_time() - self._away_since

    async def _read(self, lines: EventLines, pause: Backoff) -> None:
        """Take events until the end, or until a fresh look is needed."""
        while not self.progress.ended:
            event = await self._next(lines)
            if event is None or event.get("event") == "lagged":
                return
            self._away_since = None
            pause.reset()
            await self._take(event)

    async def _next(self, lines: EventLines) -> dict[str, Any] | None:
        """The next event; None after giving up, and the stream is of no more use. Raises
        ServerUnreachable after too much silence."""
        patience = self._patience()
        with trio.move_on_after(min(SILENCE, patience)):
            return await lines.next()
        if patience > SILENCE:
            raise ServerUnreachable(f"the server has sent nothing for {SILENCE:g} s")
        await self._give_up()
        return None

    def _patience(self) -> float:
        since = self.progress.needs_worker_since
        if since is None or self.gave_up is not None:
            return math.inf
        return max(0.0, since + self.give_up_after - trio.current_time())

    async def _give_up(self) -> None:
        self.gave_up = self.progress.waiting or "it waits for a worker"
        await self.api.abort(self.evaluation)

    async def _take(self, event: dict[str, Any]) -> None:
        try:
            happenings = self.progress.fold(event, trio.current_time())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefused(
                "the server's events are not understood: is it of another version?"
            ) from error
        for happening in happenings:
            await self._complete(happening)
        self._tell(happenings)

    def _tell(self, happenings: Sequence[Happening]) -> None:
        if happenings:
            self.display.happened(happenings)

    async def _complete(self, happening: Happening) -> None:
        """Get the end of a failed build's log: what came with the events is only what was written since we
        listen."""
        match happening:
            case Moved(build, _) if build.status in FAILED and self._tails < MAX_TAILS:
                self._tails += 1
                kept = Tail()
                kept.add(await self.api.log_tail(build.id, TAIL_LINES))
                if len(kept.lines) > len(build.tail.lines):
                    build.tail = kept
