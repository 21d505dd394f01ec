"""Packing in a thread: results, errors, back-pressure and cancellation."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import trio
import trio.testing
import zstandard

from gradient.nar.bridge import feed_thread, in_thread
from gradient.nar.errors import UnsupportedTree
from gradient.nar.pack import SMALL_NAR, Packer, pack_small, packed
from gradient.nar.tree import Directory, Regular, regular_file
from gradient.nar.unpack import decompress
from gradient.nar.writer import dump_tree
from gradient.nix.hashes import Hash
from tests.noise import noise
from tests.patience import until


def sha(data: bytes) -> str:
    return Hash("sha256", sha256(data).digest()).nix32()


@pytest.mark.parametrize("size", [0, 100, SMALL_NAR - 112, SMALL_NAR - 104, 3 * SMALL_NAR + 5])
async def test_the_result_describes_the_bytes(tmp_path: Path, size: int) -> None:
    content = noise(size // 2) + bytes(size - size // 2)
    (tmp_path / "file").write_bytes(content)
    async with packed(tmp_path / "file") as stream:
        file = b"".join([chunk async for chunk in stream])
    result = stream.result
    nar = b"".join(dump_tree(regular_file(content)))
    assert b"".join(decompress([file], result.nar_size)) == nar
    assert (result.nar_hash, result.nar_size) == (sha(nar), len(nar))
    assert (result.file_hash, result.file_size) == (sha(file), len(file))


def test_a_small_tree_is_one_call_with_its_size_in_the_frame() -> None:
    data, result = pack_small(Directory([(b"a", regular_file(b"hello"))]))
    assert zstandard.frame_content_size(data) == result.nar_size
    assert result.file_size == len(data)


def test_one_packer_packs_many_trees_alike() -> None:
    packer = Packer()
    large = [bytes([number]) * 2**20 for number in range(3)]
    first = [b"".join(packer.pack(Regular(3 * 2**20, False, large))) for _ in range(2)]
    assert first[0] == first[1]
    assert b"".join(packer.pack(regular_file(b"x"))) == pack_small(regular_file(b"x"))[0]


async def test_an_error_comes_out_of_the_iteration_as_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    async with packed(tmp_path) as stream:
        with pytest.raises(UnsupportedTree, match="fifo"):
            async for _ in stream:
                pass
        with pytest.raises(RuntimeError, match="to its end"):
            stream.result  # noqa: B018


async def test_an_error_of_the_reader_is_not_wrapped_and_ends_the_thread() -> None:
    closed = threading.Event()

    async def fail() -> None:
        async with in_thread(endless(closed)) as stream:
            await anext(stream)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert closed.is_set()


async def test_leaving_early_ends_the_thread() -> None:
    closed = threading.Event()
    async with in_thread(endless(closed)) as stream:
        await anext(stream)
    assert closed.is_set()


async def test_cancelling_ends_the_thread() -> None:
    closed = threading.Event()
    with trio.CancelScope() as scope:
        async with in_thread(endless(closed)) as stream:
            await anext(stream)
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert closed.is_set()


async def test_cancelling_a_pack_that_yields_nothing_ends_it() -> None:
    """Zeros compress to almost nothing: the thread must look up from its work by itself."""
    read = 0
    enough = threading.Event()

    def zeros() -> Generator[bytes, None, None]:
        nonlocal read
        block = bytes(2**16)
        while True:
            read += 1
            if read == 100:
                enough.set()
            yield block

    with trio.CancelScope() as scope:
        async with packed(Regular(2**50, False, zeros())) as stream:
            await trio.to_thread.run_sync(enough.wait)
            scope.cancel()
            await anext(stream)
    assert scope.cancelled_caught


async def test_the_thread_is_at_most_a_few_chunks_ahead() -> None:
    made = 0

    def counted() -> Generator[bytes, None, str]:
        nonlocal made
        for _ in range(100):
            made += 1
            yield b"x"
        return "done"

    async with in_thread(counted()) as stream:
        await until(lambda: stream._send.statistics().tasks_waiting_send)
        assert made == 5  # four that wait here, and the one in its hand
        assert [chunk async for chunk in stream] == [b"x"] * 100
        assert stream.result == "done"


async def test_feeding_a_thread() -> None:
    send, receive = trio.open_memory_channel[bytes](3)
    for chunk in (b"a", b"", b"b"):
        await send.send(chunk)
    await send.aclose()
    assert await feed_thread(b"".join, receive) == b"ab"


async def test_a_source_that_sends_nothing_holds_no_thread() -> None:
    limiter = trio.CapacityLimiter(1)
    send, receive = trio.open_memory_channel[bytes](0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(feed_thread, b"".join, receive, limiter=limiter))
        await send.send(b"a")
        await trio.testing.wait_all_tasks_blocked()
        assert limiter.borrowed_tokens == 0
        await send.aclose()


async def test_cancelling_a_fed_thread_reaches_its_cleanup() -> None:
    send, receive = trio.open_memory_channel[bytes](0)
    cleaned = threading.Event()

    def consume(chunks: object) -> None:
        try:
            list(chunks)  # type: ignore[call-overload]
        finally:
            cleaned.set()

    with send, trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed_thread, consume, receive)
            await send.send(bytes(2**18))
            await send.send(b"a")  # taken by the thread
            scope.cancel()
    assert scope.cancelled_caught
    assert cleaned.is_set()


def endless(closed: threading.Event) -> Generator[bytes, None, None]:
    try:
        while True:
            yield b"x"
    finally:
        closed.set()
