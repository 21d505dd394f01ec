"""The local store, and taking in uploads."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
import zstandard

from gradient.nar.bundle import MAGIC, BundleItem, EntryHeader, bundled, write_bundle
from gradient.nar.durability import make_durable
from gradient.nar.errors import BadUpload, NoSuchObject, StoreUnavailable
from gradient.nar.ingest import ingest_bundle
from gradient.nar.objects import LocalObjects
from gradient.nar.pack import Packer, PackResult, pack_small
from gradient.nar.store import NarStore, log_key, nar_key
from gradient.nar.tree import Directory, Regular, regular_file
from gradient.nix.hashes import Hash
from tests.noise import noise
from tests.patience import until
from tests.unit.open_files import open_below
from tests.unit.test_nar_bundle import END, block

ONE = "/nix/store/00000000000000000000000000000001-one"
TWO = "/nix/store/00000000000000000000000000000002-two"
KEY = nar_key(ONE)
TREE = Directory([(b"a", regular_file(b"hello" * 100))])


@pytest.fixture
def store(tmp_path: Path) -> NarStore:
    return NarStore.open(tmp_path)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Body:
    """The chunks of a request as they come, and then an error, if one is given."""

    def __init__(self, *chunks: bytes, error: Exception | None = None) -> None:
        self._chunks = iter(chunks)
        self._error = error

    def __aiter__(self) -> Body:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if (chunk := next(self._chunks, None)) is not None:
            return chunk
        raise self._error or StopAsyncIteration


def test_keys() -> None:
    assert nar_key(ONE) == "nars/00/000000000000000000000000000001.nar.zst"
    assert log_key(256 + 10) == "logs/0a/266.log.zst"


async def test_put_and_get(store: NarStore, tmp_path: Path) -> None:
    assert await store.put(KEY, Body(b"hello ", b"", b"world")) == 11
    await store.sync([KEY])
    assert await store.size(KEY) == 11
    assert await store.get(KEY) == b"hello world"
    assert await store.get(KEY, 6) == b"world"
    assert await store.get(KEY, 2, 4) == b"ll"
    async with store.stream(KEY, 1, 3) as stream:
        assert [chunk async for chunk in stream] == [b"el"]
    assert files_below(tmp_path) == [f"objects/{KEY}"]
    assert await store.signed_url(KEY, 60) is None


async def test_what_is_not_there(store: NarStore) -> None:
    assert not await store.exists(KEY)
    for call in (store.size, store.get):
        with pytest.raises(NoSuchObject, match="nars/00"):
            await call(KEY)
    async with store.stream(KEY) as stream:
        with pytest.raises(NoSuchObject):
            await anext(stream)
    await store.delete(KEY)
    await store.put_bytes(KEY, b"x")
    await store.delete(KEY)
    assert not await store.exists(KEY)


async def test_a_broken_put_leaves_nothing(store: NarStore, tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="gone"):
        await store.put(KEY, Body(b"half", error=ConnectionError("gone")))
    send, receive = trio.open_memory_channel[bytes](0)
    with trio.move_on_after(10) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.put, KEY, receive)
            await send.send(b"half")
            scope.cancel()
    assert files_below(tmp_path) == []


async def test_replacing_is_atomic_for_readers(store: NarStore) -> None:
    await store.put_bytes(KEY, b"old" * 400_000)
    async with store.stream(KEY) as stream:
        first = await anext(stream)
        await store.put_bytes(KEY, b"new")
        assert first + b"".join([chunk async for chunk in stream]) == b"old" * 400_000
    assert await store.get(KEY) == b"new"


def test_leftovers_of_a_killed_process_go_at_the_start(tmp_path: Path) -> None:
    NarStore.open(tmp_path)
    (tmp_path / "spool" / "leftover").write_bytes(b"x")
    NarStore.open(tmp_path)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("key", ["../x", "nars/../x", "/etc/passwd", "nars//x", "nars/.x", "", "nars/a\n"])
def test_keys_stay_inside(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="no key"):
        LocalObjects(tmp_path).path(key)


def test_a_url_that_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="ftp://"):
        NarStore.open(tmp_path, "ftp://host/path")


# --- durability -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 5, 40])
def test_files_and_the_directories_above_them_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    paths = [tmp_path / "nars" / f"{number % 3}" / f"{number}" for number in range(count)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    synced = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    make_durable(tmp_path, paths)
    if count <= 4:
        assert synced == {*paths, *(path.parent for path in paths), tmp_path / "nars", tmp_path}
    else:
        assert synced == set()  # syncfs did it all


class SlowDisk(LocalObjects):
    """Counts syncs; each waits for `go`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.synced: list[set[str]] = []
        self.go = threading.Semaphore(0)
        self.broken = False

    def make_durable(self, keys: Collection[str]) -> None:
        self.synced.append(set(keys))
        self.go.acquire()
        if self.broken:
            raise OSError(5, "Input/output error")


