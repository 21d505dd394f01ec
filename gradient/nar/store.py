"""The NAR store as tasks see it: every call runs in a worker thread. Layer: nar.

Layout: `nars/<2>/<30>.nar.zst` by the hash part of the store path, `logs/<2>/<attempt>.log.zst`. A
caller that writes a row naming an object first awaits `sync` for it: a row never exists before its
object is durable.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Final, Self

import attrs
import trio

from gradient.nar.bridge import ThreadStream, feed_thread, in_thread
from gradient.nar.errors import NoSuchObject
from gradient.nar.objects import LocalObjects, Objects, RemoteObjects, Spool, file_size, write_all
from gradient.nix.store_path import StorePath

_LOG_FOLDERS: Final = 256


def nar_key(store_path: str) -> str:
    """Where the NAR of a store path (full) lies."""
    hash_part = StorePath.parse(store_path).hash_part
    return f"nars/{hash_part[:2]}/{hash_part[2:]}.nar.zst"


def log_key(attempt_id: int) -> str:
    """Where the finished log of a build attempt lies."""
    return f"logs/{attempt_id % _LOG_FOLDERS:02x}/{attempt_id}.log.zst"


class NarStore:
    """Objects, local or remote, and the spool where new ones are made."""

    def __init__(self, objects: Objects, spool: Spool) -> None:
        self.objects = objects
        self.spool = spool
        self._sync = _SharedSync(objects)

    @classmethod
    def open(cls, folder: Path, url: str | None = None, options: Mapping[str, str] | None = None) -> Self:
        """The store below `folder`; with `url` (`s3://bucket/prefix`, `gs://...`, `az://...`) objects lie
        there and `folder` has only the spool. `options` are obstore's, such as `endpoint` and `region`.

        Blocking. Raises OSError, and StoreUnavailable for a URL that cannot be one."""
        objects = LocalObjects(folder / "objects") if url is None else RemoteObjects(url, options or {})
        return cls(objects, Spool(folder / "spool"))

    async def put(self, key: str, chunks: AsyncIterable[bytes]) -> int:
        """Store the bytes of `chunks` and return their number; readers see the object whole or not at all.

        On an error or cancellation nothing is stored. Not durable before `sync`."""
        return await feed_thread(partial(_put, self, key), chunks)

    async def put_bytes(self, key: str, data: bytes) -> None:
        """`put` of bytes at hand."""
        await trio.to_thread.run_sync(_put, self, key, (data,))

    async def size(self, key: str) -> int:
        """The object's size in bytes; raises NoSuchObject, StoreUnavailable."""
        return await trio.to_thread.run_sync(self.objects.size, key)

    async def exists(self, key: str) -> bool:
        """Whether the object is there; raises StoreUnavailable when that cannot be known."""
        try:
            await self.size(key)
        except NoSuchObject:
            return False
        return True

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The object's bytes from `start` to before `stop`, in memory; raises NoSuchObject."""
        return await trio.to_thread.run_sync(lambda: b"".join(self.objects.read(key, start, stop)))

    def stream(
        self, key: str, start: int = 0, stop: int | None = None
    ) -> AbstractAsyncContextManager[ThreadStream[None]]:
        """The same as a stream, read a few chunks ahead; the iteration raises NoSuchObject."""
        return in_thread(self.objects.read(key, start, stop))

    async def delete(self, key: str) -> None:
        """Remove the object; one that is not there is no error."""
        await trio.to_thread.run_sync(self.objects.delete, key)

    async def sync(self, keys: Iterable[str]) -> None:
        """Return when these objects survive a power cut. Concurrent callers share one sync.

        Raises OSError when they may not: then write no row that names them."""
        await self._sync(keys)

    async def signed_url(self, key: str, seconds: int) -> str | None:
        """A URL of the remote store that lets anybody GET the object for `seconds`; None for a local one."""
        return await trio.to_thread.run_sync(self.objects.signed_url, key, seconds)

    def local_path(self, key: str) -> Path | None:
        """The object's file where the store is local: for handing files to a web server."""
        return self.objects.path(key) if isinstance(self.objects, LocalObjects) else None


@attrs.define(eq=False)
class _Batch:
    keys: set[str] = attrs.field(factory=set)
    done: bool = False
    error: OSError | None = None


class _SharedSync:
    """One sync at a time; callers that come while one runs share the next."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lock = trio.Lock()
        # Invariant: not done; whoever holds the lock first syncs it for all who joined.
        self._next = _Batch()

    async def __call__(self, keys: Iterable[str]) -> None:
        batch = self._next
        batch.keys.update(keys)
        async with self._lock:
            if not batch.done:
                if self._next is batch:
                    self._next = _Batch()
                await self._run(batch)
        if batch.error is not None:
            raise OSError(*batch.error.args) from batch.error

    async def _run(self, batch: _Batch) -> None:
        # A failed sync is not tried again: the kernel reports a lost page once and then calls it clean.
        try:
            await trio.to_thread.run_sync(self._objects.make_durable, batch.keys)
        except OSError as error:
            batch.error = error
        batch.done = True


def _put(store: NarStore, key: str, chunks: Iterable[bytes]) -> int:
    with store.spool.file() as file:
        for chunk in chunks:
            write_all(file, chunk)
        size = file_size(file)
        store.objects.adopt(Path(file.name), key)
    return size
