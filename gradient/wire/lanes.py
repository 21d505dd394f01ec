"""What a link sends next: two bounded lanes, control before bulk. No sockets.

Control is small and urgent (heartbeats, assignments, aborts), bulk is the build log and whatever must
not overtake it. Without lanes a build that prints fast would hold up the abort of another.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import trio

from gradient.wire.codec import Message
from gradient.wire.messages import JobCompleted, JobFailed, LogChunk, RequestJob


class Lane(Enum):
    """The two lanes; the value is how many frames one holds before its senders wait."""

    # Deep: a sender of control messages is a loop that should not wait for a log.
    CONTROL = 256
    # Shallow: log chunks wait at their source, where the log's own limits can drop them.
    BULK = 16


# LogChunk is the bulk itself. The outcome of a job stays behind the job's own log, or the server closes
# the job and drops the log's tail. RequestJob stays behind the outcome that freed the slot, or the
# server still counts the slot as taken and the next job waits for the next heartbeat.
_BULK: Final = frozenset({LogChunk, JobCompleted, JobFailed, RequestJob})


def lane_of(message: Message) -> Lane:
    """The lane of `message`. Messages of one lane keep their order; control may overtake bulk."""
    return Lane.BULK if type(message) in _BULK else Lane.CONTROL


class Outbox:
    """Frames on their way to the one writer."""

    def __init__(self) -> None:
        # In order of precedence. A memory channel is the fair bounded queue: a put is atomic under
        # cancellation, and closing it wakes every waiting sender.
        self._lanes = {lane: trio.open_memory_channel[bytes](lane.value) for lane in Lane}
        self._filled = trio.Event()
        self._closed = False

    async def put(self, lane: Lane, frame: bytes) -> None:
        """Wait for room and queue `frame`. Cancelled while waiting: it is not queued.

        Raises trio.ClosedResourceError once closed.
        """
        await self._lanes[lane][0].send(frame)
        self._filled.set()

    async def next(self) -> bytes | None:
        """The frame to write next; None once closed and empty. For one reader."""
        while True:
            frame = self._take()
            if frame is not None or self._closed:
                return frame
            await self._filled.wait()
            self._filled = trio.Event()

    def close(self) -> None:
        """Take no more frames; those queued can still be read, those still waiting are refused."""
        self._closed = True
        for sender, _ in self._lanes.values():
            sender.close()
        self._filled.set()

    def _take(self) -> bytes | None:
        for _, receiver in self._lanes.values():
            try:
                return receiver.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel):
                continue
        return None
