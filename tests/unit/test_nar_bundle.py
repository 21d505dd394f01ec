"""The upload body: any bundle in any split, and hostile ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.nar.bundle import (
    MAGIC,
    MAX_BLOCK,
    MAX_HEADER,
    BundleEnds,
    BundleItem,
    BundleParser,
    EntryBegins,
    EntryData,
    EntryEnds,
    EntryHeader,
    Event,
    bundled,
    write_bundle,
)
from gradient.nar.chunks import Kept
from gradient.nar.errors import BadUpload
from gradient.nar.pack import Packer, PackResult, pack_small
from gradient.nar.tree import regular_file
from gradient.nix.errors import NixError
from gradient.nix.hashes import Hash
from tests.noise import noise

END = struct.pack(">I", 0)
RESULT = PackResult(Hash.of(b"a").nix32(), 120, Hash.of(b"b").nix32(), 50)


def path(number: int) -> str:
    return f"/nix/store/{number:032d}-name"


def block(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def header(**fields: object) -> bytes:
    return block(json.dumps({"store_path": path(1), **fields}).encode())


def result(**fields: object) -> bytes:
    values = {"nar_hash": RESULT.nar_hash, "nar_size": 120, "file_hash": RESULT.file_hash, "file_size": 50}
    return block(json.dumps({**values, **fields}).encode())


def written(contents: Iterable[bytes]) -> tuple[bytes, tuple[PackResult, ...]]:
    items = [
        BundleItem(
            EntryHeader(path(number), (f"{number:032d}-name",), ca="text:sha256:abc"), regular_file(data)
        )
        for number, data in enumerate(contents)
    ]
    chunks = Kept(write_bundle(items, Packer()))
    return b"".join(chunks), chunks.value


def read(data: bytes, step: int = 2**20) -> list[Event]:
    parser = BundleParser()
    events = [event for at in range(0, len(data), step) for event in parser.feed(data[at : at + step])]
    parser.close()
    return events


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 50))
def test_a_bundle_in_any_split_gives_its_entries(contents: list[bytes], step: int) -> None:
    data, results = written(contents)
    events = read(data, step)
    assert [event.header.store_path for event in events if isinstance(event, EntryBegins)] == [
        path(number) for number in range(len(contents))
    ]
    assert tuple(event.result for event in events if isinstance(event, EntryEnds)) == results
    packed = b"".join(event.data for event in events if isinstance(event, EntryData))
    assert packed == b"".join(pack_small(regular_file(content))[0] for content in contents)
    assert events[-1] == BundleEnds()


def test_small_entries_travel_in_large_chunks() -> None:
    items = [
        BundleItem(EntryHeader(path(number)), regular_file(noise(2000, number))) for number in range(300)
    ]
    sizes = [len(chunk) for chunk in write_bundle(items, Packer())]
    assert len(sizes) == 3
    assert min(sizes[:-1]) >= 2**18


async def test_a_bundle_is_made_in_a_thread() -> None:
    async with bundled([BundleItem(EntryHeader(path(1)), regular_file(b"hello"))]) as stream:
        data = b"".join([chunk async for chunk in stream])
    assert read(data)[-2] == EntryEnds(stream.result[0])


def test_a_prefix_is_never_a_bundle() -> None:
    data, _ = written([b"one", b"two"])
    for end in range(len(data)):
        with pytest.raises(BadUpload, match="breaks off"):
            read(data[:end])


HOSTILE = {
    "other magic": b"gradnar2" + END,
    "bytes after the end": MAGIC + END + b"x",
    "huge header": MAGIC + struct.pack(">I", MAX_HEADER + 1),
    "huge block": MAGIC + header() + struct.pack(">I", MAX_BLOCK + 1),
    "huge result": MAGIC + header() + END + struct.pack(">I", 2**32 - 1),
    "no result": MAGIC + header() + END + END + END,
    "no JSON": MAGIC + block(b"{"),
    "no UTF-8": MAGIC + block(b'{"store_path":"\xff"}'),
    "no object": MAGIC + block(b"[1]"),
    "deep JSON": MAGIC + block(b"[" * 100_000),
    "no path": MAGIC + block(b"{}"),
    "unknown field": MAGIC + header(mode=7),
    **{
        f"{field}: {value!r}": MAGIC + header(**{field: value})
        for field, value in [
            ("store_path", "/etc/passwd"),
            ("store_path", path(1) + "/bin"),
            ("store_path", "/nix/store/../../x"),
            ("store_path", 5),
            ("store_path", None),
            ("references", ["../x"]),
            ("references", [path(1)]),
            ("references", [7]),
            ("references", None),
            ("references", "abc"),
            ("deriver", "a\nSig: x"),
            ("deriver", 1),
            ("ca", "fixed:r:sha256:abc\nSig: x"),
            ("ca", "anything"),
            ("ca", ["text:sha256:abc"]),
            ("nar_size", -1),
            ("nar_size", True),
            ("nar_size", 2**63),
            ("nar_size", "5"),
        ]
    },
    **{
        f"result {field}: {value!r}": MAGIC + header() + END + result(**{field: value}) + END
        for field, value in [
            ("nar_hash", "sha256:abc"),
            ("nar_hash", RESULT.nar_hash.removeprefix("sha256:")),
            ("nar_hash", 5),
            ("nar_size", 0),
            ("file_size", 1.5),
            ("file_size", None),
            ("extra", 1),
        ]
    },
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("step", [1000, 2**20])
def test_hostile_bundles_are_refused(data: bytes, step: int) -> None:
    with pytest.raises(BadUpload):
        read(data, step)


def test_the_samples_above_are_refused_for_their_fault_only() -> None:
    assert read(MAGIC + header(deriver=None, ca=None) + END + result() + END)[1] == EntryEnds(RESULT)


def test_a_sender_cannot_make_a_bad_header() -> None:
    with pytest.raises(NixError):
        EntryHeader("/nix/store/short")


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradient.nar.bundle.MAX_ENTRIES", 2)
    data, _ = written([b"1", b"2", b"3"])
    with pytest.raises(BadUpload, match="at most 2"):
        read(data)
