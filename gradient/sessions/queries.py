"""Answers to what workers ask about the cache and the graph. Layer: sessions.

Each answer runs as a task beside the reader. A question that cannot be answered is answered so:
`CacheError` means "unknown", and no worker may read it as "missing".
Source: docs/protocol.md; seed "Jobs", Evaluate.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final

import attrs
import structlog
import trio

from gradient.graph.cache_reads import ServedPath, held_paths, served_paths
from gradient.graph.pg_pool import Pool
from gradient.graph.promises import promised_derivations, promised_paths
from gradient.graph.transaction import Submit
from gradient.graph.writer import UNRECORDED
from gradient.nar.grants import Grants
from gradient.nar.narinfo import nar_url
from gradient.nix.store_path import InvalidStorePath, StorePath
from gradient.wire.messages import (
    CachedPathInfo,
    CacheError,
    CacheQuery,
    CacheStatus,
    KnownDerivations,
    QueryKnownDerivations,
    QueryMode,
    UploadGrant,
)

# Paths one question may name.
MAX_PATHS: Final = 1000
# Seconds the server may take for an answer; the worker waits longer than that.
ANSWER_LIMIT: Final = 45.0
# What keeps an answer from being given: the worker is told that the state is unknown.
UNANSWERED: Final[tuple[type[Exception], ...]] = (*UNRECORDED, trio.TooSlowError, InvalidStorePath)
UPLOAD_SCOPE: Final = "upload"

log = structlog.get_logger()


@attrs.frozen
class CacheSide:
    """What the answers need of the server: its URLs, its cache, its grants, the time."""

    cache: int
    cache_url: str
    upload_url: str
    grants: Grants
    grant_secs: int
    clock: Callable[[], datetime]


@attrs.define(eq=False)
class Queries:
    """Answers for one worker. What one says is held or known is kept for it (graph/promises.py)."""

    readers: Pool
    submit: Submit
    side: CacheSide
    worker: str

    async def cache(self, query: CacheQuery) -> CacheStatus | CacheError:
        """Which paths the cache holds; how to fetch them (Pull), or leave to upload the others (Push)."""
        if len(query.paths) > MAX_PATHS:
            return CacheError(query.query_id, f"at most {MAX_PATHS} paths a query")
        try:
            with trio.fail_after(ANSWER_LIMIT):
                return await self._cache_status(query)
        except UNANSWERED as error:
            log.warning("cache query failed", worker=self.worker, error=str(error))
            return CacheError(query.query_id, str(error) or "the database did not answer in time")

    async def _cache_status(self, query: CacheQuery) -> CacheStatus:
        hash_parts = {path: StorePath.parse(path).hash_part for path in query.paths}
        if query.mode is QueryMode.PUSH:
            held = await promised_paths(self.readers, self.submit, hash_parts.values(), self.side.clock())
            flags = [CachedPathInfo(path, hash_part in held) for path, hash_part in hash_parts.items()]
            return CacheStatus(query.query_id, tuple(flags), self._grant())
        async with self.readers.connection() as connection:
            if query.mode is QueryMode.PULL:
                served = await served_paths(connection, self.side.cache, hash_parts.values())
                infos = [self._info(path, served.get(hash_part)) for path, hash_part in hash_parts.items()]
                return CacheStatus(query.query_id, tuple(infos))
            held = await held_paths(connection, hash_parts.values())
        cached = [path for path, hash_part in hash_parts.items() if hash_part in held]
        return CacheStatus(query.query_id, tuple(CachedPathInfo(path, True) for path in cached))

    def _info(self, path: str, served: ServedPath | None) -> CachedPathInfo:
        if served is None:
            return CachedPathInfo(path, False)
        nar = served.record
        return CachedPathInfo(
            path,
            True,
            url=f"{self.side.cache_url}/{nar_url(nar.file_hash)}",
            nar_hash=nar.nar_hash,
            nar_size=nar.nar_size,
            file_hash=nar.file_hash,
            file_size=nar.file_size,
            references=nar.references,
            deriver=nar.deriver,
            ca=nar.ca,
            signatures=(served.signature,),
        )

    def _grant(self) -> UploadGrant:
        expires = int(self.side.clock().timestamp()) + self.side.grant_secs
        token = self.side.grants.issue(UPLOAD_SCOPE, self.worker, expires)
        return UploadGrant(self.side.upload_url, token, expires)

    async def known(self, query: QueryKnownDerivations) -> KnownDerivations:
        """Which derivations the walk may skip; when unsure, none."""
        try:
            with trio.fail_after(ANSWER_LIMIT):
                asked, now = query.drv_paths[:MAX_PATHS], self.side.clock()
                known = await promised_derivations(self.readers, self.submit, asked, now)
        except UNANSWERED as error:
            log.warning("known-derivations query failed", worker=self.worker, error=str(error))
            known = []
        return KnownDerivations(query.query_id, tuple(known))
