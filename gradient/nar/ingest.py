"""Taking in an upload: every byte is checked while it is stored. Layer: nar.

One worker thread a bundle. A NAR is spooled, hashed, decompressed, hashed again and parsed in a single
pass; only when the whole bundle is in order are its objects put in their places.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import trio

from gradient.model import NarRecord
from gradient.nar.bridge import feed_thread, until_cancelled
from gradient.nar.bundle import BundleParser, EntryBegins, EntryData, EntryEnds, EntryHeader, Event
from gradient.nar.errors import BadUpload, InvalidNar
from gradient.nar.hashing import HashingSink
from gradient.nar.objects import write_all
from gradient.nar.pack import PackResult
from gradient.nar.reader import NarParser
from gradient.nar.store import NarStore, nar_key
from gradient.nar.unpack import unzstd

# A sender that does not promise a size gets no more than this.
MAX_NAR_SIZE: Final = 2**36  # bytes

# Called with each header before its bytes are looked at: raises BadUpload for a path this sender may not
# upload, and returns False for one that need not be kept because the cache has it.
Admit: TypeAlias = Callable[[EntryHeader], bool]


@attrs.define(eq=False)
class Received:
    """The NARs of a bundle, verified, in the spool: `records` say what they are, in order."""

    records: tuple[NarRecord, ...]
    _store: NarStore
    _files: dict[str, Path]

    async def keep(self, records: Collection[NarRecord]) -> None:
        """Put the objects of these in their places; returns when they are durable. Once, within the block.

        Raises OSError and StoreUnavailable. An object of the same path is replaced: the caller lets one
        upload of a path happen at a time, and keeps none of a path that has a row."""
        await trio.to_thread.run_sync(self._adopt, records)
        await self._store.sync(nar_key(record.store_path) for record in records)

    def _adopt(self, records: Collection[NarRecord]) -> None:
        for record in records:
            self._store.objects.adopt(self._files[record.store_path], nar_key(record.store_path))


@asynccontextmanager
async def received_bundle(
    chunks: AsyncIterable[bytes],
    store: NarStore,
    admit: Admit,
    *,
    max_nar_size: int = MAX_NAR_SIZE,
    limiter: trio.CapacityLimiter | None = None,
) -> AsyncGenerator[Received]:
    """Take in a bundle, without the NARs that `admit` (called in the worker thread) declined.

    Nothing is stored until `Received.keep`, and what was not kept is gone after the block: so who has to
    ask which paths are new asks once, for all of them. Raises BadUpload, OSError and errors of `chunks`."""
    receive = partial(_receive, store=store, admit=admit, max_nar_size=max_nar_size)
    received, spooled = await feed_thread(receive, chunks, limiter=limiter)
    with spooled:
        yield received


async def ingest_bundle(
    chunks: AsyncIterable[bytes],
    store: NarStore,
    admit: Admit,
    *,
    max_nar_size: int = MAX_NAR_SIZE,
    limiter: trio.CapacityLimiter | None = None,
) -> tuple[NarRecord, ...]:
    """Store the NARs of a bundle and return what they are, in order and durable; without the ones that
    `admit` declined.

    All or nothing: on an error of `received_bundle` or `keep`, or cancellation, no object is kept."""
    async with received_bundle(chunks, store, admit, max_nar_size=max_nar_size, limiter=limiter) as received:
        await received.keep(received.records)
        return received.records


def _receive(
    chunks: Iterator[bytes], *, store: NarStore, admit: Admit, max_nar_size: int
) -> tuple[Received, ExitStack]:
    """The bundle, and what removes the files that were not adopted."""
    received: dict[str, tuple[NarRecord, Path]] = {}
    with ExitStack() as spooling:
        events = _events(chunks)
        for event in events:
            if isinstance(event, EntryBegins):
                header, entry = event.header, _Entry(events)
                if header.store_path in received:
                    raise BadUpload(f"the bundle has {header.store_path} twice")
                if admit(header):
                    file = spooling.enter_context(store.spool.file())
                    with file:
                        record = _verified(header, entry, file, max_nar_size)
                    received[header.store_path] = record, Path(file.name)
                else:
                    entry.skip()
        spooled = spooling.pop_all()
    records = tuple(record for record, _ in received.values())
    files = {store_path: path for store_path, (_, path) in received.items()}
    return Received(records, store, files), spooled


def _events(chunks: Iterable[bytes]) -> Iterator[Event]:
    parser = BundleParser()
    for chunk in chunks:
        yield from parser.feed(chunk)
    parser.close()


class _Entry:
    """The bytes of one entry out of the bundle's events, and then what the sender says they are."""

    result: PackResult

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events

    def __iter__(self) -> Iterator[bytes]:
        for event in self._events:
            if isinstance(event, EntryEnds):
                self.result = event.result
                return
            assert isinstance(event, EntryData)
            yield event.data

    def skip(self) -> None:
        for _ in self:
            pass


def _verified(header: EntryHeader, entry: _Entry, file: FileIO, max_nar_size: int) -> NarRecord:
    compressed, nar = HashingSink(), HashingSink()
    parser = NarParser(header.nar_size)
    stored = _stored(compressed.through(entry), file)
    try:
        for chunk in until_cancelled(nar.through(unzstd(stored, header.nar_size or max_nar_size))):
            parser.feed(chunk)
        parser.close()
    except InvalidNar as error:
        raise BadUpload(f"the upload of {header.store_path} is damaged: {error}") from error
    found = PackResult(nar.hash().nix32(), nar.size, compressed.hash().nix32(), compressed.size)
    if found != entry.result:
        raise BadUpload(
            f"the upload of {header.store_path} is not what it claims: {_fault(found, entry.result)}"
        )
    return _record(header, found)


def _stored(chunks: Iterable[bytes], file: FileIO) -> Iterator[bytes]:
    for chunk in chunks:
        write_all(file, chunk)
        yield chunk


def _fault(found: PackResult, claimed: PackResult) -> str:
    """The first field that differs, in words."""
    for field in attrs.fields_dict(PackResult):
        ours, theirs = getattr(found, field), getattr(claimed, field)
        if ours != theirs:
            return f"its {field} is {ours}, but {theirs} was declared"
    raise AssertionError("the results are equal")


def _record(header: EntryHeader, result: PackResult) -> NarRecord:
    return NarRecord(
        store_path=header.store_path,
        nar_hash=result.nar_hash,
        nar_size=result.nar_size,
        file_hash=result.file_hash,
        file_size=result.file_size,
        references=header.references,
        deriver=header.deriver,
        ca=header.ca,
    )
