"""Packing: a tree in, zstd-compressed NAR out, with the hashes and sizes of both. Layer: nar.

The generators are blocking; `packed` runs one in a worker thread, where reading, hashing and
compressing release the interpreter lock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import trio
import zstandard

from gradient.nar.bridge import ThreadStream, in_thread, until_cancelled
from gradient.nar.chunks import CHUNK_SIZE, Kept
from gradient.nar.hashing import HashingSink, dump
from gradient.nar.tree import Node
from gradient.nix.hashes import Hash

# What `nix copy` uses too. On a tree of scripts and libraries: level 1 309 MB/s and 3.2 times smaller,
# level 3 255 MB/s and 3.6, level 6 97 MB/s and 3.9, level 9 59 MB/s and 4.1. Beyond 3 each byte saved
# costs a builder more time than a network of 100 Mbit/s takes to carry it.
DEFAULT_LEVEL: Final = 3
# A NAR up to this size is compressed in one call, with its size in the frame: most are, and the reader
# can then allocate what it needs. Larger ones are streamed.
SMALL_NAR: Final = 2**20  # bytes
MAX_SIZE: Final = 2**63 - 1  # bytes


def check_size(_: object, field: attrs.Attribute[int], value: object) -> None:
    """Validator: a positive number of bytes that the database can hold."""
    if type(value) is not int or not 0 < value <= MAX_SIZE:
        raise ValueError(f"{field.name} is no size in bytes")


def _check_hash(_: object, field: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or Hash.parse(value, "sha256").nix32() != value:
        raise ValueError(f"{field.name} is not in the form sha256:<nix32>")


@attrs.frozen
class PackResult:
    """A packed NAR: hashes as `sha256:<nix32>`, sizes in bytes; `file` is the compressed form.

    Raises ValueError or InvalidHash for anything else."""

    nar_hash: str = attrs.field(validator=_check_hash)
    nar_size: int = attrs.field(validator=check_size)
    file_hash: str = attrs.field(validator=_check_hash)
    file_size: int = attrs.field(validator=check_size)


# Yields compressed chunks, returns what they are.
Packing: TypeAlias = Generator[bytes, None, PackResult]
Watch: TypeAlias = Callable[[Iterator[bytes]], Iterator[bytes]]


class Packer:
    """Packs one tree after the other with one compression context; not for two threads at once.

    `watch` sees the NAR's chunks pass, and may end it all by an error."""

    def __init__(self, level: int = DEFAULT_LEVEL, watch: Watch = iter) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._watch = watch

    def pack(self, source: Path | Node) -> Packing:
        """The compressed NAR of a tree.

        Blocking; raises UnsupportedTree and OSError, also in the middle."""
        chunks = self._watch(dump(source))
        nar, file = HashingSink(), HashingSink()
        head = _head(chunks)
        if sum(map(len, head)) <= SMALL_NAR:
            compressed: Iterable[bytes] = (self._whole(nar, b"".join(head)),)
        else:
            compressed = self._streamed(nar.through(chain(head, chunks)))
        yield from file.through(compressed)
        return PackResult(nar.hash().nix32(), nar.size, file.hash().nix32(), file.size)

    def _whole(self, sink: HashingSink, nar: bytes) -> bytes:
        sink.update(nar)
        return self._compressor.compress(nar)

    def _streamed(self, nar: Iterable[bytes]) -> Iterator[bytes]:
        chunker = self._compressor.chunker(chunk_size=CHUNK_SIZE)
        for chunk in nar:
            yield from chunker.compress(chunk)
        yield from chunker.finish()  # type: ignore[no-untyped-call]


def pack_small(source: Path | Node, level: int = DEFAULT_LEVEL) -> tuple[bytes, PackResult]:
    """The compressed NAR of a small tree in one call and in memory. Blocking, as `Packer.pack`."""
    packing = Kept(Packer(level).pack(source))
    return b"".join(packing), packing.value


@asynccontextmanager
async def packed(
    source: Path | Node, *, level: int = DEFAULT_LEVEL, limiter: trio.CapacityLimiter | None = None
) -> AsyncGenerator[ThreadStream[PackResult], None]:
    """Pack in a worker thread: iterate the stream for compressed chunks, then read its `result`.

    Raises UnsupportedTree and OSError from the iteration. Leaving the block early or cancelling it
    stops the thread at its next chunk of NAR; both wait for that."""
    async with in_thread(Packer(level, until_cancelled).pack(source), limiter=limiter) as stream:
        yield stream


def _head(chunks: Iterator[bytes]) -> list[bytes]:
    """Chunks up to just beyond SMALL_NAR, or all there are."""
    head: list[bytes] = []
    size = 0
    while size <= SMALL_NAR and (chunk := next(chunks, None)) is not None:
        head.append(chunk)
        size += len(chunk)
    return head
