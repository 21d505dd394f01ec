"""Decompression of bytes from strangers, bounded in memory and in output. Layer: nar, pure; blocking.

Our own cache holds zstd; caches we read from have xz and uncompressed NARs too. The first bytes tell.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

import zstandard

from gradient.nar.errors import InvalidNar
from gradient.nar.format import MAGIC

# What RFC 8878 asks every decoder for, and more than levels up to 19 use without `--long`.
MAX_WINDOW: Final = 2**23  # bytes
# A NAR of a public cache may be xz -9, which needs 65 MiB.
_MAX_XZ_MEMORY: Final = 2**27  # bytes
_OUTPUT_CHUNK: Final = 2**18  # bytes

_ZSTD: Final = zstandard.FRAME_HEADER
_XZ: Final = b"\xfd7zXZ\0"
# A skippable frame of length 0. Between frames a decoder passes over it in silence; inside a frame that
# was cut short it takes these bytes for a block or a checksum, and fails. The decoder itself does not
# report a missing end.
_EMPTY_FRAME: Final = bytes.fromhex("502a4d1800000000")


def decompress(chunks: Iterable[bytes], nar_size: int, *, max_window: int = MAX_WINDOW) -> Iterator[bytes]:
    """The NAR bytes of a compressed NAR: zstd, xz or none, told by its first bytes.

    Yields at most `nar_size` bytes and no empty chunks. Raises InvalidNar at the first byte beyond, at
    damaged or truncated input, and for a zstd window above `max_window` bytes. A size below `nar_size` is
    not an error here: the NAR parser and the hash see it."""
    source = iter(chunks)
    head = b""
    while len(head) < len(_XZ) and (chunk := next(source, None)) is not None:
        head += chunk
    source = chain((head,), source)
    if head.startswith(_ZSTD):
        return unzstd(source, nar_size, max_window=max_window)
    if head.startswith(_XZ):
        return _bounded(_unxz(source), nar_size)
    if head and MAGIC.startswith(head[: len(MAGIC)]):
        return _bounded(source, nar_size)
    raise InvalidNar("this is no compressed NAR: it begins like neither zstd, xz nor a NAR")


def unzstd(chunks: Iterable[bytes], nar_size: int, *, max_window: int = MAX_WINDOW) -> Iterator[bytes]:
    """The same for what must be zstd, as everything in our own cache."""
    return _bounded(_unzstd(iter(chunks), max_window), nar_size)


def _bounded(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    left = size
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise InvalidNar(f"the NAR is larger than the {size} bytes it may have")
        if chunk:
            yield chunk


def _unzstd(chunks: Iterator[bytes], max_window: int) -> Iterator[bytes]:
    source = _Source(chain(chunks, (_EMPTY_FRAME,)))
    decompressor = zstandard.ZstdDecompressor(max_window_size=max_window)
    reader = decompressor.stream_reader(source, read_across_frames=True)  # type: ignore[arg-type]
    try:
        while chunk := reader.read(_OUTPUT_CHUNK):
            yield chunk
    except zstandard.ZstdError as error:
        raise InvalidNar(f"the zstd data is damaged, cut short, or needs too much memory: {error}") from error


class _Source:
    """Chunks as the file object that the decompressor reads from."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = b""

    def read(self, size: int) -> bytes:
        while not self._chunk:
            if (chunk := next(self._chunks, None)) is None:
                return b""
            self._chunk = chunk
        data, self._chunk = self._chunk[:size], self._chunk[size:]
        return data


def _unxz(chunks: Iterator[bytes]) -> Iterator[bytes]:
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_XZ_MEMORY)
    try:
        for chunk in chunks:
            if decompressor.eof:
                raise InvalidNar("bytes follow the end of the xz data")
            yield decompressor.decompress(chunk, _OUTPUT_CHUNK)
            while not decompressor.needs_input and not decompressor.eof:
                yield decompressor.decompress(b"", _OUTPUT_CHUNK)
    except lzma.LZMAError as error:
        raise InvalidNar(f"the xz data is damaged or needs too much memory: {error}") from error
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidNar("the xz data is cut short, or bytes follow its end")
