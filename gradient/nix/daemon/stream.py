"""Decoders and dialogues driven over a transport: buffered reads, bounded, with our own errors.

Layer: rank 1. The only place that turns "the stream ended" into `DaemonGone`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias, TypeVar

import attrs
import trio

from gradient.nix.daemon.errors import DaemonError, DaemonGone, DaemonProtocolError
from gradient.nix.daemon.handshake import Dialogue
from gradient.nix.daemon.primitives import Decoder
from gradient.nix.daemon.stderr import Failed, Last, Message, read_message
from gradient.nix.daemon.transport import Transport

T = TypeVar("T")
# Told every message of a running operation, in order. An awaitable is awaited before the next is read.
MessageSink: TypeAlias = Callable[[Message], Awaitable[None] | None]

# One receive: a pipe's and a socket's usual buffer.
_RECEIVE: Final = 64 << 10  # bytes
# A client that waits for an answer says nothing, or the first bytes of its next request.
_KEPT: Final = 64 << 10  # bytes
# A daemon has handled a line of a build's log long before.
_QUIET: Final = 0.05  # seconds


@attrs.define(eq=False)
class DaemonStream:
    """Reads and writes of one connection. A cancelled `send` or `read` leaves it unusable: close it."""

    transport: Transport
    # Received and not yet consumed. Never more than one receive beyond what the running decoder asked for.
    _buffer: bytearray = attrs.field(factory=bytearray, init=False)

    @property
    def is_silent(self) -> bool:
        """Whether no byte waits, here or in the kernel: true of a healthy idle connection."""
        return not self._buffer and self.transport.is_silent()

    async def send(self, data: bytes) -> None:
        """Send all of `data`. Raises `DaemonGone`."""
        try:
            await self.transport.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._gone("while a request was sent") from error

    async def read(self, decoder: Decoder[T]) -> T:
        """Feed `decoder` until it returns. Raises `DaemonGone`, and what the decoder raises."""
        try:
            need = next(decoder)
            while True:
                need = decoder.send(await self.take(need))
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def converse(self, dialogue: Dialogue[T]) -> T:
        """Run a handshake: read what it asks for, send what it says."""
        try:
            step = next(dialogue)
            while True:
                if isinstance(step, bytes):
                    await self.send(step)
                    step = dialogue.send(b"")
                else:
                    step = dialogue.send(await self.take(step))
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def take(self, size: int) -> bytes:
        """The next `size` bytes exactly. The caller bounds `size`."""
        while len(self._buffer) < size:
            self._buffer += await self._receive()
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def take_some(self) -> bytes:
        """Whatever comes next, at least one byte."""
        data = bytes(self._buffer) or await self._receive()
        self._buffer.clear()
        return data

    async def finish_messages(self, on_message: MessageSink | None = None) -> None:
        """Read messages up to the last one. Raises `DaemonError` when it says that the operation failed."""
        while True:
            message = await self.read(read_message())
            if isinstance(message, Last):
                return
            if isinstance(message, Failed):
                raise DaemonError(message.message)
            if on_message is not None and inspect.isawaitable(told := on_message(message)):
                await told

    async def wait_for_end(self) -> None:
        """Wait, as long as it takes, for the other end to close: then raise `DaemonGone`.

        Cancel it to go on with the stream. What arrives meanwhile is kept, up to a limit.
        """
        while len(self._buffer) < _KEPT:
            self._buffer += await self._receive()
        raise DaemonProtocolError("the other end keeps talking where it should wait")

    async def settle(self) -> None:
        """Discard what comes until nothing has come for `_QUIET` seconds: the end of the stream's use."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            data = b"anything"
            while data:
                data = b""
                with trio.move_on_after(_QUIET):
                    data = bytes(await self.transport.stream.receive_some(_RECEIVE))

    async def _receive(self) -> bytes:
        try:
            data = await self.transport.stream.receive_some(_RECEIVE)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._gone("while an answer was awaited") from error
        if not data:
            raise self._gone("before its answer was complete")
        return bytes(data)

    def _gone(self, when: str) -> DaemonGone:
        words = self.transport.last_words()
        return DaemonGone(f"the Nix daemon closed the connection {when}" + (f": {words}" if words else ""))
