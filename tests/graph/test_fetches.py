"""What was fetched from the cache: noted as it is answered, recorded once a minute, kept for long after."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import attrs
import pytest

from gradient.graph.fetches import RecordFetches
from gradient.graph.nar import CommitNars, Signed
from gradient.graph.path_gc import Ages, CollectPaths
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.transaction import Message
from gradient.passes import fetches
from gradient.passes.fetches import Fetches
from tests.graph.world import World, hash_part, nar, out

T = TypeVar("T")


def stored(name: str, content: str) -> Signed:
    """A committed path with this content."""
    signed = nar(out(name))
    return attrs.evolve(signed, nar=attrs.evolve(signed.nar, file_hash=content))


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    await connection.execute("INSERT INTO cache (name, created_at) VALUES ('other', now())")
    await world.commit(stored("a", "A"), stored("b", "B"), stored("twin", "A"), stored("never", "C"))
    await world.apply(CommitNars(2, (stored("a", "A"),)))
    return world


async def stamps(world: World) -> dict[str, tuple[int, bool]]:
    """Of each path in the first cache: how often it was fetched, and whether it was by the last message."""
    rows = await fetch_all(
        world.connection,
        "SELECT p.package, s.fetch_count, coalesce(s.last_fetched_at = %(now)s, false)"
        " FROM cached_path_signature s JOIN cached_path p ON p.id = s.cached_path WHERE s.cache = 1",
        {"now": world.now},
    )
    return {name: (count, stamped) for name, count, stamped in rows}


async def test_all_paths_of_the_content_are_stamped_in_the_cache_that_was_asked(world: World) -> None:
    fetches = Fetches(world.apply, 1)
    for content in ("A", "B", "A", "nobody has this"):
        fetches.note(content)
    await fetches.record()
    nothing = (0, False)
    assert await stamps(world) == {"a": (2, True), "b": (1, True), "twin": (2, True), "never": nothing}
    count = "SELECT fetch_count FROM cached_path_signature WHERE cache = 2"
    assert await world.value(count) == 0
    fetches.note("B")
    await fetches.record()
    assert await stamps(world) == {"a": (2, False), "b": (2, True), "twin": (2, False), "never": nothing}


async def test_what_was_fetched_lately_is_not_collected(world: World) -> None:
    fetches = Fetches(world.apply, 1)
    world.now += timedelta(days=30)
    fetches.note("B")
    await fetches.record()
    ages = Ages(unused_since=world.now - timedelta(days=1), promised_since=world.now)
    await world.apply(CollectPaths(tuple(map(hash_part, ("a", "b", "twin", "never"))), ages))
    assert set(await stamps(world)) == {"b"}
    # Noted, and retired before it was recorded.
    fetches.note("A")
    await fetches.record()
    assert set(await stamps(world)) == {"b"}


async def test_nothing_fetched_is_nothing_to_say(world: World) -> None:
    async def refuse(message: Message[T]) -> T:
        raise AssertionError(message)

    await Fetches(refuse, 1).record()


async def test_messages_are_bounded_and_a_failed_one_is_sent_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "RECORDED_AT_ONCE", 2)
    sent: list[int] = []

    async def once_in_a_while(message: Message[T]) -> T:
        assert isinstance(message, RecordFetches)
        sent.append(len(message.times))
        if len(sent) == 2:
            raise TimeoutError("not recorded")
        return await world.apply(message)

    noted = Fetches(once_in_a_while, 1)
    for content in ("x", "y", "A", "B", "B", "C"):
        noted.note(content)
    with pytest.raises(TimeoutError):
        await noted.record()
    noted.note("A")
    await noted.record()
    assert sent == [2, 2, 2, 1]
    counts = {name: count for name, (count, _) in (await stamps(world)).items()}
    assert counts == {"a": 2, "b": 2, "twin": 2, "never": 1}


async def test_more_than_that_is_not_kept_in_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "MOST_NOTED", 2)
    noted = Fetches(world.apply, 1)
    for content in ("A", "x", "B", "A"):
        noted.note(content)
    await noted.record()
    assert {name: count for name, (count, _) in (await stamps(world)).items()} == {
        "a": 2,
        "b": 0,
        "twin": 2,
        "never": 0,
    }
