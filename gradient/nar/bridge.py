"""Between blocking generators and trio. Layer: nar, the only place here where threads meet tasks.

Packing, unpacking and storing are plain blocking generators. These two functions run one in a worker
thread: `in_thread` hands what it yields to a task, `feed_thread` hands a task's bytes to it. Both are
structured: when they return or are cancelled, the thread has ended and the generator is closed.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import asynccontextmanager, closing
from typing import Final, Generic, TypeVar

import trio

T = TypeVar("T")

# Chunks that wait between the thread and the task: enough to keep both busy, at most about 2 MiB.
_BACKLOG: Final = 4
# What is read of a source before its thread starts.
_HEAD_SIZE: Final = 2**18  # bytes


class ThreadStream(Generic[T]):
    """The receiving end of `in_thread`: iterate it to the end, then ask for the result."""

    def __init__(self, chunks: Generator[bytes, None, T], limiter: trio.CapacityLimiter | None) -> None:
        self._chunks = chunks
        self._limiter = limiter
        self._send, self._receive = trio.open_memory_channel[bytes](_BACKLOG)
        # What the generator returned, as a list of one; or what it raised.
        self._returned: list[T] = []
        self._error: Exception | None = None

    def __aiter__(self) -> ThreadStream[T]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            if self._error is not None:
                raise self._error from None
            raise StopAsyncIteration from None

    @property
    def result(self) -> T:
        """What the generator returned; only after the end of the iteration."""
        if not self._returned:
            raise RuntimeError("read the stream to its end first")
        return self._returned[0]

    async def _run(self) -> None:
        with self._send:
            # Not abandoned on cancellation: the thread owns descriptors, and stops at its next chunk.
            await trio.to_thread.run_sync(self._pump, limiter=self._limiter)

    def _pump(self) -> None:
        with closing(self._chunks):
            try:
                while True:
                    trio.from_thread.run(self._send.send, next(self._chunks))
            except StopIteration as stop:
                self._returned.append(stop.value)
            except Exception as error:
                self._error = error


@asynccontextmanager
async def in_thread(
    chunks: Generator[bytes, None, T], *, limiter: trio.CapacityLimiter | None = None
) -> AsyncGenerator[ThreadStream[T], None]:
    """Run the blocking generator `chunks` in a worker thread, at most a few chunks ahead of the reader.

    An error of the generator is raised to the reader, by the iteration. Leaving the block early, by an
    error or by cancellation, stops the generator at its next chunk and waits for that."""
    stream = ThreadStream(chunks, limiter)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream._run)
        try:
            yield stream
        except Exception as error:
            # Carried around the nursery, which would wrap it in a group.
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


def until_cancelled(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same chunks, in a thread of this module, ending with trio.Cancelled when the task is cancelled:
    for stages that take much and yield little, or make much of what they took in one piece."""
    for chunk in chunks:
        trio.from_thread.check_cancelled()
        yield chunk


async def feed_thread(
    consume: Callable[[Iterator[bytes]], T],
    chunks: AsyncIterable[bytes],
    *,
    limiter: trio.CapacityLimiter | None = None,
) -> T:
    """Run the blocking `consume` in a worker thread on the bytes of an asynchronous source.

    The source is read in the calling task, one chunk at a time as `consume` asks for it; the thread starts
    when the source has ended or given 256 KiB, so that a slow one holds none. From then on cancellation
    and the source's errors are raised inside `consume`, which thus cleans up as for any other error."""
    source = aiter(chunks)
    head, complete = await _head(source)

    async def receive() -> bytes | None:
        return await anext(source, None)

    def pull() -> Iterator[bytes]:
        yield from head
        while not complete and (chunk := trio.from_thread.run(receive)) is not None:
            yield chunk

    return await trio.to_thread.run_sync(lambda: consume(pull()), limiter=limiter)


async def _head(source: AsyncIterator[bytes]) -> tuple[list[bytes], bool]:
    """The first chunks of a source, and whether they are all: a small one needs no calls from the thread,
    and a slow one holds no thread before it has sent something."""
    head: list[bytes] = []
    size = 0
    while size < _HEAD_SIZE:
        if (chunk := await anext(source, None)) is None:
            return head, True
        head.append(chunk)
        size += len(chunk)
    return head, False
