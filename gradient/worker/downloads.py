"""Store paths out of the server's cache into the local store. Layer: worker, IO.

The closure of what is wanted is found in rounds over the references, downloaded a few at a time, and
imported references first. A NAR is verified before the daemon sees a byte of it: what the cache lists
and cannot give, or gives damaged, is the server's to mend, and it is told which path.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import IO, Final

import attrs
import structlog
import trio

from gradient.http.errors import HttpError
from gradient.model import FailureKind
from gradient.nar.bridge import feed_thread, until_cancelled
from gradient.nar.errors import InvalidNar
from gradient.nar.hashing import HashingSink
from gradient.nar.unpack import decompress
from gradient.nix.daemon.errors import DaemonError
from gradient.nix.daemon.path_info import PathInfo
from gradient.nix.errors import NixError
from gradient.nix.hashes import Hash
from gradient.wire.messages import CachedPathInfo, QueryMode
from gradient.worker.errors import JobFault
from gradient.worker.job import Job
from gradient.worker.machine import Machine
from gradient.worker.patience import Watched
from gradient.worker.store_info import invalid
from gradient.worker.store_names import full_path

# A chain of references this long is nobody's closure.
MAX_ROUNDS: Final = 1024
# A NAR waits in memory up to this size while it is verified, a larger one in an unnamed file.
IN_MEMORY: Final = 2**20  # bytes
READ_SIZE: Final = 2**18  # bytes

TRIES: Final = 4
FIRST_PAUSE: Final = 0.5  # seconds
# Longest time without a byte coming.
STALL_LIMIT: Final = 30.0  # seconds
# Paths, and reasons, that an error spells out.
NAMED: Final = 3

log = structlog.get_logger(__name__)


class DownloadFailed(Exception):
    """One try failed; another may not."""


class _Gone(Exception):
    """The cache cannot give what it lists."""


@attrs.frozen(eq=False)
class _Imports:
    """How far the imports of a closure have come.

    What is lost stops only what refers to it: the rest goes on, so that all that is lost is told at once. A
    build may ask for its inputs a few times only."""

    ended: Mapping[str, trio.Event]
    done: set[str] = attrs.field(factory=set, init=False)
    # And why.
    lost: dict[str, str] = attrs.field(factory=dict, init=False)

    async def has_references(self, info: CachedPathInfo) -> bool:
        """Whether everything of the closure that this one refers to was imported; waits for it."""
        below = [path for path in info.references if path != info.path and path in self.ended]
        for path in below:
            await self.ended[path].wait()
        return self.done.issuperset(below)


class Downloader:
    """The downloads of one job."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self._job = job
        self._machine = machine

    async def make_valid(self, wanted: Collection[str]) -> None:
        """Return when all of `wanted` and their references are valid in the local store.

        Raises JobFault: InputsUnavailable with the paths that the cache does not have or cannot give,
        Transient when it cannot be reached."""
        absent = await self._import_closure(await invalid(self._machine, wanted), strict=True)
        assert not absent

    async def pull(self, wanted: Collection[str]) -> frozenset[str]:
        """Get those of `wanted` that the cache has; returns the others. Raises as `make_valid`."""
        return await self._import_closure(wanted, strict=False)

    async def _import_closure(self, wanted: Collection[str], *, strict: bool) -> frozenset[str]:
        if not wanted:
            return frozenset()
        closure, absent = await self._closure(wanted, strict=strict)
        imports = _Imports({path: trio.Event() for path in closure})
        async with trio.open_nursery() as nursery:
            # In this order: whoever waits for a reference holds a place behind it, never before it.
            for path in import_order(closure):
                await self._machine.downloads.acquire_on_behalf_of(imports.ended[path])
                nursery.start_soon(self._import, closure[path], imports)
        if imports.lost:
            raise _unavailable(imports.lost, *imports.lost.values())
        return absent

    async def _closure(
        self, wanted: Collection[str], *, strict: bool
    ) -> tuple[dict[str, CachedPathInfo], frozenset[str]]:
        """What has to be imported, and which of `wanted` the cache lacks (always an error if `strict`)."""
        found: dict[str, CachedPathInfo] = {}
        absent: frozenset[str] = frozenset()
        frontier = list(dict.fromkeys(wanted))
        for round_ in range(MAX_ROUNDS):
            answer = await self._job.queries.cache(self._job.job_id, frontier, QueryMode.PULL)
            lacking = frozenset(path for path in frontier if not answer.holds(path))
            if lacking and (strict or round_):
                raise _unavailable(lacking, "not in the cache")
            absent = absent or lacking
            found.update((path, _checked(answer.paths[path])) for path in frontier if path not in lacking)
            below = {r for path in frontier if path in found for r in found[path].references}
            frontier = await invalid(self._machine, sorted(below - found.keys()))
            if not frontier:
                return found, absent
        raise JobFault(FailureKind.PERMANENT, f"references go on for more than {MAX_ROUNDS} rounds")

    async def _import(self, info: CachedPathInfo, imports: _Imports) -> None:
        """Download, verify, wait for the references, import. Gives back its place among the downloads."""
        try:
            with await self._download(info) as nar:
                if await imports.has_references(info):
                    await self._add(info, nar)
                    imports.done.add(info.path)
        except _Gone as error:
            imports.lost[info.path] = str(error)
        finally:
            imports.ended[info.path].set()
            self._machine.downloads.release_on_behalf_of(imports.ended[info.path])

    async def _add(self, info: CachedPathInfo, nar: IO[bytes]) -> None:
        as_told = _path_info(info)
        async with self._machine.store.connection() as store:
            pieces = _Pieces(nar, as_told.nar_size)
            try:
                await store.add_to_store_nar(as_told, pieces, dont_check_sigs=True)
            except DaemonError as error:
                raise import_refused(info.path, error) from error

    async def _download(self, info: CachedPathInfo) -> IO[bytes]:
        pause = FIRST_PAUSE
        for attempt in range(1, TRIES + 1):
            try:
                return await self._fetch(info)
            except InvalidNar as error:
                raise _Gone(str(error)) from error
            except (DownloadFailed, HttpError) as error:
                if attempt == TRIES:
                    raise JobFault(
                        FailureKind.TRANSIENT, f"{info.path} cannot be downloaded: {error}"
                    ) from error
                log.info("download failed, trying again", path=info.path, error=str(error))
            await trio.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    async def _fetch(self, info: CachedPathInfo) -> IO[bytes]:
        if info.url is None:
            raise _Gone("the cache gives no address for it")
        with trio.move_on_after(STALL_LIMIT) as patience:
            async with self._machine.http.download(info.url) as body:
                if body.status in {404, 410}:
                    raise _Gone(f"HTTP {body.status}")
                if body.status != 200:
                    raise DownloadFailed(f"HTTP {body.status}")
                return await feed_thread(_verify(info), Watched(body, patience, STALL_LIMIT))
        raise DownloadFailed(f"nothing came for {STALL_LIMIT:g} s")


