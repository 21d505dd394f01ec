"""A Nix daemon for unit tests: bytes that arrive in given pieces, or a script over a memory stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import trio
import trio.testing

from gradient.nix.daemon.connection import DaemonConnection, greet
from gradient.nix.daemon.primitives import string, u64
from gradient.nix.daemon.stream import DaemonStream
from gradient.nix.daemon.transport import Transport

Script = Callable[["ScriptedDaemon"], Awaitable[None]]

LAST = u64(0x616C7473)


def error(message: str, traces: Iterable[str] = ()) -> bytes:
    """A daemon's error, spelled out here so that the decoder is not tested against our own encoder."""
    lines = [u64(0) + string(trace) for trace in traces]
    head = u64(0x63787470) + string("Error") + u64(0) + string("Error") + string(message) + u64(0)
    return head + u64(len(lines)) + b"".join(lines)


class Replay(trio.abc.Stream):
    """A stream whose other end says `pieces`, each once so many bytes were sent to it, then closes."""

    def __init__(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        self._pieces = [(after, piece) for after, piece in pieces if piece]
        self._told = trio.lowlevel.ParkingLot()
        self.sent = bytearray()
        self.is_closed = False

    async def send_all(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self.is_closed:
            raise trio.ClosedResourceError
        self.sent += data
        self._told.unpark_all()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.is_closed:
            raise trio.ClosedResourceError
        while self._pieces and len(self.sent) < self._pieces[0][0]:
            await self._told.park()
        return self._pieces.pop(0)[1] if self._pieces else b""

    async def aclose(self) -> None:
        self.is_closed = True
        await trio.lowlevel.checkpoint()


class ScriptedDaemon:
    """The daemon's end of a memory stream."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._reader = DaemonStream(Transport(stream))

    async def send(self, *parts: bytes) -> None:
        await self.stream.send_all(b"".join(parts))

    async def take(self, size: int) -> bytes:
        return await self._reader.take(size)

    async def u64(self) -> int:
        return int.from_bytes(await self.take(8), "little")

    async def string(self) -> bytes:
        size = await self.u64()
        return (await self.take(size + -size % 8))[:size]

    async def frames(self) -> bytes:
        content = b""
        while size := await self.u64():
            content += await self.take(size)
        return content

    async def greet(self, minor: int = 35) -> None:
        """Greet as a daemon of protocol 1.`minor` that trusts its client, and take its options."""
        await self.take(16)
        await self.send(u64(0x6478696F), u64(0x100 | minor))
        if minor >= 38:
            await self.take(8)
            await self.send(u64(1), string("some-feature"))
        await self.take(16)
        await self.send(string("2.test"), u64(1) if minor >= 35 else b"", LAST)
        assert await self.u64() == 19
        await self.take(12 * 8)
        for _ in range(await self.u64() * 2):
            await self.string()
        await self.send(LAST)


@asynccontextmanager
async def scripted(script: Script, minor: int = 35) -> AsyncIterator[DaemonConnection]:
    """A connection to a daemon that greets and then follows `script`."""
    ours, theirs = trio.testing.memory_stream_pair()

    async def daemon() -> None:
        actor = ScriptedDaemon(theirs)
        await actor.greet(minor)
        await script(actor)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon)
        connection = await greet(Transport(ours))
        yield connection
        await connection.aclose()
        nursery.cancel_scope.cancel()