@pytest.fixture
def disk(tmp_path: Path, store: NarStore) -> SlowDisk:
    return SlowDisk(tmp_path / "slow")


async def test_callers_who_come_during_a_sync_share_the_next(store: NarStore, disk: SlowDisk) -> None:
    store = NarStore(disk, store.spool)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.sync, ["a"])
        await trio.testing.wait_all_tasks_blocked()
        for key in "bcd":
            nursery.start_soon(store.sync, [key])
        await trio.testing.wait_all_tasks_blocked()
        disk.go.release(2)
    assert disk.synced == [{"a"}, {"b", "c", "d"}]


async def test_a_failed_sync_fails_all_who_share_it_and_is_not_tried_again(
    store: NarStore, disk: SlowDisk
) -> None:
    store = NarStore(disk, store.spool)
    failed = []

    async def sync(key: str) -> None:
        try:
            await store.sync([key])
        except OSError as error:
            failed.append((key, error.errno))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sync, "a")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(sync, "b")
        nursery.start_soon(sync, "c")
        await trio.testing.wait_all_tasks_blocked()
        disk.go.release()
        # The next one runs: the first is over, and was not broken.
        await until(lambda: len(disk.synced) == 2)
        disk.broken = True
        disk.go.release()
    assert sorted(failed) == [("b", 5), ("c", 5)]
    assert len(disk.synced) == 2


async def test_a_cancelled_caller_does_not_take_the_others_sync_away(store: NarStore, disk: SlowDisk) -> None:
    store = NarStore(disk, store.spool)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.sync, ["a"])
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            nursery.start_soon(store.sync, ["c"])
            scope.cancel()
            await store.sync(["b"])
        await trio.testing.wait_all_tasks_blocked()
        disk.go.release(2)
    assert scope.cancelled_caught
    assert disk.synced[0] == {"a"}
    assert "c" in disk.synced[1]


# --- uploads --------------------------------------------------------------------------------------


TREE_OF = {ONE: TREE, TWO: Regular(3 * 2**20, True, [noise(2**20), bytes(2**21)])}


def item(store_path: str = ONE, nar_size: int | None = None) -> BundleItem:
    return BundleItem(EntryHeader(store_path, nar_size=nar_size), TREE_OF[store_path])


def everything(header: EntryHeader) -> bool:
    return True


def forged(data: bytes, result: PackResult, *, nar_size: int | None = None) -> bytes:
    """A bundle of one entry whose bytes and result are as given."""
    fields = {"store_path": ONE, "nar_size": nar_size}
    head = MAGIC + block(json.dumps(fields).encode())
    body = b"".join(block(data[at : at + 5000]) for at in range(0, len(data), 5000))
    return head + body + END + block(json.dumps(attrs.asdict(result)).encode()) + END


async def test_an_upload_becomes_records_and_objects(store: NarStore, tmp_path: Path) -> None:
    references = ("00000000000000000000000000000002-two",)
    deriver = "00000000000000000000000000000003-one.drv"
    items = [
        BundleItem(EntryHeader(ONE, references, deriver, "text:sha256:abc"), TREE),
        item(TWO, 3 * 2**20 + 144),
    ]
    async with bundled(items) as stream:
        records = await ingest_bundle(stream, store, everything)
    assert [record.store_path for record in records] == [ONE, TWO]
    assert records[0].references == references
    assert (records[0].deriver, records[0].ca) == (deriver, "text:sha256:abc")
    for record, result in zip(records, stream.result, strict=True):
        assert (record.nar_hash, record.nar_size) == (result.nar_hash, result.nar_size)
        assert (record.file_hash, record.file_size) == (result.file_hash, result.file_size)
        assert await store.size(nar_key(record.store_path)) == record.file_size
    assert await store.get(KEY) == pack_small(TREE)[0]
    assert files_below(tmp_path) == sorted(f"objects/{nar_key(path)}" for path in (ONE, TWO))


async def test_objects_are_durable_before_the_records_are_out(store: NarStore, disk: SlowDisk) -> None:
    store = NarStore(disk, store.spool)
    disk.go.release()
    async with bundled([item()]) as stream:
        await ingest_bundle(stream, store, everything)
    assert disk.synced == [{KEY}]


async def test_a_declined_entry_is_passed_over(store: NarStore) -> None:
    async with bundled([item(ONE), item(TWO)]) as stream:
        records = await ingest_bundle(stream, store, lambda header: header.store_path == TWO)
    assert [record.store_path for record in records] == [TWO]
    assert not await store.exists(KEY)


async def test_a_forbidden_entry_ends_it_and_nothing_is_kept(store: NarStore, tmp_path: Path) -> None:
    def admit(header: EntryHeader) -> bool:
        if header.store_path == TWO:
            raise BadUpload("not yours")
        return True

    async with bundled([item(ONE), item(TWO)]) as stream:
        with pytest.raises(BadUpload, match="not yours"):
            await ingest_bundle(stream, store, admit)
    assert files_below(tmp_path) == []


