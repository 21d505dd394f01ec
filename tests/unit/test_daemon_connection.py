"""One connection: versions, poison, uploads that meet an error, builds that are cancelled, the pool."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress

import pytest
import trio
import trio.lowlevel
import trio.testing

from gradient.nix.daemon import pool
from gradient.nix.daemon.address import SocketAddress
from gradient.nix.daemon.build_result import BuildResult, ResultStatus
from gradient.nix.daemon.connection import greet
from gradient.nix.daemon.errors import (
    ConnectionUnusable,
    DaemonError,
    DaemonGone,
    DaemonProtocolError,
    DaemonTooOld,
)
from gradient.nix.daemon.operations import AddMethod
from gradient.nix.daemon.path_info import PathInfo
from gradient.nix.daemon.pool import DaemonPool
from gradient.nix.daemon.primitives import pairs, string, u64
from gradient.nix.daemon.stderr import LogText, Message
from gradient.nix.daemon.transport import Transport
from tests.unit.daemon_support import LAST, Replay, ScriptedDaemon, error, scripted

PATH = "/nix/store/0q6yv2alszy3ij8bisdsahrwabxhghmg-greeting.txt"
DRV = "/nix/store/0q6yv2alszy3ij8bisdsahrwabxhghmg-x.drv"
INFO = PathInfo(path=PATH, nar_hash="00" * 32, nar_size=120)
HELLO = u64(0x6478696F)


async def silence(daemon: ScriptedDaemon) -> None:
    await trio.sleep_forever()


# --- versions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("minor", [34, 35, 37, 38, 39])
async def test_the_smaller_version_is_spoken(minor: int) -> None:
    async with scripted(silence, minor) as connection:
        assert connection.info.minor == min(minor, 38)
        assert connection.info.trusted is (True if minor >= 35 else None)


async def test_an_old_daemon_is_refused_in_clear_words() -> None:
    stream = Replay([(0, HELLO + u64(0x100 | 33) + bytes(64))])
    with pytest.raises(DaemonTooOld, match=r"speaks protocol 1\.33, but 1\.34 is needed: install Nix 2\.8"):
        await greet(Transport(stream))
    assert stream.is_closed


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", HELLO + u64(0x200)])
async def test_what_is_no_nix_daemon_is_refused(said: bytes) -> None:
    stream = Replay([(0, said)])
    with pytest.raises(DaemonProtocolError):
        await greet(Transport(stream))
    assert stream.is_closed


@pytest.mark.parametrize("minor", [34, 35, 37, 38])
async def test_build_results_of_each_version(minor: int) -> None:
    async def build(daemon: ScriptedDaemon) -> None:
        assert await daemon.u64() == 46
        assert [await daemon.u64(), await daemon.string(), await daemon.u64()] == [1, f"{DRV}!*".encode(), 0]
        realisation = json.dumps({"id": "sha256:00!out", "outPath": "abc-x", "signatures": []})
        cpu = u64(1) + u64(250_000) + u64(1) + u64(2**64 - 1) if minor >= 37 else b""
        times = u64(1) + u64(0) + u64(100) + u64(200)
        result = u64(0) + string("") + times + cpu + pairs([("sha256:00!out", realisation)])
        await daemon.send(u64(0x6F6C6D67), string("a line\n"), LAST, u64(1), string(f"{DRV}!*"), result)

    seen: list[Message] = []

    async def slow_listener(message: Message) -> None:
        await trio.lowlevel.checkpoint()
        seen.append(message)

    async with scripted(build, minor) as connection:
        results = await connection.build_paths_with_results([f"{DRV}!*"], on_message=slow_listener)
    assert seen == [LogText("a line\n")]
    expected = BuildResult(
        derived_path=f"{DRV}!*",
        status=ResultStatus.BUILT,
        times_built=1,
        started=100,
        stopped=200,
        cpu_user_us=250_000 if minor >= 37 else None,
        cpu_system_us=-1 if minor >= 37 else None,
        outputs={"out": "/nix/store/abc-x"},
    )
    assert results == (expected,)


def test_an_unknown_status_is_a_failure() -> None:
    assert ResultStatus(99) is ResultStatus.MISC_FAILURE


@pytest.mark.parametrize("realisation", ["", "[]", "{}", '{"outPath": 3}', "[" * 100_000])
async def test_an_output_without_a_path_is_refused(realisation: str) -> None:
    async def build(daemon: ScriptedDaemon) -> None:
        await daemon.u64()
        result = u64(0) + string("") + bytes(32) + pairs([("sha256:00!out", realisation)])
        await daemon.send(LAST, u64(1), string(f"{DRV}!*"), result)

    async with scripted(build) as connection:
        with pytest.raises(DaemonProtocolError):
            await connection.build_paths_with_results([f"{DRV}!*"])


# --- poison -------------------------------------------------------------------------------------------


async def test_an_error_closes_the_connection() -> None:
    async def refuse(daemon: ScriptedDaemon) -> None:
        await daemon.u64()
        await daemon.send(error("\x1b[31;1merror:\x1b[0m path is bad", ["while asking"]))

    async with scripted(refuse) as connection:
        with pytest.raises(DaemonError, match=r"^error: path is bad$"):
            await connection.is_valid_path("bad")
        assert not connection.is_usable
        with pytest.raises(ConnectionUnusable, match="IS_VALID_PATH failed"):
            await connection.is_valid_path(PATH)


async def test_a_cancelled_operation_closes_the_connection(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(silence) as connection:
        with trio.move_on_after(5) as scope:
            await connection.is_valid_path(PATH)
        assert scope.cancelled_caught
        with pytest.raises(ConnectionUnusable):
            await connection.is_valid_path(PATH)


async def test_a_cancelled_build_waits_for_a_pause_before_it_closes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    closed_at: list[float] = []

    async def chat(daemon: ScriptedDaemon) -> None:
        for _ in range(3):  # lines 0.04 s apart, then silence
            await daemon.send(u64(0x6F6C6D67), string("line"))
            await trio.sleep(0.04)
        with suppress(DaemonGone):
            while True:
                await daemon.take(1)
        closed_at.append(trio.current_time())

    async with scripted(chat) as connection:
        start = trio.current_time()
        with trio.CancelScope() as scope:
            await connection.build_paths_with_results([DRV], on_message=lambda message: scope.cancel())
        await trio.testing.wait_all_tasks_blocked()
    assert scope.cancelled_caught
    assert closed_at == [pytest.approx(start + 0.13)]


async def test_a_second_task_is_refused_and_harms_nothing() -> None:
    async def answer(daemon: ScriptedDaemon) -> None:
        await daemon.u64()
        await trio.testing.wait_all_tasks_blocked()
        await daemon.send(LAST, u64(1))

    async with scripted(answer) as connection, trio.open_nursery() as nursery:

        async def intrude() -> None:
            with pytest.raises(ConnectionUnusable, match="busy with IS_VALID_PATH"):
                await connection.is_valid_path(PATH)

        nursery.start_soon(intrude)
        assert await connection.is_valid_path(PATH) is True


async def test_an_unread_nar_poisons() -> None:
    nar = b"".join(map(string, ("nix-archive-1", "(", "type", "regular", "contents")))

    async def send_nar(daemon: ScriptedDaemon) -> None:
        await daemon.u64()
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await daemon.send(LAST, nar, string(bytes(500_000)), string(")"))

    async with scripted(send_nar) as connection:
        async with connection.nar_from_path(PATH) as chunks:
            assert len(await anext(chunks)) <= 128 << 10
        assert not connection.is_usable
    async with scripted(send_nar) as connection:
        async with connection.nar_from_path(PATH) as chunks:
            total = sum([len(chunk) async for chunk in chunks])
        assert (total, connection.is_usable) == (len(nar) + 8 + 500_000 + len(string(")")), True)


# --- content ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads_on", [False, True])
async def test_an_early_error_ends_an_upload(reads_on: bool) -> None:
    async def refuse(daemon: ScriptedDaemon) -> None:
        await daemon.take(200)
        await daemon.send(error("no space left"))
        with suppress(DaemonGone):
            while reads_on:
                await daemon.take(1000)
        if not reads_on:
            await trio.sleep_forever()

    async with scripted(refuse) as connection:
        with pytest.raises(DaemonError, match="no space left"):
            await connection.add_to_store_nar(INFO, itertools.repeat(bytes(100_000)))
        assert not connection.is_usable


async def test_a_source_that_fails_is_heard_and_poisons() -> None:
    def broken() -> Iterator[bytes]:
        yield b"x"
        raise OSError("the file went away")

    async with scripted(silence) as connection:
        with pytest.raises(OSError, match="went away"):
            await connection.add_to_store_nar(INFO, broken())
        assert not connection.is_usable


class Endless(AsyncGenerator[bytes, None]):
    """What `async def` with `yield` makes, spelled out to see its end."""

    is_closed = False

    async def asend(self, value: None) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes(100_000)

    async def athrow(self, *args: object) -> bytes:
        self.is_closed = True
        await trio.lowlevel.checkpoint()
        raise StopAsyncIteration


async def test_an_async_generator_is_closed_when_the_daemon_refuses() -> None:
    async def refuse(daemon: ScriptedDaemon) -> None:
        await daemon.take(200)
        await daemon.send(error("no"))

    source = Endless()
    async with scripted(refuse) as connection:
        with pytest.raises(DaemonError):
            await connection.add_to_store_nar(INFO, source)
    assert source.is_closed


async def test_success_before_the_content_is_a_lie() -> None:
    async def lie(daemon: ScriptedDaemon) -> None:
        await daemon.take(8)
        await daemon.send(LAST)
        await trio.sleep_forever()

    async with scripted(lie) as connection:
        with pytest.raises(DaemonProtocolError, match="before it had all content"):
            await connection.add_to_store_nar(INFO, itertools.repeat(bytes(100_000)))


async def test_content_is_framed_once_and_whole() -> None:
    pieces = [b"abc", b"", bytes(70_000), b"z"]
    got: list[bytes] = []

    async def take(daemon: ScriptedDaemon) -> None:
        assert await daemon.u64() == 7
        assert [await daemon.string(), await daemon.string()] == [b"name", b"text:sha256"]
        assert [await daemon.u64(), await daemon.string(), await daemon.u64()] == [1, PATH.encode(), 0]
        got.append(await daemon.frames())
        info = (
            string(PATH) + string("") + string("00" * 32) + bytes(8) + u64(9) + u64(120) + u64(0) + bytes(8)
        )
        await daemon.send(LAST, info, string("text:sha256:x"))

    async with scripted(take) as connection:
        info = await connection.add_to_store("name", AddMethod.TEXT, pieces, [PATH])
    assert got == [b"".join(pieces)]
    assert info == PathInfo(path=PATH, nar_hash="00" * 32, nar_size=120, registered=9, ca="text:sha256:x")


# --- the pool -----------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery) -> list[trio.abc.Stream]:
    """Makes the pool connect to scripted daemons that say yes; the list is their ends, in order."""
    ends: list[trio.abc.Stream] = []

    async def yes(daemon: ScriptedDaemon) -> None:
        with suppress(DaemonGone, trio.BrokenResourceError, trio.ClosedResourceError):
            await daemon.greet()
            while await daemon.u64():
                await daemon.string()
                await daemon.send(LAST, u64(1))

    async def connect(address: object, options: object) -> object:
        ours, theirs = trio.testing.memory_stream_pair()
        ends.append(theirs)
        nursery.start_soon(yes, ScriptedDaemon(theirs))
        return await greet(Transport(ours))

    monkeypatch.setattr(pool, "connect", connect)
    return ends


async def test_the_pool_reuses_and_waits(opened: list[trio.abc.Stream]) -> None:
    async with DaemonPool(SocketAddress("/unused"), limit=2) as connections:

        async def ask() -> None:
            async with connections.connection() as connection:
                assert await connection.is_valid_path(PATH)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ask)
        assert len(opened) == 2
        async with connections.dedicated() as connection:
            assert await connection.is_valid_path(PATH)
        assert not connection.is_usable
        assert len(opened) == 3


async def test_the_pool_drops_a_poisoned_connection(opened: list[trio.abc.Stream]) -> None:
    async with DaemonPool(SocketAddress("/unused"), limit=1) as connections:
        async with connections.connection() as first:
            with trio.CancelScope() as scope:
                scope.cancel()
                await first.is_valid_path(PATH)
        async with connections.connection() as second:
            assert await second.is_valid_path(PATH)
        assert (second is first, len(opened)) == (False, 2)
    assert not second.is_usable


async def test_a_borrower_after_the_close_closes_its_own(opened: list[trio.abc.Stream]) -> None:
    connections = DaemonPool(SocketAddress("/unused"), limit=1)
    async with connections.connection() as connection:
        async with connections:
            pass
        assert await connection.is_valid_path(PATH)
    assert not connection.is_usable


async def test_cancelled_at_any_step_a_connection_is_good_or_closed() -> None:
    async def yes(daemon: ScriptedDaemon) -> None:
        with suppress(DaemonGone):
            while await daemon.u64():
                await daemon.string()
                await daemon.send(LAST, u64(1))

    class CancelAt(trio.abc.Instrument):
        def __init__(self, steps: int, scope: trio.CancelScope, task: trio.lowlevel.Task) -> None:
            self.left, self.scope, self.task = steps, scope, task

        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            self.left -= task is self.task
            if self.left == 0:
                self.scope.cancel()

    async def attempt(steps: int) -> bool:
        async with scripted(yes) as connection:
            with trio.CancelScope() as scope:
                instrument = CancelAt(steps, scope, trio.lowlevel.current_task())
                trio.lowlevel.add_instrument(instrument)
                try:
                    assert await connection.is_valid_path(PATH)
                    assert await connection.is_valid_path(PATH)
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            if connection.is_usable:
                assert await connection.is_valid_path(PATH)
            return scope.cancelled_caught

    steps = 1
    while await attempt(steps):
        steps += 1
    assert steps > 4


async def test_the_pool_gives_up_old_connections(
    opened: list[trio.abc.Stream], mock_clock: trio.testing.MockClock
) -> None:
    async with DaemonPool(SocketAddress("/unused"), limit=2) as connections:
        async with connections.connection() as first:
            assert await first.is_valid_path(PATH)
        mock_clock.jump(pool.MAX_AGE - 1)
        await connections.sweep()
        async with connections.connection() as still:
            assert still is first
            mock_clock.jump(1)
        assert not first.is_usable  # too old when it came back
        async with connections.connection() as second:
            assert await second.is_valid_path(PATH)
        assert (second is first, len(opened)) == (False, 2)
        mock_clock.jump(pool.MAX_AGE)
        await connections.sweep()
        assert not second.is_usable  # too old while it was idle
