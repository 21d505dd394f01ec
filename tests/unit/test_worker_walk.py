"""The order of the walk and the making of batches: pure, so every graph can be tried."""

from __future__ import annotations

import graphlib

from hypothesis import given
from hypothesis import strategies as st

from gradient.model import DiscoveredDerivation, EntryPoint
from gradient.worker.walk import BATCH, Batch, Batcher, Read, Walk


def drv(name: str) -> str:
    return f"/nix/store/{name:0>32}-{name}.drv"


def read(path: str, *dependencies: str, size: int = 0) -> Read:
    return Read(DiscoveredDerivation(path, (), dependencies, (), "x86_64-linux"), bytes(size))


def walk_of(graph: dict[str, list[str]], roots: list[str], wave: int) -> list[str]:
    """The order in which a walk reads `graph`, its roots found one after the other."""
    walk, order = Walk(), []
    for root in roots:
        walk.found([root])
        while paths := walk.next_wave(wave):
            order += paths
            for path in paths:
                walk.found(graph[path])
    return order


def test_newest_is_read_first() -> None:
    graph = {"a": ["b", "c"], "b": [], "c": ["d"], "d": []}
    assert walk_of(graph, ["a"], wave=1) == ["a", "c", "d", "b"]


def test_a_wave_is_bounded_and_holds_no_path_twice() -> None:
    walk = Walk()
    walk.found([str(n) for n in range(300)])
    walk.found(["7", "7"])
    wave = walk.next_wave(256)
    assert len(wave) == 256
    assert wave[0] == "7"
    assert len(set(wave)) == 256
    assert len(walk.next_wave(256)) == 300 - 256
    assert walk.idle


def test_again_hands_out_once_more_and_next() -> None:
    walk = Walk()
    walk.found(["a", "b"])
    assert walk.next_wave() == ["b", "a"]
    walk.found(["c"])
    walk.again("a")
    assert walk.next_wave() == ["a", "c"]
    assert walk.idle


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    size = draw(st.integers(1, 20))
    return {
        str(n): [str(m) for m in draw(st.sets(st.integers(n + 1, size - 1), max_size=4))]
        if n + 1 < size
        else []
        for n in range(size)
    }


@given(graphs(), st.integers(1, 5), st.data())
def test_everything_is_read_once_and_after_a_parent(
    graph: dict[str, list[str]], wave: int, data: st.DataObject
) -> None:
    roots = data.draw(st.lists(st.sampled_from(sorted(graph)), min_size=1, max_size=3))
    order = walk_of(graph, roots, wave)
    reachable = reachable_from(graph, roots)
    assert sorted(order) == sorted(reachable)
    position = {path: index for index, path in enumerate(order)}
    for path in order:
        parents = [p for p in reachable if path in graph[p]]
        assert path in roots or any(position[p] < position[path] for p in parents)


def reachable_from(graph: dict[str, list[str]], roots: list[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += graph[path]
    assert list(graphlib.TopologicalSorter(graph).static_order())  # the strategy made no circle
    return found


def test_a_full_batch_comes_out_by_itself() -> None:
    batcher = Batcher()
    batches = [batcher.read(read(drv(str(n)))) for n in range(BATCH)]
    assert batches[:-1] == [None] * (BATCH - 1)
    assert batches[-1] is not None
    assert len(batches[-1].derivations) == BATCH
    assert batcher.is_empty


def test_a_batch_of_huge_derivations_is_short() -> None:
    batcher = Batcher(max_bytes=1000)
    assert batcher.read(read(drv("a"), size=600)) is None
    batch = batcher.read(read(drv("b"), size=600))
    assert batch is not None
    assert len(batch.derivations) == 2


def test_an_entry_point_goes_with_its_root() -> None:
    batcher = Batcher(size=2)
    batcher.enter(EntryPoint("x", drv("c")))
    batcher.read(read(drv("a")))
    first = batcher.read(read(drv("b")))
    assert first is not None
    assert first.entry_points == ()
    batcher.read(read(drv("c")))
    second = batcher.flush()
    assert second.entry_points == (EntryPoint("x", drv("c")),)
    assert [r.record.drv_path for r in second.derivations] == [drv("c")]


def test_an_entry_point_of_a_known_or_published_root_goes_with_what_is_next() -> None:
    batcher = Batcher()
    batcher.enter(EntryPoint("known", drv("k")))
    assert batcher.is_empty
    batcher.known(drv("k"))
    assert batcher.flush() == Batch((), (EntryPoint("known", drv("k")),))
    batcher.read(read(drv("p")))
    batcher.flush()
    batcher.enter(EntryPoint("published", drv("p")))
    assert batcher.flush() == Batch((), (EntryPoint("published", drv("p")),))
    assert not batcher.flush()
