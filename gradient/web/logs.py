"""Build logs as they are sent: whole, their end, or followed while they grow. Layer: web."""

from __future__ import annotations

from typing import Final

import attrs
import trio
from quart import Response, request

from gradient.graph import build_reads, log_reads
from gradient.graph.pg_pool import Pool
from gradient.model import BUILDER_STATUSES
from gradient.sessions.live import LiveHub, Watch
from gradient.web.answers import TEXT
from gradient.web.errors import BadRequest, NotFound
from gradient.web.routes import ID, Route
from gradient.web.site import Site
from gradient.web.streams import Stream

# Seconds after which a followed log is looked at without having heard of it: log text is announced
# before it is stored, so the look that the announcement caused may have come too early.
LOOK: Final = 1.0
MAX_TAIL: Final = 10_000  # lines
MAX_TAIL_BYTES: Final = 4 * 2**20


async def build_log(site: Site, build: int) -> Response:
    """The newest log of a build; `tail=N` its last lines only, `follow=1` also what is still to come."""
    follow = request.args.get("follow") == "1"
    tail = _tail(request.args.get("tail"))
    async with site.readers.connection() as connection:
        if not await build_reads.builds(connection, [build]):
            raise NotFound(f"there is no build {build}")
        log = await log_reads.newest_log(connection, build, or_running=follow)
        if log is None and not follow:
            raise NotFound(f"build {build} has no log")
        begin, after = b"", -1
        if log is not None and tail is not None:
            begin, after = await log_reads.log_tail(connection, log.attempt, tail, MAX_TAIL_BYTES)
    attempt = None if log is None else log.attempt
    body: LogBody
    if follow:
        body = FollowedLog(site.readers, attempt, begin, after, live=site.live, build=build)
    else:
        body = LogBody(site.readers, attempt, begin, after)
    return Response(body, content_type=TEXT)


def _tail(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= MAX_TAIL):
        raise BadRequest(f"`tail` is a number of lines from 1 to {MAX_TAIL}")
    return int(text)


@attrs.define(eq=False)
class LogBody(Stream):
    """What is stored of an attempt's log, page by page: `_begin`, then the rows after `_after`."""

    _readers: Pool
    _attempt: int | None
    _begin: bytes = b""
    _after: int = -1

    async def __anext__(self) -> bytes:
        begin, self._begin = self._begin, b""
        if data := begin or await self._next_page():
            return data
        raise StopAsyncIteration

    async def _next_page(self) -> bytes:
        if self._attempt is None:
            return b""
        async with self._readers.connection() as connection:
            chunks = await log_reads.log_chunks(connection, self._attempt, self._after)
        if chunks:
            self._after = chunks[-1].index
        return b"".join(chunk.data for chunk in chunks)


@attrs.define(eq=False)
class FollowedLog(LogBody):
    """The same until the attempt ends; before there is an attempt, it waits for one.

    What it sends is always read from the database: an announcement only says when to look.
    """

    _live: LiveHub = attrs.field(kw_only=True)
    _build: int = attrs.field(kw_only=True)
    _watch: Watch = attrs.field(init=False)

    def open(self) -> None:
        self._watch = self.held.enter_context(self._live.watch(builds={self._build}))

    async def __anext__(self) -> bytes:
        while True:
            # Asked before reading: all rows of an attempt are there before it ends.
            ended = self._watch.closed or not await self._may_grow()
            begin, self._begin = self._begin, b""
            if data := begin or await self._next_page():
                return data
            if ended:
                raise StopAsyncIteration
            with trio.move_on_after(LOOK):
                await self._watch.wait()
            self._watch.take()

    async def _may_grow(self) -> bool:
        async with self._readers.connection() as connection:
            if self._attempt is None:
                log = await log_reads.newest_log(connection, self._build, or_running=True)
                if log is None:
                    rows = await build_reads.builds(connection, [self._build])
                    return bool(rows) and rows[0].status in BUILDER_STATUSES
                self._attempt = log.attempt
            return await log_reads.attempt_runs(connection, self._attempt)


ROUTES: Final = (Route("GET", f"/api/v1/builds/<{ID}:build>/log", build_log),)