DATA, RESULT = pack_small(TREE)
NOT_A_NAR = b"nix-archive-1" * 100
TRAILING = zstandard.ZstdDecompressor().decompress(DATA) + bytes(8)


def packed_as(raw: bytes) -> tuple[bytes, PackResult]:
    """Compressed bytes with a truthful result, whatever they are."""
    data = zstandard.ZstdCompressor().compress(raw)
    return data, PackResult(Hash.of(raw).nix32(), len(raw), Hash.of(data).nix32(), len(data))


OTHER = packed_as(b"other")[1]
BAD = {
    "other NAR hash": (forged(DATA, attrs.evolve(RESULT, nar_hash=OTHER.nar_hash)), "its nar_hash is"),
    "other NAR size": (forged(DATA, attrs.evolve(RESULT, nar_size=8)), "its nar_size is"),
    "other file hash": (forged(DATA, attrs.evolve(RESULT, file_hash=OTHER.file_hash)), "its file_hash is"),
    "other file size": (forged(DATA, attrs.evolve(RESULT, file_size=8)), "its file_size is"),
    "larger than promised": (forged(DATA, RESULT, nar_size=100), "larger than the 100 bytes"),
    "smaller than promised": (forged(DATA, RESULT, nar_size=10**6), "1000000 were declared"),
    "larger than allowed": (forged(*packed_as(bytes(2**21))), "damaged"),
    "not a NAR": (forged(*packed_as(NOT_A_NAR)), "no valid NAR"),
    "bytes after the NAR": (forged(*packed_as(TRAILING)), "follow the end"),
    "not zstd": (forged(b"nix-archive-1", RESULT), "zstd data is damaged"),
    "cut short": (forged(DATA[:-1], RESULT), "damaged"),
    "no bytes": (forged(b"", RESULT), "breaks off"),
    "no end": (forged(DATA, RESULT)[:-1], "breaks off"),
    "twice": (forged(DATA, RESULT)[:-4] + forged(DATA, RESULT)[len(MAGIC) :], "twice"),
}


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("step", [50, 2**20])
async def test_a_bad_upload_is_refused_in_words_and_leaves_nothing(
    store: NarStore, tmp_path: Path, data: bytes, message: str, step: int
) -> None:
    await store.put_bytes(KEY, b"what was there before")
    chunks = [data[at : at + step] for at in range(0, len(data), step)]
    with pytest.raises(BadUpload, match=message):
        await ingest_bundle(Body(*chunks), store, everything, max_nar_size=2**20)
    assert files_below(tmp_path) == [f"objects/{KEY}"]
    assert await store.get(KEY) == b"what was there before"


async def test_the_good_forgery_is_accepted(store: NarStore) -> None:
    """So each one above is refused for its own fault."""
    records = await ingest_bundle(Body(forged(DATA, RESULT)), store, everything)
    assert records[0].nar_hash == RESULT.nar_hash


async def test_a_sender_that_goes_away_leaves_nothing(store: NarStore, tmp_path: Path) -> None:
    data = b"".join(write_bundle([item(TWO)], Packer()))

    with pytest.raises(ConnectionError):
        await ingest_bundle(Body(data[:100_000], error=ConnectionError()), store, everything)
    assert files_below(tmp_path) == []


async def test_a_cancelled_upload_leaves_nothing(store: NarStore, tmp_path: Path) -> None:
    data = b"".join(write_bundle([item(TWO)], Packer()))
    send, receive = trio.open_memory_channel[bytes](0)
    with send, trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ingest_bundle, receive, store, everything)
            await send.send(data[:300_000])
            await send.send(data[300_000:600_000])
            assert len(files_below(tmp_path / "spool")) == 1
            scope.cancel()
    assert scope.cancelled_caught
    assert files_below(tmp_path) == []


async def test_a_cancelled_upload_stops_within_what_it_has_received(store: NarStore, tmp_path: Path) -> None:
    """Two megabytes of zstd can be 64 GiB of NAR: nobody may have to wait for the end of that."""

    def admit(_: EntryHeader) -> bool:
        trio.from_thread.run_sync(scope.cancel)
        return True

    with trio.CancelScope() as scope:
        # Unpacked to its end, it would be refused instead.
        await ingest_bundle(Body(forged(*packed_as(NOT_A_NAR))), store, admit)
    assert scope.cancelled_caught
    assert files_below(tmp_path) == []


async def test_a_bundle_of_many_holds_few_descriptors(store: NarStore, tmp_path: Path) -> None:
    most = 0

    def watch(header: EntryHeader) -> bool:
        nonlocal most
        most = max(most, len(open_below(tmp_path)))
        return True

    items = [
        BundleItem(EntryHeader(f"/nix/store/{number:032d}-x"), regular_file(b"")) for number in range(100)
    ]
    async with bundled(items) as stream:
        assert len(await ingest_bundle(stream, store, watch)) == 100
    assert most < 10
