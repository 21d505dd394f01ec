"""A byte stream that knows how long its peer has been silent or unwilling to read. No WebSocket here.

The WebSocket library shows neither: its reader stops reading while our message queue is full, and then
sees no ping, pong or close. Below it the facts are plain. A read that waits for bytes is the peer's
silence; no read waiting means that we are the ones who pause, and nobody is silent.
"""

from __future__ import annotations

from typing import Final

import trio

# Progress is seen in pieces of this size: at the stall limit the slowest link that lives carries 2 kB/s.
_PIECE: Final = 64 * 2**10  # bytes


class WatchedStream(trio.abc.Stream):
    """`inner`, watched. `stall_limit` is in seconds and bounds each piece written, not a whole message."""

    def __init__(self, inner: trio.abc.Stream, stall_limit: float) -> None:
        self._inner = inner
        self._stall_limit = stall_limit
        # Since when the current read waits; None while nobody reads.
        self._waiting_since: float | None = None
        # The peer took nothing for the stall limit; set before the send raises.
        self.stalled = False
        # No further byte will come: end of stream, broken, or closed by us.
        self.ended = trio.Event()

    def silent_for(self) -> float:
        """Seconds for which we have waited for a byte in vain; 0 while we do not read."""
        return 0.0 if self._waiting_since is None else trio.current_time() - self._waiting_since

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """As trio's; raises BrokenResourceError with `stalled` set when the peer stops reading."""
        with memoryview(data) as view:
            for start in range(0, len(view), _PIECE):
                await self._send_piece(view[start : start + _PIECE])

    async def _send_piece(self, piece: memoryview) -> None:
        with trio.move_on_after(self._stall_limit) as scope:
            await self._inner.send_all(piece)
        if scope.cancelled_caught:
            # How much of the piece went out is unknown: nothing may follow it.
            self.stalled = True
            raise trio.BrokenResourceError(f"the peer read nothing for {self._stall_limit:g} s")

    async def wait_send_all_might_not_block(self) -> None:
        """As trio's."""
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As trio's."""
        self._waiting_since = trio.current_time()
        try:
            data = await self._inner.receive_some(max_bytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.ended.set()
            raise
        finally:
            self._waiting_since = None
        if not data:
            self.ended.set()
        return data

    async def aclose(self) -> None:
        """As trio's."""
        self.ended.set()
        await self._inner.aclose()
