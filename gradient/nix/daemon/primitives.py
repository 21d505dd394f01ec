"""The words of the protocol: 64-bit little-endian integers, padded strings, lists and maps of them.

Layer: rank 1, pure: no IO, no trio. Encoders return bytes. Decoders are generators: they yield the
number of bytes they need next, are sent exactly those, and return their value, so one decoder serves
a socket and a byte string in a test. A size is checked against its cap before anything is read for
it: all these bytes come from a peer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable
from typing import Final, TypeAlias, TypeVar

from gradient.nix.daemon.errors import DaemonProtocolError

T = TypeVar("T")
Decoder: TypeAlias = Generator[int, bytes, T]

# Store paths, hashes, signatures and realisation JSON stay far below this.
MAX_STRING: Final = 1 << 20  # bytes
# Log lines and error texts come from builders: longer ones are cut, never refused, as a build must not
# fail because it printed a long line.
MAX_TEXT: Final = 256 << 10  # bytes kept
# The references of the largest known paths are a few thousand; replies about many paths are asked for in
# pages. An item costs at least 8 bytes on the wire, so the cap bounds memory by what was received.
MAX_ITEMS: Final = 1 << 20
# What a decoder asks for at once while it passes over bytes that it does not keep.
PIECE: Final = 64 << 10  # bytes

_U64: Final = struct.Struct("<Q")
_PADDING: Final = tuple(bytes(-size % 8) for size in range(8))


def u64(value: int) -> bytes:
    """One integer. Booleans are 0 and 1."""
    return _U64.pack(value)


def string(text: str | bytes) -> bytes:
    """One string: length, bytes, zeros up to a multiple of 8."""
    data = text.encode() if isinstance(text, str) else text
    return _U64.pack(len(data)) + data + _PADDING[len(data) % 8]


def strings(texts: Iterable[str]) -> bytes:
    """A list of strings: count, items."""
    items = [string(text) for text in texts]
    return u64(len(items)) + b"".join(items)


def pairs(items: Iterable[tuple[str, str]]) -> bytes:
    """A map: count, then key and value of each."""
    encoded = [string(key) + string(value) for key, value in items]
    return u64(len(encoded)) + b"".join(encoded)


def read_u64() -> Decoder[int]:
    """One integer."""
    value: int = _U64.unpack((yield 8))[0]
    return value


def read_bool() -> Decoder[bool]:
    """One integer that must be 0 or 1."""
    value = yield from read_u64()
    if value > 1:
        raise DaemonProtocolError(f"the daemon sent {value} where a yes or no belongs")
    return value == 1


def read_count(limit: int = MAX_ITEMS) -> Decoder[int]:
    """The count in front of a list or map."""
    count = yield from read_u64()
    if count > limit:
        raise DaemonProtocolError(f"the daemon announced a list of {count} items, more than {limit}")
    return count


def read_string(limit: int = MAX_STRING) -> Decoder[str]:
    """One string of at most `limit` bytes, valid UTF-8."""
    return (yield from read_sized_string((yield from read_u64()), limit))


def read_sized_string(size: int, limit: int) -> Decoder[str]:
    """The rest of a string whose size has been read."""
    if size > limit:
        raise DaemonProtocolError(f"the daemon announced a string of {size} bytes, more than {limit}")
    data = yield from _padded(size)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DaemonProtocolError(f"the daemon sent a name that is not UTF-8: {data[:80]!r}") from None


def read_text(limit: int = MAX_TEXT) -> Decoder[str]:
    """Text for people: cut after `limit` bytes, bytes that are not UTF-8 replaced."""
    size = yield from read_u64()
    if size <= limit:
        data = yield from _padded(size)
        return data.decode(errors="replace")
    kept = yield limit
    yield from skip(size - limit + -size % 8)
    return kept.decode(errors="replace") + f"… ({size - limit} bytes cut)"


def read_strings(limit: int = MAX_ITEMS) -> Decoder[tuple[str, ...]]:
    """A list of strings."""
    return (yield from read_list(read_string, limit))


def read_list(item: Callable[[], Decoder[T]], limit: int = MAX_ITEMS) -> Decoder[tuple[T, ...]]:
    """A list of whatever `item` decodes."""
    count = yield from read_count(limit)
    values = []
    for _ in range(count):
        values.append((yield from item()))
    return tuple(values)


def read_pair() -> Decoder[tuple[str, str]]:
    """A key and its value."""
    key = yield from read_string()
    return key, (yield from read_string())


def read_pairs(limit: int = MAX_ITEMS) -> Decoder[tuple[tuple[str, str], ...]]:
    """A map, as its items."""
    return (yield from read_list(read_pair, limit))


def skip(size: int) -> Decoder[None]:
    """Pass over `size` bytes."""
    while size > 0:
        size -= len((yield min(size, PIECE)))


def _padded(size: int) -> Decoder[bytes]:
    data = yield size + -size % 8
    if any(data[size:]):
        raise DaemonProtocolError("the daemon sent a string whose padding is not zero")
    return data[:size]
