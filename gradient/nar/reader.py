"""The NAR reader: bytes in, events out, in any pieces. Layer: nar, pure.

Every byte comes from a stranger: lengths are checked before anything is waited for or allocated, and
what is accepted is exactly what the writer can produce.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Final, TypeAlias

import attrs

from gradient.nar.chunks import Inbox
from gradient.nar.errors import InvalidNar
from gradient.nar.format import (
    CLOSE,
    CONTENTS,
    DIRECTORY,
    ENTRY,
    ENTRY_NODE,
    EXECUTABLE,
    MAGIC,
    MAX_DEPTH,
    MAX_NAME,
    MAX_TARGET,
    NODE,
    REGULAR,
    SYMLINK,
    TARGET,
    U64,
    name_fault,
    padding,
    target_fault,
)

_REGULAR: Final = NODE + REGULAR
_SYMLINK: Final = NODE + SYMLINK
_DIRECTORY: Final = NODE + DIRECTORY
# Every node begins with at least this many bytes, and they tell the three kinds apart.
_KIND_SIZE: Final = len(_REGULAR)


@attrs.frozen
class FileBegins:
    """A file; `size` bytes of FileData follow. `offset` is where its content starts in the NAR."""

    name: bytes  # b"" for the root, here and below
    size: int
    executable: bool
    offset: int


@attrs.frozen
class FileData:
    """The next bytes of the file; never empty."""

    data: bytes


@attrs.frozen
class SymlinkFound:
    """A symlink."""

    name: bytes
    target: bytes


@attrs.frozen
class DirectoryBegins:
    """A directory; its entries follow, sorted, up to its DirectoryEnds."""

    name: bytes


@attrs.frozen
class DirectoryEnds:
    """The innermost open directory is complete."""


@attrs.frozen
class NarEnds:
    """The NAR is complete, and `size` bytes long."""

    size: int


Event: TypeAlias = FileBegins | FileData | SymlinkFound | DirectoryBegins | DirectoryEnds | NarEnds

# The parser is a generator: it yields None when it needs more bytes, and ends after NarEnds.
_Parsing: TypeAlias = Generator[Event | None, None, None]


class NarParser:
    """Turns the bytes of one NAR into events.

    `nar_size` is the declared size: not a byte more is read, not one less accepted. With `unframed`,
    bytes after the end are not an error but `rest`: a stream that has no length of its own, as the
    daemon's NarFromPath, ends where its NAR ends.
    """

    def __init__(self, nar_size: int | None = None, *, unframed: bool = False) -> None:
        self._limit = nar_size
        self._unframed = unframed
        self._inbox = Inbox()
        self._events = self._nar()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the whole NAR was read."""
        return self._ended

    @property
    def rest(self) -> bytes:
        """The bytes after the end of the NAR."""
        return self._inbox.rest if self._ended else b""

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes. Raises InvalidNar; the parser is of no use after it."""
        self._inbox.put(data)
        events = []
        for event in self._events:
            if event is None:
                break
            events.append(event)
        if self.rest and not self._unframed:
            raise InvalidNar("bytes follow the end of the NAR")
        return events

    def close(self) -> None:
        """No more bytes will come. Raises InvalidNar when the NAR is not complete."""
        if not self._ended:
            raise InvalidNar(f"the NAR breaks off after {self._offset + len(self._inbox.rest)} bytes")

    @property
    def _offset(self) -> int:
        return self._inbox.offset

    def _nar(self) -> _Parsing:
        yield from self._expect(MAGIC)
        yield from self._node(b"", 0)
        if self._limit not in (None, self._offset):
            raise self._invalid(f"the NAR has {self._offset} bytes, but {self._limit} were declared")
        self._ended = True
        yield NarEnds(self._offset)

    def _node(self, name: bytes, depth: int) -> _Parsing:
        if depth == MAX_DEPTH:
            raise self._invalid(f"the tree is deeper than {MAX_DEPTH} levels")
        kind = yield from self._take(_KIND_SIZE)
        if kind == _REGULAR:
            yield from self._regular(name)
        elif kind == _DIRECTORY[:_KIND_SIZE]:
            yield from self._expect(_DIRECTORY[_KIND_SIZE:])
            yield from self._directory(name, depth)
        elif kind == _SYMLINK:
            yield from self._symlink(name)
        else:
            raise self._invalid("a node is none of regular, directory and symlink")

    def _regular(self, name: bytes) -> _Parsing:
        word = yield from self._take(len(CONTENTS))
        executable = word == EXECUTABLE[: len(word)]
        if executable:
            yield from self._expect(EXECUTABLE[len(word) :])
            word = yield from self._take(len(CONTENTS))
        if word != CONTENTS:
            raise self._invalid("a file has no contents")
        size = yield from self._length(None, "a file")
        yield FileBegins(name, size, executable, self._offset)
        for data in self._inbox.stream(size):
            yield FileData(data) if data else None
        yield from self._expect(padding(size) + CLOSE)

    def _symlink(self, name: bytes) -> _Parsing:
        yield from self._expect(TARGET)
        target = yield from self._string(MAX_TARGET, "a symlink target")
        if fault := target_fault(target):
            raise self._invalid(fault)
        yield from self._expect(CLOSE)
        yield SymlinkFound(name, target)

    def _directory(self, name: bytes, depth: int) -> _Parsing:
        yield DirectoryBegins(name)
        previous = b""
        while (word := (yield from self._take(len(CLOSE)))) != CLOSE:
            if word != ENTRY[: len(word)]:
                raise self._invalid("a directory holds something else than entries")
            yield from self._expect(ENTRY[len(word) :])
            entry = yield from self._string(MAX_NAME, "a name")
            if fault := name_fault(entry, previous):
                raise self._invalid(fault)
            yield from self._expect(ENTRY_NODE)
            yield from self._node(entry, depth + 1)
            yield from self._expect(CLOSE)
            previous = entry
        yield DirectoryEnds()

    def _string(self, limit: int, what: str) -> Generator[None, None, bytes]:
        size = yield from self._length(limit, what)
        text = yield from self._take(size)
        yield from self._expect(padding(size))
        return text

    def _length(self, limit: int | None, what: str) -> Generator[None, None, int]:
        (size,) = U64.unpack((yield from self._take(U64.size)))
        left = size if self._limit is None else self._limit - self._offset
        if size > (left if limit is None else min(left, limit)):
            raise self._invalid(f"{what} of {size} bytes, more than there may be")
        return int(size)

    def _expect(self, expected: bytes) -> Generator[None, None, None]:
        if (yield from self._take(len(expected))) != expected:
            raise self._invalid(f"something else than {expected.strip(bytes(1))!r}")

    def _take(self, size: int) -> Generator[None, None, bytes]:
        if self._limit is not None and self._offset + size > self._limit:
            raise self._invalid(f"more than the {self._limit} bytes that were declared")
        return (yield from self._inbox.take(size))

    def _invalid(self, what: str) -> InvalidNar:
        return InvalidNar(f"this is no valid NAR: {what} (at byte {self._offset})")


def parse(chunks: Iterable[bytes], nar_size: int | None = None) -> Iterator[Event]:
    """The events of the one NAR that `chunks` are; raises InvalidNar."""
    parser = NarParser(nar_size)
    for chunk in chunks:
        yield from parser.feed(chunk)
    parser.close()
