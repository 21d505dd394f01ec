"""Content after a request: frames of length and bytes, unpadded, ended by a zero length. Layer: rank 1."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final, TypeAlias

import attrs

from gradient.nix.daemon import path_info
from gradient.nix.daemon.path_info import PathInfo
from gradient.nix.daemon.primitives import u64

# Bytes of a NAR or file, in pieces of any size. A plain iterable must not block: read files in a thread.
ByteSource: TypeAlias = Iterable[bytes] | AsyncIterable[bytes]
Write: TypeAlias = Callable[[bytes], Awaitable[None]]

# Smaller pieces are joined, so that one frame is worth a system call.
_FRAME: Final = 64 << 10  # bytes

END: Final = u64(0)


@attrs.define(eq=False)
class FrameWriter:
    """Joins pieces into frames and sends them. The end is not its business: see `END`."""

    _send: Write
    _pending: bytearray = attrs.field(factory=bytearray, init=False)

    async def write(self, piece: bytes) -> None:
        """Take `piece`; sends when enough is there."""
        self._pending += piece
        if len(self._pending) >= _FRAME:
            await self.flush()

    async def flush(self) -> None:
        """Send what is left. An empty frame would be the end, so nothing is sent for nothing."""
        if self._pending:
            frame = u64(len(self._pending)) + self._pending
            self._pending.clear()
            await self._send(frame)


async def copy(source: ByteSource, write: Write) -> None:
    """Write every piece of either kind of source. An async generator is closed, also after an error."""
    if isinstance(source, AsyncGenerator):
        async with aclosing(source):
            async for piece in source:
                await write(piece)
    elif isinstance(source, AsyncIterable):
        async for piece in source:
            await write(piece)
    else:
        for piece in source:
            await write(piece)


async def copy_paths(items: Sequence[tuple[PathInfo, ByteSource]], write: Write) -> None:
    """Write the content of AddMultipleToStore: count, then info and NAR of each, references first."""
    await write(u64(len(items)))
    for info, source in items:
        await write(path_info.encode(info))
        await copy(source, write)