def import_refused(path: str, error: DaemonError) -> JobFault:
    """The store does not take what was downloaded and verified: that is no fault of any derivation."""
    hint = (
        "; let the daemon trust this worker's user (trusted-users in nix.conf) or the cache's key "
        "(trusted-public-keys)"
        if "signature" in str(error)
        else ""
    )
    return JobFault(FailureKind.TRANSIENT, f"{path} cannot be imported: {error}{hint}")


def import_order(closure: Mapping[str, CachedPathInfo]) -> list[str]:
    """The paths of `closure`, each after its references. Raises JobFault for references in a circle."""
    graph = {
        path: [r for r in info.references if r != path and r in closure] for path, info in closure.items()
    }
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise JobFault(
            FailureKind.PERMANENT, f"store paths refer to each other in a circle: {error.args[1]}"
        ) from error


def _checked(info: CachedPathInfo) -> CachedPathInfo:
    """`info` with full references, once everything an import needs is there."""
    if info.nar_hash is None or not info.nar_size or info.nar_size < 0:
        raise _unavailable({info.path}, "the cache does not say its NAR's hash and size")
    try:
        return attrs.evolve(info, references=tuple(map(full_path, info.references)))
    except NixError as error:
        raise _unavailable({info.path}, str(error)) from error


def _path_info(info: CachedPathInfo) -> PathInfo:
    assert info.nar_hash is not None
    assert info.nar_size is not None
    return PathInfo(
        path=info.path,
        nar_hash=Hash.parse(info.nar_hash, "sha256").base16(),
        nar_size=info.nar_size,
        references=info.references,
        deriver=info.deriver and full_path(info.deriver),
        signatures=info.signatures,
        ca=info.ca,
    )


def _verify(info: CachedPathInfo) -> Callable[[Iterator[bytes]], IO[bytes]]:
    """What takes the compressed NAR and gives the NAR, once size and hash are as promised. Blocking."""
    nar_size = info.nar_size
    assert nar_size is not None

    def unpack(chunks: Iterable[bytes]) -> IO[bytes]:
        nar = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - the caller closes it
        try:
            sink = HashingSink()
            for chunk in until_cancelled(sink.through(decompress(chunks, nar_size))):
                nar.write(chunk)
            if sink.size != nar_size:
                raise InvalidNar(f"its NAR has {sink.size} bytes and not {nar_size}")
            if sink.hash().nix32() != info.nar_hash:
                raise InvalidNar(f"its NAR has the hash {sink.hash().nix32()} and not {info.nar_hash}")
            nar.seek(0)
        except BaseException:
            nar.close()
            raise
        return nar

    return unpack


@attrs.define(eq=False)
class _Pieces(AsyncIterator[bytes]):
    """The NAR in pieces; what lies in a file is read in a thread."""

    _nar: IO[bytes]
    _size: int

    async def __anext__(self) -> bytes:
        if self._size <= IN_MEMORY:
            piece = self._nar.read(READ_SIZE)
        else:
            piece = await trio.to_thread.run_sync(self._nar.read, READ_SIZE)
        if not piece:
            raise StopAsyncIteration
        return piece


def _unavailable(paths: Collection[str], *why: str) -> JobFault:
    text = f"{_some(sorted(paths))}: {'; '.join(dict.fromkeys(why[:NAMED]))}"
    return JobFault(FailureKind.INPUTS_UNAVAILABLE, text, tuple(sorted(paths)))


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
    return ", ".join(words[:NAMED]) + more
