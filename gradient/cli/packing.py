"""A local flake as a source in the server's cache: packed here, uploaded, named by its store path."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Self, TypeVar

import attrs
import trio

from gradient.cli.api import Api
from gradient.cli.faults import BadEnvironment, BadFlake, Fault
from gradient.cli.flake_arg import Local
from gradient.model import CachedSource
from gradient.nar.bridge import ThreadStream
from gradient.nar.bundle import BundleItem, EntryHeader, bundled
from gradient.nar.errors import UnsupportedTree
from gradient.nar.hashing import NarHash, hash_nar
from gradient.nar.pack import PackResult
from gradient.nix.store_path import StorePath, make_source_path
from gradient.worker.git_process import Git, GitError
from gradient.worker.source_tree import NoFlake, Source, folder_source, local_source

T = TypeVar("T")


class TreeChanged(Fault):
    """Somebody wrote to the tree between our two looks at it."""


@attrs.frozen
class PackedSource:
    """A source that was hashed: what the server is told of it."""

    local: Local
    source: CachedSource
    nar: NarHash

    @property
    def path(self) -> StorePath:
        """The store path that Nix, too, gives it."""
        return make_source_path(self.nar.hash)

    @property
    def name(self) -> str:
        """What people call it: the name of its folder."""
        return os.path.basename(os.path.abspath(self.local.path / self.local.dir)) or "flake"


async def hash_source(local: Local) -> PackedSource:
    """Read a local flake and compute its store path. Raises BadFlake, BadEnvironment."""
    found = await _faulty(local, partial(_read, local))
    nar = await _faulty(local, partial(trio.to_thread.run_sync, hash_nar, found.tree))
    source = CachedSource(
        store_path=make_source_path(nar.hash).path(),
        nar_hash=nar.hash.sri(),
        rev=found.rev,
        last_modified=found.last_modified,
        rev_count=found.rev_count,
        dir=found.dir,
    )
    return PackedSource(local, source, nar)


async def upload_source(api: Api, packed: PackedSource) -> None:
    """Make the server's cache hold it. Nothing is sent when it does already.

    The tree is read a second time for this; raises TreeChanged when it is no longer what was hashed, and
    the server then keeps nothing of it. Raises BadFlake, BadEnvironment and what Api raises.
    """
    if await api.holds(packed.path):
        return
    await _faulty(packed.local, partial(_send, api, packed))


async def _send(api: Api, packed: PackedSource) -> None:
    header = EntryHeader(
        store_path=packed.path.path(),
        ca=f"fixed:r:{packed.nar.hash.nix32()}",
        nar_size=packed.nar.size,
    )
    tree = (await _read(packed.local)).tree
    async with bundled([BundleItem(header, tree)]) as stream:
        await api.upload(_Checked(stream, packed))


class _Checked:
    """A bundle whose last piece, without which the server keeps nothing, comes only when the hash agrees."""

    def __init__(self, stream: ThreadStream[tuple[PackResult, ...]], packed: PackedSource) -> None:
        self._stream = stream
        self._packed = packed
        # The piece to give next; the one behind it is read first.
        self._held: bytes | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._held is None:
            self._held = await anext(self._stream)
        piece, self._held = self._held, await self._read_ahead()
        return piece

    async def _read_ahead(self) -> bytes | None:
        """The next piece; None at the end. Raises TreeChanged."""
        try:
            return await anext(self._stream)
        except StopAsyncIteration:
            pass
        (result,) = self._stream.result
        if result.nar_hash != self._packed.nar.hash.nix32():
            raise TreeChanged(f"{self._packed.local.path} changed while it was uploaded: try again")
        return None


async def _read(local: Local) -> Source:
    if not local.whole_folder:
        return await local_source(Git.of_the_user(os.environ), local.path)
    flake = local.path / local.dir / "flake.nix"
    if not await trio.Path(flake).is_file():
        raise NoFlake(f"there is no {flake}")
    return attrs.evolve(await folder_source(local.path), dir=local.dir)


async def _faulty(local: Local, read: Callable[[], Awaitable[T]]) -> T:
    """What `read` returns; what can be wrong with a tree as a fault of the user's or the machine's."""
    try:
        return await read()
    except (NoFlake, UnsupportedTree) as error:
        raise BadFlake(str(error)) from error
    except (GitError, OSError) as error:
        raise BadEnvironment(f"{local.path} cannot be read: {error}") from error
