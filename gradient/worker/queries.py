"""Questions to the server and their answers, matched by id. Layer: worker; no sockets.

The answers come through the session's reader, which hands them over without waiting. At most four
questions of at most a thousand paths are under way: one of 37,000 would hold up everything behind it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar
from urllib.parse import urljoin

import attrs
import structlog
import trio

from gradient.model import FailureKind
from gradient.wire.codec import Message
from gradient.wire.messages import (
    CachedPathInfo,
    CacheError,
    CacheQuery,
    CacheStatus,
    ImportRequest,
    ImportResult,
    KnownDerivations,
    QueryKnownDerivations,
    QueryMode,
    UploadGrant,
)
from gradient.worker.errors import JobFault

MAX_PATHS: Final = 1000  # of one question
MAX_IN_FLIGHT: Final = 4
# The server gives itself 45 s for an answer; half a minute more is for the way there and back.
ANSWER_LIMIT: Final = 75.0  # seconds
# A server that says "unknown" has trouble with its database or its object store: seconds, or for long.
TRIES: Final = 4
# A grant is not used that runs out sooner than a small upload may take.
GRANT_MARGIN: Final = 300.0  # seconds
FIRST_PAUSE: Final = 0.5  # seconds

log = structlog.get_logger(__name__)

Send: TypeAlias = Callable[[Message], Awaitable[None]]
Answer: TypeAlias = CacheStatus | CacheError | KnownDerivations | ImportResult
Addressed = TypeVar("Addressed", CachedPathInfo, UploadGrant)


@attrs.frozen
class CacheAnswer:
    """What the cache says of the paths asked about; `grant` belongs to mode Push."""

    paths: Mapping[str, CachedPathInfo]
    grant: UploadGrant | None

    def holds(self, path: str) -> bool:
        """Whether the cache has `path`. A path the server left out counts as missing."""
        info = self.paths.get(path)
        return info is not None and info.cached


@attrs.define(eq=False)
class _Waiting:
    """A question under way."""

    told: trio.Event = attrs.field(factory=trio.Event)
    answer: Answer | None = None


class Queries:
    """The questions of one session. `send` is its link's; addresses in answers may be relative to
    `base_url`, the server's."""

    def __init__(self, send: Send, base_url: str) -> None:
        self._send = send
        self._base_url = base_url
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._permits = trio.Semaphore(MAX_IN_FLIGHT)
        # What the newest answer lets us upload with.
        self._grant: UploadGrant | None = None

    def answered(self, answer: Answer) -> None:
        """Take an answer from the reader. One that nobody waits for any more is dropped."""
        number = answer.request_id if isinstance(answer, ImportResult) else answer.query_id
        if waiting := self._waiting.get(number):
            waiting.answer = answer
            waiting.told.set()

    async def cache(self, job_id: str, paths: Collection[str], mode: QueryMode) -> CacheAnswer:
        """Ask the cache about `paths`. Raises JobFault (Transient) when its state stays unknown."""
        pages = _pages(tuple(paths))
        answers: list[CacheStatus] = []
        if len(pages) == 1:
            answers.append(await self._cache_page(job_id, pages[0], mode))
        else:
            async with trio.open_nursery() as nursery:
                for page in pages:
                    nursery.start_soon(self._collect, answers, job_id, page, mode)
        infos = {info.path: self._absolute(info) for answer in answers for info in answer.cached}
        grant = next((self._absolute(answer.upload) for answer in answers if answer.upload), None)
        self._grant = grant or self._grant
        return CacheAnswer(infos, grant)

    def usable_grant(self) -> UploadGrant | None:
        """The newest grant, if it is good for some minutes more by our clock. Where clocks differ the server
        refuses it, and a try with a fresh one follows."""
        grant = self._grant
        return grant if grant is not None and grant.expires - time.time() > GRANT_MARGIN else None

    async def known(self, job_id: str, drv_paths: Sequence[str]) -> frozenset[str]:
        """Those of at most MAX_PATHS derivations whose closure the graph has completely.

        A question that failed makes none known: that only costs walking them again."""
        with trio.move_on_after(ANSWER_LIMIT):
            answer = await self._ask(
                lambda number: QueryKnownDerivations(job_id, number, tuple(drv_paths)), self._permits
            )
            if isinstance(answer, KnownDerivations):
                return frozenset(answer.known)
        log.info("known derivations not told: all of them are walked", job=job_id)
        return frozenset()

    async def import_built(self, job_id: str, assignment_id: int, drv_paths: Sequence[str]) -> ImportResult:
        """Have derivations built for a running evaluation; waits as long as that takes."""
        answer = await self._ask(
            lambda number: ImportRequest(job_id, assignment_id, number, tuple(drv_paths)), None
        )
        assert isinstance(answer, ImportResult)
        return answer

    def _absolute(self, answer: Addressed) -> Addressed:
        if answer.url is None:
            return answer
        return attrs.evolve(answer, url=urljoin(self._base_url, answer.url))

    async def _collect(
        self, answers: list[CacheStatus], job_id: str, page: tuple[str, ...], mode: QueryMode
    ) -> None:
        answers.append(await self._cache_page(job_id, page, mode))

    async def _cache_page(self, job_id: str, page: tuple[str, ...], mode: QueryMode) -> CacheStatus:
        pause, reason = FIRST_PAUSE, f"it did not answer within {ANSWER_LIMIT:g} s"
        for attempt in range(TRIES):
            if attempt:
                await trio.sleep(pause)
                pause *= 2
            with trio.move_on_after(ANSWER_LIMIT):
                answer = await self._ask(lambda number: CacheQuery(job_id, number, page, mode), self._permits)
                if isinstance(answer, CacheStatus):
                    return answer
                reason = answer.message if isinstance(answer, CacheError) else "its answer was another's"
        raise JobFault(FailureKind.TRANSIENT, f"the server cannot tell what its cache holds: {reason}")

    async def _ask(self, make: Callable[[int], Message], permits: trio.Semaphore | None) -> Answer:
        if permits is not None:
            async with permits:
                return await self._ask(make, None)
        number = next(self._ids)
        waiting = self._waiting[number] = _Waiting()
        try:
            await self._send(make(number))
            await waiting.told.wait()
        finally:
            del self._waiting[number]
        assert waiting.answer is not None
        return waiting.answer


def _pages(paths: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [paths[start : start + MAX_PATHS] for start in range(0, len(paths), MAX_PATHS)]
