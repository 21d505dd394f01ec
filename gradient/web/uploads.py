"""Taking in uploads: verify, store, sign, commit. Layer: web.

A row appears after its object is durable, and an object is never replaced under a row: two uploads of one
path commit one after the other, and the second finds the path held. What a client sends is verified
while it comes; only then are its paths claimed, so a slow client holds nobody up.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Final

import attrs
import trio

from gradient.graph.nar import CommitNars, Signed
from gradient.graph.pg_pool import Pool
from gradient.graph.promises import promised_paths
from gradient.graph.transaction import Submit
from gradient.model import NarRecord
from gradient.nar.bundle import EntryHeader
from gradient.nar.claims import PathClaims
from gradient.nar.errors import BadUpload, StoreUnavailable
from gradient.nar.ingest import Received, received_bundle
from gradient.nar.narinfo import NarInfo
from gradient.nar.signing import SecretKey
from gradient.nar.store import NarStore
from gradient.nix.store_path import StorePath
from gradient.web.errors import BadRequest, NotRecorded

# Uploads verified at once: each holds a thread while its client sends.
MAX_CONCURRENT: Final = 16
# Seconds for storing and committing what is verified; the graph writer itself gives up after 120.
COMMIT_LIMIT: Final = 130.0


@attrs.frozen
class Cache:
    """The cache that uploads go to: its row's id, its name, and the key that signs for it."""

    id: int
    name: str
    key: SecretKey = attrs.field(repr=False)

    @property
    def public_key(self) -> str:
        """What clients put into `trusted-public-keys`."""
        return str(self.key.public_key())


@attrs.define(eq=False)
class Uploads:
    """Every upload of the server goes through this."""

    readers: Pool
    submit: Submit
    store: NarStore
    cache: Cache
    claims: PathClaims
    clock: Callable[[], datetime]
    _threads: trio.CapacityLimiter = attrs.field(
        factory=partial(trio.CapacityLimiter, MAX_CONCURRENT), init=False
    )

    async def take(self, chunks: AsyncIterable[bytes]) -> tuple[str, ...]:
        """Take a bundle in; the store paths that are in the cache now, held ones included.

        Raises BadRequest for a bundle that is not in order and NotRecorded when the server cannot store
        it; nothing is in the cache then. Cancellation before the last byte leaves nothing behind; after
        it the commit goes on to its end.
        """
        try:
            async with received_bundle(chunks, self.store, _admit, limiter=self._threads) as received:
                with trio.fail_after(COMMIT_LIMIT) as scope:
                    # An object in its place without its row must not meet another upload of the path.
                    scope.shield = True
                    await self._commit(received)
                return tuple(record.store_path for record in received.records)
        except BadUpload as error:
            raise BadRequest(str(error)) from error
        except (OSError, StoreUnavailable, trio.TooSlowError) as error:
            raise NotRecorded(f"the upload could not be stored: {error}") from error

    async def _commit(self, received: Received) -> None:
        by_hash = {StorePath.parse(record.store_path).hash_part: record for record in received.records}
        async with self.claims.claim(by_hash):
            held = await promised_paths(self.readers, self.submit, by_hash, self.clock())
            missing = [record for hash_part, record in by_hash.items() if hash_part not in held]
            if missing:
                await received.keep(missing)
                signed = await trio.to_thread.run_sync(_sign, self.cache.key, missing)
                await self.submit(CommitNars(self.cache.id, signed))


def _admit(_: EntryHeader) -> bool:
    return True


def _sign(key: SecretKey, records: Iterable[NarRecord]) -> tuple[Signed, ...]:
    return tuple(Signed(record, key.sign(NarInfo.of(record).fingerprint())) for record in records)
