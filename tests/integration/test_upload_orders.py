"""Uploads of a path, its collection and the removal of its object: every order of two sides' steps.

A side stands before everything that it asks of the database, the writer or the store. Whatever the order, a
path that is held has the object that its row tells of, and nothing else is left.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import attrs
import pytest
import trio

from gradient.graph.path_gc import Ages, CollectPaths
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.transaction import Message
from gradient.nar.bundle import bundled
from gradient.nar.claims import PathClaims
from gradient.nar.objects import LocalObjects
from gradient.nar.store import NarStore, nar_key
from gradient.passes.nar_files import NarFiles
from gradient.web.uploads import Uploads
from tests.graph.world import START, hash_part
from tests.integration.web_support import Web, item, store_path
from tests.turns import Order, Outcome, Side, every_order, play

if TYPE_CHECKING:
    from gradient.graph.pg_pool import Pool

T = TypeVar("T")
# What one side does with the path of this name.
Act: TypeAlias = Callable[["Stepped", str], Awaitable[object]]
# How the path is before.
Prepare: TypeAlias = Callable[[Web, str], Awaitable[None]]

LATER = START + timedelta(days=3650)
AGES = Ages(unused_since=LATER, promised_since=LATER)


@attrs.define(eq=False)
class Stepped(Side):
    """One side, with parts of its own that wait for its turn and then are the server's."""

    web: Web
    do: Act
    name: str
    claims: SteppedClaims = attrs.field(init=False)
    store: SteppedStore = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.claims = SteppedClaims(self)
        self.store = SteppedStore(self)

    async def act(self) -> object:
        return await self.do(self, self.name)

    async def stands(self) -> bool:
        await self.standing.wait()
        return not self.claims.waiting

    @property
    def readers(self) -> Pool:
        return cast("Pool", self)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        await self.turn()
        async with self.web.site.readers.connection() as connection:
            yield connection

    async def submit(self, message: Message[T]) -> T:
        await self.turn()
        return await self.web.site.submit(message)

    def files(self) -> NarFiles:
        return NarFiles(self.readers, self.submit, self.store, self.claims)


class SteppedClaims(PathClaims):
    """The server's claims, and whether this side waits for one."""

    def __init__(self, side: Stepped) -> None:
        self.side = side
        self.waiting = False

    @asynccontextmanager
    async def claim(self, hash_parts: Collection[str]) -> AsyncGenerator[None]:
        shared = self.side.web.site.claims
        if not shared.claimed.isdisjoint(hash_parts):
            self.waiting = True
            self.side.standing.set()
        async with shared.claim(hash_parts):
            self.waiting = False
            yield


class SteppedObjects(LocalObjects):
    """Objects that are put in their places when it is the side's turn."""

    def __init__(self, side: Stepped, root: Path) -> None:
        super().__init__(root)
        self.side = side

    def adopt(self, file: Path, key: str) -> None:
        trio.from_thread.run(self.side.turn)
        super().adopt(file, key)


class SteppedStore(NarStore):
    """The server's store, each call when it is the side's turn."""

    def __init__(self, side: Stepped) -> None:
        store = side.web.site.store
        assert isinstance(store.objects, LocalObjects)
        super().__init__(SteppedObjects(side, store.objects.root), store.spool)
        self.side = side

    async def sync(self, keys: Iterable[str]) -> None:
        await self.side.turn()
        await super().sync(keys)

    async def size(self, key: str) -> int:
        await self.side.turn()
        return await super().size(key)

    async def delete(self, key: str) -> None:
        await self.side.turn()
        await super().delete(key)


async def upload(side: Stepped, name: str, content: bytes = b"x") -> None:
    site = side.web.site
    uploads = Uploads(side.readers, side.submit, side.store, site.cache, side.claims, site.clock)
    async with bundled([item(name, content)]) as chunks:
        await uploads.take(chunks)


async def upload_another(side: Stepped, name: str) -> None:
    await upload(side, name, b"longer")


async def collect(side: Stepped, name: str) -> None:
    await side.submit(CollectPaths((hash_part(name),), AGES))
    await side.files().remove_retired()


async def replace(side: Stepped, name: str) -> None:
    await collect(side, name)
    await upload(side, name)


async def look(side: Stepped, name: str) -> None:
    files = side.files()
    files.suspect(hash_part(name))
    await files.look_for_suspected()


async def store(web: Web, name: str) -> None:
    assert (await web.upload(item(name, b"at first"))).status == 200


async def retire(web: Web, name: str) -> None:
    """Its row goes, and its object lies there until somebody removes it."""
    await store(web, name)
    await web.site.submit(CollectPaths((hash_part(name),), AGES))


async def lose(web: Web, name: str) -> None:
    """Its row stays, and its object is gone."""
    await store(web, name)
    await web.site.store.delete(nar_key(store_path(name)))


async def row_and_object(web: Web, name: str) -> tuple[int | None, int | None]:
    """The size that the row of the path tells, and that of its object; None for what is not there."""
    query = "SELECT file_size FROM cached_path WHERE hash = %(hash)s"
    async with web.site.readers.connection() as connection:
        rows = await fetch_all(connection, query, {"hash": hash_part(name)})
    file = web.site.store.local_path(nar_key(store_path(name)))
    assert file is not None
    return (rows[0][0] if rows else None), (file.stat().st_size if file.exists() else None)


HELD, GONE, EITHER = {True}, {False}, {True, False}


@pytest.mark.parametrize(
    ("before", "one", "two", "ends"),
    [
        (store, upload, collect, EITHER),
        (retire, upload, collect, EITHER),
        (lose, upload, collect, EITHER),
        (store, upload, look, HELD),
        (retire, upload, look, HELD),
        (lose, replace, look, HELD),
        (retire, upload, upload_another, HELD),
        (store, collect, look, GONE),
        (lose, collect, look, GONE),
        (store, collect, collect, GONE),
    ],
)
async def test_a_held_path_has_its_object_in_every_order(
    web: Web, before: Prepare, one: Act, two: Act, ends: set[bool]
) -> None:
    names = map("path-{}".format, itertools.count())
    seen = set()

    async def played(order: Order) -> Outcome:
        name = next(names)
        await before(web, name)
        outcome = await play(Stepped(web, one, name), Stepped(web, two, name), order)
        assert outcome.errors == (None, None), outcome
        row, stored = await row_and_object(web, name)
        assert row is None or row == stored, order
        seen.add(row is not None)
        return outcome

    await every_order(played)
    assert seen == ends
    assert (web.spooled, web.site.claims.claimed) == ([], frozenset())
