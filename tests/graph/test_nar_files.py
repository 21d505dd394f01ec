"""Objects and their rows: removed after the commit, never from under an upload; missed and looked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
import trio.testing

from gradient.graph.access import ensure_first_rows, hash_token
from gradient.graph.nar import CommitNars
from gradient.graph.path_gc import Ages, CollectPaths
from gradient.graph.pg import Connection
from gradient.graph.pg_pool import Pool
from gradient.graph.promises import promised_derivations, promised_paths
from gradient.graph.writer import GraphWriter
from gradient.nar.claims import PathClaims
from gradient.nar.store import NarStore, nar_key
from gradient.passes.nar_files import NarFiles
from tests.graph.world import World, drv, hash_part, nar, out
from tests.patience import PATIENCE

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OLD = Ages(unused_since=NOW + timedelta(days=1), promised_since=NOW)


@pytest.fixture
async def writer(connection: Connection, database_url: str) -> AsyncIterator[GraphWriter]:
    await ensure_first_rows(connection, NOW, hash_token("a"), hash_token("b"))
    async with trio.open_nursery() as nursery:
        writer = GraphWriter(database_url, lambda moves: None, lambda: NOW)
        await nursery.start(writer.run)
        yield writer
        writer.close()


@pytest.fixture
def files(writer: GraphWriter, pool: Pool, tmp_path: Path) -> NarFiles:
    return NarFiles(pool, writer.submit, NarStore.open(tmp_path), PathClaims())


async def commit(files: NarFiles, name: str) -> None:
    """An upload: its object, then its row."""
    await files.store.put_bytes(nar_key(out(name)), name.encode())
    await files.submit(CommitNars(1, (nar(out(name)),)))


async def retire(files: NarFiles, *names: str) -> None:
    await files.submit(CollectPaths(tuple(map(hash_part, names)), OLD))


async def there(files: NarFiles, name: str) -> bool:
    return await files.store.exists(nar_key(out(name)))


async def waited_for(files: NarFiles, name: str) -> None:
    """Until somebody waits for who has the path."""
    with trio.fail_after(PATIENCE):
        while not files.claims._claimed[hash_part(name)].statistics().tasks_waiting:  # noqa: ASYNC110
            await trio.lowlevel.checkpoint()


async def held(files: NarFiles, *names: str, now: datetime = NOW) -> set[str]:
    return await promised_paths(files.readers, files.submit, [hash_part(name) for name in names], now)


async def test_an_object_goes_after_its_row(files: NarFiles) -> None:
    for name in ("a", "b"):
        await commit(files, name)
    await files.remove_retired()
    assert await there(files, "a")
    await retire(files, "a")
    assert await there(files, "a")
    await files.remove_retired()
    assert not await there(files, "a")
    assert await there(files, "b")
    assert await held(files, "a", "b") == {hash_part("b")}
    async with files.readers.connection() as connection:
        assert (await (await connection.execute("SELECT count(*) FROM retired_nar")).fetchone()) == (0,)


async def test_an_object_that_came_again_stays(files: NarFiles) -> None:
    await commit(files, "a")
    await retire(files, "a")
    await commit(files, "a")
    await files.remove_retired()
    assert await there(files, "a")


async def test_removed_twice_is_no_error(files: NarFiles) -> None:
    """A crash between the removal and its record."""
    await commit(files, "a")
    await retire(files, "a")
    await files.store.delete(nar_key(out("a")))
    await files.remove_retired()
    assert await held(files, "a") == set()


async def test_a_removal_waits_for_an_upload_that_has_the_path(files: NarFiles) -> None:
    """The upload looked after the row had gone, and has its object in place without a row yet."""
    await commit(files, "a")
    await retire(files, "a")
    async with trio.open_nursery() as nursery:
        async with files.claims.claim([hash_part("a")]):
            assert await held(files, "a") == set()
            await files.store.put_bytes(nar_key(out("a")), b"again")
            nursery.start_soon(files.remove_retired)
            await waited_for(files, "a")
            assert await there(files, "a")
            await files.submit(CommitNars(1, (nar(out("a")),)))
    assert await files.store.get(nar_key(out("a"))) == b"again"


async def test_what_an_upload_was_told_is_held_is_not_retired_behind_it(files: NarFiles) -> None:
    later = NOW + timedelta(days=30)
    await commit(files, "a")
    await commit(files, "b")
    # Whichever comes first in the writer: told and kept, or gone and not told.
    assert await held(files, "a", now=later) == {hash_part("a")}
    await retire(files, "a", "b")
    assert await held(files, "a", "b", now=later) == {hash_part("a")}


async def test_a_fresh_promise_is_not_renewed(files: NarFiles) -> None:
    await commit(files, "a")

    async def refuse(message: object) -> object:
        raise AssertionError(message)

    soon = NOW + timedelta(minutes=5)
    assert await promised_paths(files.readers, refuse, [hash_part("a")], soon) == {hash_part("a")}  # type: ignore[arg-type]


async def test_known_derivations_are_kept_for_who_was_told(files: NarFiles, connection: Connection) -> None:
    world = World(connection)
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["low"], "low": []}, entries=["top"])
    await world.record(evaluation, {"half": ["never"]}, entries=["half"])
    await world.commit(nar(out("half")))  # what it makes is here: its walk must go on all the same
    later = world.now + timedelta(days=30)
    asked = [drv(name) for name in ("top", "half", "unheard-of")]
    assert await promised_derivations(files.readers, files.submit, asked, later) == [drv("top")]
    query = "SELECT name FROM derivation WHERE promised_at IS NOT NULL"
    assert await world.value(query) == "top"


async def test_only_what_is_gone_is_retired(files: NarFiles) -> None:
    for name in ("a", "b"):
        await commit(files, name)
    await files.store.delete(nar_key(out("a")))
    for name in ("a", "b", "nobody"):
        files.suspect(hash_part(name))
    with trio.fail_after(PATIENCE):
        await files.missed.wait()
    await files.look_for_suspected()
    assert await held(files, "a", "b") == {hash_part("b")}
    await files.look_for_suspected()


async def test_a_path_on_its_way_is_not_missed(files: NarFiles) -> None:
    """Retired and removed; the upload of it has its object in place, and then its row."""
    files.suspect(hash_part("a"))
    async with trio.open_nursery() as nursery:
        async with files.claims.claim([hash_part("a")]):
            nursery.start_soon(files.look_for_suspected)
            await waited_for(files, "a")
            await commit(files, "a")
    assert await held(files, "a") == {hash_part("a")}


async def test_claims_are_had_all_at_once() -> None:
    claims = PathClaims()
    order: list[str] = []

    async def work(name: str, *paths: str) -> None:
        async with claims.claim(paths):
            order.append(name)
            await trio.testing.wait_all_tasks_blocked()

    async with trio.open_nursery() as nursery:
        async with claims.claim(["a"]):
            nursery.start_soon(work, "ab", "a", "b")
            nursery.start_soon(work, "ba", "b", "a")
            await trio.testing.wait_all_tasks_blocked()
            assert order == []
            async with claims.claim(["b"]):
                order.append("b")
    assert order[0] == "b"
    assert sorted(order[1:]) == ["ab", "ba"]
