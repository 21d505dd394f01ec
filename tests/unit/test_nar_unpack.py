"""Decompression of hostile and of foreign data."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gradient.nar.errors import InvalidNar
from gradient.nar.tree import regular_file
from gradient.nar.unpack import MAX_WINDOW, decompress, unzstd
from gradient.nar.writer import dump_tree
from tests.noise import noise

# Compressible and incompressible parts, and several zstd blocks.
NAR = b"".join(dump_tree(regular_file(noise(200_000) + bytes(400_000))))


def zstd(data: bytes, *, checksum: bool = False) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=checksum).compress(data)


def zstd_streamed(data: bytes) -> bytes:
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return stream.compress(data) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + stream.flush()


def unpacked(data: bytes, size: int = len(NAR), step: int = 1000) -> bytes:
    chunks = list(decompress((data[at : at + step] for at in range(0, len(data), step)), size))
    assert all(chunks)
    return b"".join(chunks)


@pytest.mark.parametrize("compress", [zstd, zstd_streamed, lzma.compress, bytes])
@pytest.mark.parametrize("step", [3, 70_000])
def test_what_caches_hold_is_told_by_its_first_bytes(compress: Callable[[bytes], bytes], step: int) -> None:
    assert unpacked(compress(NAR), step=step) == NAR


@pytest.mark.parametrize("compress", [zstd, zstd_streamed, lzma.compress, bytes])
def test_not_a_byte_more_than_the_size(compress: Callable[[bytes], bytes]) -> None:
    with pytest.raises(InvalidNar, match="larger than"):
        unpacked(compress(NAR), len(NAR) - 1)


def xz_quick(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


@pytest.mark.parametrize("compress", [zstd, xz_quick])
def test_a_bomb_is_cut_off_early(compress: Callable[[bytes], bytes]) -> None:
    sizes: list[int] = []
    with pytest.raises(InvalidNar, match="larger than"):
        sizes.extend(map(len, decompress([compress(bytes(2**25))], 2**20)))
    assert max(sizes, default=0) <= 2**18
    assert sum(sizes) <= 2**20


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 7, 100, 10_000])
@pytest.mark.parametrize(
    "compress",
    [zstd, lambda data: zstd(data, checksum=True), zstd_streamed, lzma.compress],
    ids=["zstd", "with checksum", "with an empty last block", "xz"],
)
def test_data_cut_short_is_seen_even_when_the_nar_is_whole(
    compress: Callable[[bytes], bytes], cut: int
) -> None:
    """The last bytes hold no NAR bytes: a checksum, or a block that only says that it is the last."""
    whole = True
    try:
        whole = unpacked(compress(NAR)[:-cut]) == NAR
    except InvalidNar:
        return
    assert not whole  # what is missing is then seen by the NAR parser


@pytest.mark.parametrize("compress", [zstd, zstd_streamed, lzma.compress])
@pytest.mark.parametrize("extra", [b"x", b"\0\0\0\0", b"more than a frame header"])
def test_nothing_may_follow(compress: Callable[[bytes], bytes], extra: bytes) -> None:
    with pytest.raises(InvalidNar):
        unpacked(compress(NAR) + extra)


def test_a_window_larger_than_the_limit_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = stream.compress(NAR) + stream.flush()
    with pytest.raises(InvalidNar, match="too much memory"):
        unpacked(data)
    assert b"".join(decompress([data], len(NAR), max_window=MAX_WINDOW * 16)) == NAR


@pytest.mark.parametrize("data", [b"", b"BZh91AY&SY", b"\x28\xb5\x2f", b"<html>"])
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidNar, match="begins like"):
        unpacked(data)


def test_zstd_only_means_it() -> None:
    with pytest.raises(InvalidNar):
        list(unzstd([lzma.compress(NAR)], len(NAR)))


@given(st.binary(max_size=200))
def test_random_bytes_never_give_another_exception(data: bytes) -> None:
    for magic in (zstandard.FRAME_HEADER, b"\xfd7zXZ\0"):
        with suppress(InvalidNar):
            assert len(unpacked(magic + data, 10)) <= 10
