"""Live events of an evaluation as lines of JSON. Layer: web; docs/api.md has the shapes.

The hub says which rows changed, this reads them and sends what they are now. So a stream never sends
old news, needs no memory of what it missed, and a burst of changes costs one read.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final

import attrs
import trio
from quart import Response

from gradient.graph import build_reads, evaluation_reads
from gradient.graph.build_reads import BuildRow
from gradient.graph.failure_causes import Cause
from gradient.graph.pg import Connection
from gradient.model import EVALUATION_TERMINAL, BuildStatus
from gradient.sessions.live import LogText, News, Watch
from gradient.web.answers import NDJSON, json_text
from gradient.web.errors import NotFound
from gradient.web.routes import ID, Route
from gradient.web.site import Site
from gradient.web.snapshot import (
    build_event_json,
    causes_of,
    message_json,
    read_snapshot,
    snapshot_json,
    state_json,
)
from gradient.web.streams import Stream

# Seconds of silence before a blank line, so that nobody on the way takes the stream for dead.
HEARTBEAT: Final = 10.0
# Seconds between two reads of changed builds: faster than an eye, far slower than builds change.
PACE: Final = 0.2
# And at most one part in so many of the time is spent reading: a package set has tens of thousands.
SHARE: Final = 10
# Builds of one read.
BATCH: Final = 500


async def events(site: Site, evaluation: int) -> Response:
    """The stream of an evaluation, from its snapshot to its end."""
    async with site.readers.connection() as connection:
        if await evaluation_reads.evaluation(connection, evaluation) is None:
            raise NotFound(f"there is no evaluation {evaluation}")
    return Response(EvaluationEvents(site, evaluation), content_type=NDJSON)


@attrs.define(eq=False)
class EvaluationEvents(Stream):
    """What is sent to one watcher."""

    _site: Site
    _evaluation: int
    _watch: Watch = attrs.field(init=False)
    _lines: list[str] = attrs.field(factory=list, init=False)
    _begun: bool = attrs.field(default=False, init=False)
    _ended: bool = attrs.field(default=False, init=False)
    # What is to be read: builds that changed, and whether names or messages were added.
    _due: set[int] = attrs.field(factory=set, init=False)
    _progressed: bool = attrs.field(default=False, init=False)
    _due_at: float = attrs.field(default=0.0, init=False)
    # What was sent last, so that only changes are.
    _state: dict[str, Any] = attrs.field(factory=dict, init=False)
    _last_message: int = attrs.field(default=0, init=False)
    _decoders: dict[int, codecs.IncrementalDecoder] = attrs.field(factory=dict, init=False)

    def open(self) -> None:
        self._watch = self.held.enter_context(self._site.live.watch(self._evaluation))

    async def __anext__(self) -> bytes:
        while not self._lines:
            if self._ended:
                raise StopAsyncIteration
            await (self._next() if self._begun else self._begin())
        text = "".join(self._lines)
        self._lines.clear()
        return text.encode()

    async def _begin(self) -> None:
        """The snapshot. What changes while it is read is news afterwards."""
        self._begun = True
        async with self._site.readers.connection() as connection:
            self._watch.builds.update(await build_reads.named_builds(connection, self._evaluation))
            self._watch.take()
            snapshot = await read_snapshot(connection, self._evaluation)
        if snapshot is None:  # deleted since the answer began
            self._ended = True
            return
        self._send("snapshot", snapshot_json(snapshot))
        self._state = state_json(snapshot.evaluation)
        self._last_message = max((message.id for message in snapshot.messages), default=0)
        if self._site.live.stopping:
            self._send("stopping")
        self._end_if_over(snapshot.evaluation)

    async def _next(self) -> None:
        """Wait for news, no longer than until a read is due, and send what it is."""
        with trio.move_on_after(self._patience()) as scope:
            await self._watch.wait()
        if self._watch.closed:
            self._ended = True
            return
        news = self._watch.take()
        self._due |= news.builds
        self._progressed |= news.progressed
        self._send_at_once(news)
        if news.evaluation or (self._has_due() and trio.current_time() >= self._due_at):
            await self._read(last=news.evaluation)
        elif scope.cancelled_caught:
            self._lines.append("\n")

    def _patience(self) -> float:
        if not self._has_due():
            return HEARTBEAT
        return max(0.0, self._due_at - trio.current_time())

    def _has_due(self) -> bool:
        return bool(self._due) or self._progressed

    def _send_at_once(self, news: News) -> None:
        """What needs no reading."""
        if news.lagged:
            self._send("lagged")
        if news.stopping:
            self._send("stopping")
        if news.progress is not None:
            self._send("progress", attrs.asdict(news.progress))
        for text in news.log:
            self._send_log(text)

    async def _read(self, *, last: bool) -> None:
        """Read what is due and send it. `last`: the evaluation moved, and if it has ended, everything that
        moved with it is among what is due."""
        began = trio.current_time()
        async with self._site.readers.connection() as connection:
            # Before the builds: they are then at least as new as the verdict.
            row = await evaluation_reads.evaluation(connection, self._evaluation)
            if self._progressed:
                await self._read_progress(connection)
            # A phase comes before what happens in it, a verdict after all it is about.
            if row is not None and row.status not in EVALUATION_TERMINAL:
                self._send_state(row)
            await self._read_builds(connection)
        now = trio.current_time()
        self._due_at = now + max(PACE, (now - began) * SHARE)
        if row is None:
            self._ended = True
            return
        self._send_state(row)
        if last:
            self._end_if_over(row)

    def _send_state(self, row: evaluation_reads.EvaluationRow) -> None:
        if (state := state_json(row)) != self._state:
            self._state = state
            self._send("evaluation", state)

    async def _read_progress(self, connection: Connection) -> None:
        """Builds named since, of which those that have moved are worth an event; and new messages."""
        named = await build_reads.named_builds(connection, self._evaluation)
        self._due |= {build for build, moved in named.items() if moved and build not in self._watch.builds}
        self._watch.builds.update(named)
        messages = await evaluation_reads.messages(connection, self._evaluation, self._last_message)
        for message in messages:
            self._send("message", message_json(message))
            self._last_message = message.id
        self._progressed = len(messages) == evaluation_reads.MAX_MESSAGES

    async def _read_builds(self, connection: Connection) -> None:
        """Whoever prints this tells it in the order in which it happened, and causes first."""
        moved: list[tuple[BuildRow, Sequence[Cause]]] = []
        while batch := list(islice(self._due, BATCH)):
            rows = await build_reads.builds(connection, batch)
            causes = await causes_of(connection, rows)
            moved += [(row, causes.get(row.build, ())) for row in rows]
            self._due.difference_update(batch)
        for row, why in sorted(moved, key=lambda one: _when(one[0])):
            self._send("build", build_event_json(row, why))

    def _end_if_over(self, row: evaluation_reads.EvaluationRow) -> None:
        if row.status in EVALUATION_TERMINAL:
            self._send("end", {"status": row.status.label})
            self._ended = True

    def _send_log(self, text: LogText) -> None:
        decoder = self._decoders.get(text.build)
        if decoder is None:
            # A character may be cut in two by the pieces of the log.
            decoder = self._decoders[text.build] = codecs.getincrementaldecoder("utf-8")("replace")
        self._send("log", {"build": text.build, "text": decoder.decode(text.data)})

    def _send(self, event: str, value: dict[str, Any] | None = None) -> None:
        self._lines.append(json_text({"event": event, **(value or {})}) + "\n")


def _when(row: BuildRow) -> tuple[bool, datetime, int]:
    return row.status is BuildStatus.DEPENDENCY_FAILED, row.updated_at, row.build


ROUTES: Final = (Route("GET", f"/api/v1/evaluations/<{ID}:evaluation>/events", events),)
