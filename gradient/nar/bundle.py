"""The body of an upload: any number of packed NARs in one stream. Layer: nar.

    bundle  = "gradnar1" entry* u32(0)
    entry   = block(header) block(data)* u32(0) block(result)
    block   = u32(length, not 0) bytes            numbers are big-endian

`header` and `result` are JSON objects: EntryHeader and PackResult. The result comes last because the
sender learns it by sending. One large NAR and a thousand small ones use the same format; nothing may
follow the end.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import attrs
import trio
from attrs.validators import deep_iterable, matches_re, optional

from gradient.nar.bridge import ThreadStream, in_thread, until_cancelled
from gradient.nar.chunks import Inbox, Kept, Pieces
from gradient.nar.errors import BadUpload
from gradient.nar.pack import DEFAULT_LEVEL, Packer, PackResult, check_size
from gradient.nar.tree import Node
from gradient.nix.errors import NixError
from gradient.nix.store_path import StorePath

CONTENT_TYPE: Final = "application/x-gradient-nars"
MAGIC: Final = b"gradnar1"
# About 10,000 references, which are most of a header.
MAX_HEADER: Final = 2**20  # bytes
# What a reader may have to hold at once; writers send 256 KiB.
MAX_BLOCK: Final = 2**20  # bytes
MAX_ENTRIES: Final = 10_000
# A content address is a method and a hash: `fixed:r:sha256:<52 characters>`, `text:sha256:...`.
_CONTENT_ADDRESS: Final = re.compile(r"(text|fixed)(:[a-z0-9]{1,16})*:[A-Za-z0-9+/=]{1,128}")

_U32: Final = struct.Struct(">I")
_END: Final = _U32.pack(0)


def _is_store_path(_: object, field: attrs.Attribute[str], value: object) -> None:
    StorePath.parse(_text(field, value))


def _is_base_name(_: object, field: attrs.Attribute[str], value: object) -> None:
    StorePath.from_base(_text(field, value))


def _text(field: attrs.Attribute[str], value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field.name} is no text")
    return value


def _as_tuple(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(names)


@attrs.frozen
class EntryHeader:
    """What the sender says of a NAR before its bytes.

    `references` and `deriver` are base names. `nar_size` is a promise where it is known: the receiver
    then stops at the first byte beyond it. Raises NixError, TypeError or ValueError for other values.
    """

    store_path: str = attrs.field(validator=_is_store_path)
    references: tuple[str, ...] = attrs.field(
        default=(), converter=_as_tuple, validator=deep_iterable(_is_base_name)
    )
    deriver: str | None = attrs.field(default=None, validator=optional(_is_base_name))
    ca: str | None = attrs.field(
        default=None, validator=optional(matches_re(_CONTENT_ADDRESS, func=re.fullmatch))
    )
    nar_size: int | None = attrs.field(default=None, validator=optional(check_size))


@attrs.frozen
class BundleItem:
    """A tree to send."""

    header: EntryHeader
    source: Path | Node


@attrs.frozen
class EntryBegins:
    """An entry; its compressed bytes follow as EntryData."""

    header: EntryHeader


@attrs.frozen
class EntryData:
    """The next compressed bytes of the entry; never empty."""

    data: bytes


@attrs.frozen
class EntryEnds:
    """The entry is complete; this is what the sender says its bytes are."""

    result: PackResult


@attrs.frozen
class BundleEnds:
    """The bundle is complete."""


Event: TypeAlias = EntryBegins | EntryData | EntryEnds | BundleEnds
_Value = TypeVar("_Value")
_Parsing: TypeAlias = Generator[Event | None, None, None]


def write_bundle(
    items: Iterable[BundleItem], packer: Packer
) -> Generator[bytes, None, tuple[PackResult, ...]]:
    """The bundle of `items`, packed one after the other; returns their results in order.

    Blocking; raises UnsupportedTree and OSError in the middle: then close the connection, so that the
    receiver sees the bundle break off and keeps nothing."""
    results = []
    pieces = Pieces()
    pieces.put(MAGIC)
    for item in items:
        pieces.put(_block(_json(item.header)))
        packing = Kept(packer.pack(item.source))
        for chunk in packing:
            if pieces.put(_block(chunk)):
                yield pieces.take()
        pieces.put(_END + _block(_json(packing.value)))
        results.append(packing.value)
    pieces.put(_END)
    yield pieces.take()
    return tuple(results)


@asynccontextmanager
async def bundled(
    items: Iterable[BundleItem], *, level: int = DEFAULT_LEVEL, limiter: trio.CapacityLimiter | None = None
) -> AsyncGenerator[ThreadStream[tuple[PackResult, ...]], None]:
    """`write_bundle` in a worker thread: iterate the stream for the request's body, then read `result`.

    Errors and cancellation are those of `pack.packed`."""
    async with in_thread(write_bundle(items, Packer(level, until_cancelled)), limiter=limiter) as stream:
        yield stream


class BundleParser:
    """Turns the bytes of a bundle into events."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._events = self._bundle()
        self._ended = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes. Raises BadUpload; the parser is of no use after it."""
        self._inbox.put(data)
        events = []
        for event in self._events:
            if event is None:
                break
            events.append(event)
        if self._ended and self._inbox.rest:
            raise BadUpload("bytes follow the end of the bundle")
        return events

    def close(self) -> None:
        """No more bytes will come. Raises BadUpload when the bundle is not complete."""
        if not self._ended:
            raise BadUpload(f"the upload breaks off after {self._inbox.offset + len(self._inbox.rest)} bytes")

    def _bundle(self) -> _Parsing:
        if (yield from self._inbox.take(len(MAGIC))) != MAGIC:
            raise BadUpload("this is no bundle of NARs")
        entries = 0
        while size := (yield from self._length(MAX_HEADER)):
            entries += 1
            if entries > MAX_ENTRIES:
                raise BadUpload(f"a bundle has at most {MAX_ENTRIES} NARs: send several")
            yield EntryBegins(_read(EntryHeader, (yield from self._inbox.take(size))))
            while size := (yield from self._length(MAX_BLOCK)):
                for data in self._inbox.stream(size):
                    yield EntryData(data) if data else None
            size = yield from self._length(MAX_HEADER)
            yield EntryEnds(_read(PackResult, (yield from self._inbox.take(size))))
        self._ended = True
        yield BundleEnds()

    def _length(self, limit: int) -> Generator[None, None, int]:
        (size,) = _U32.unpack((yield from self._inbox.take(_U32.size)))
        if size > limit:
            raise BadUpload(f"the bundle has a block of {size} bytes; {limit} is the limit")
        return int(size)


def _block(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def _json(value: attrs.AttrsInstance) -> bytes:
    return json.dumps(attrs.asdict(value), separators=(",", ":")).encode()


def _read(value: type[_Value], raw: bytes) -> _Value:
    try:
        return value(**json.loads(raw))
    except (ValueError, TypeError, RecursionError, NixError) as error:
        raise BadUpload(f"an entry of the bundle is not in order: {error}") from error
