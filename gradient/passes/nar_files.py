"""Objects without rows, and rows without objects. Layer: passes.

The objects of retired paths are removed here, after the commit that took their rows. An upload of the same
path holds the path's claim from its look at the row until its own row is committed; so does a removal from
its look until the object is gone. Neither can come between the other's two steps, and whoever comes second
sees what the first has done.
"""

from __future__ import annotations

from typing import Final

import attrs
import structlog

from gradient.graph.cache_reads import held_paths
from gradient.graph.demote import DemoteMissingNar
from gradient.graph.moves import Moves
from gradient.graph.pg_pool import Pool
from gradient.graph.retire import NarsRemoved, RetiredNar, retired_nars
from gradient.graph.transaction import Submit
from gradient.nar.claims import PathClaims
from gradient.nar.store import NarStore, nar_key
from gradient.nix.store_path import StorePath
from gradient.nursery.kick import Kick

log = structlog.get_logger()

# Objects removed before that is recorded: a crash then removes as many once more, which is no error.
REMOVED_AT_ONCE: Final = 200
# Paths that wait to be looked for; beyond that the next one who misses them names them again.
MAX_SUSPECTED: Final = 10_000


@attrs.define(eq=False)
class NarFiles:
    """The objects of the cache, where they and their rows differ."""

    readers: Pool
    submit: Submit
    store: NarStore
    claims: PathClaims
    # Wakes the pass that looks for suspected objects.
    missed: Kick = attrs.field(factory=Kick)
    _suspected: dict[str, None] = attrs.field(factory=dict, init=False)

    def moved(self, moves: Moves) -> None:
        """Take what a transaction moved. Never blocks."""
        for hash_part in moves.suspected:
            self.suspect(hash_part)

    def suspect(self, hash_part: str) -> None:
        """Somebody could not get the object of this path. Never blocks."""
        if len(self._suspected) < MAX_SUSPECTED:
            self._suspected[hash_part] = None
            self.missed.set()

    async def look_for_suspected(self) -> None:
        """Retire the suspected paths whose objects are gone; those that are there stay.

        Raises StoreUnavailable, and as `submit` does: what was not looked for is, by the next run."""
        while self._suspected:
            hash_part = next(iter(self._suspected))
            if await self._is_gone(hash_part):
                log.warning("NAR is gone from the store", path=hash_part)
            self._suspected.pop(hash_part, None)

    async def _is_gone(self, hash_part: str) -> bool:
        async with self.claims.claim([hash_part]):
            gone = await self._is_held(hash_part) and not await self.store.exists(nar_key(_path(hash_part)))
            if gone:
                await self.submit(DemoteMissingNar((hash_part,)))
        return gone

    async def remove_retired(self) -> None:
        """Remove the objects of retired paths, except of those that are held again. Raises StoreUnavailable,
        and as `submit` does; a later run goes on."""
        last = 0
        while True:
            async with self.readers.connection() as connection:
                retired = await retired_nars(connection, last, REMOVED_AT_ONCE)
            if not retired:
                return
            for nar in retired:
                await self._remove(nar)
            await self.submit(NarsRemoved(tuple(nar.id for nar in retired)))
            last = retired[-1].id

    async def _remove(self, nar: RetiredNar) -> None:
        async with self.claims.claim([nar.hash_part]):
            if not await self._is_held(nar.hash_part):
                await self.store.delete(nar_key(_path(nar.hash_part)))

    async def _is_held(self, hash_part: str) -> bool:
        async with self.readers.connection() as connection:
            return bool(await held_paths(connection, [hash_part]))


def _path(hash_part: str) -> str:
    """A store path with this hash part: an object's place depends on nothing else."""
    return StorePath(hash_part, "nar").path()
