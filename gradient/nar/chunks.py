"""Small tools for streams of byte chunks. Layer: nar, pure.

Writers join small pieces into large chunks; parsers take exact sizes out of chunks of any size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# Pieces are joined up to this size: large enough that the cost per chunk vanishes, small enough for the
# second-level cache.
CHUNK_SIZE: Final = 2**18  # bytes


class Pieces:
    """Small pieces waiting to become one chunk."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def put(self, piece: bytes) -> bool:
        """Add a piece; true when it is time to take the chunk."""
        self._pieces.append(piece)
        self._size += len(piece)
        return self._size >= CHUNK_SIZE

    def take(self) -> bytes:
        """Everything put since the last time."""
        chunk = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        return chunk


class Inbox:
    """Bytes that came and were not taken yet, for a parser written as a generator.

    The parser yields None for "more bytes, please": whoever drives it puts some and goes on.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._position = 0
        self._before = 0  # bytes that came before `_buffer`

    @property
    def offset(self) -> int:
        """How many bytes were taken."""
        return self._before + self._position

    @property
    def rest(self) -> bytes:
        """The bytes that came and were not taken."""
        return self._buffer[self._position :]

    def put(self, data: bytes) -> None:
        """Add what came."""
        self._before += self._position
        self._buffer = self.rest + data
        self._position = 0

    def take(self, size: int) -> Generator[None, None, bytes]:
        """Exactly `size` bytes. They are buffered until complete: check `size` before."""
        while len(self._buffer) - self._position < size:
            yield None
        data = self._buffer[self._position : self._position + size]
        self._position += size
        return data

    def stream(self, size: int) -> Generator[bytes | None, None, None]:
        """`size` bytes in pieces as they come, without buffering."""
        while size:
            data = self._buffer[self._position : self._position + size]
            self._position += len(data)
            size -= len(data)
            yield data or None


class Kept(Generic[T]):
    """A generator's items to iterate once, and then the `value` it returned."""

    value: T

    def __init__(self, generator: Generator[bytes, None, T]) -> None:
        self._generator = generator

    def __iter__(self) -> Iterator[bytes]:
        self.value = yield from self._generator
