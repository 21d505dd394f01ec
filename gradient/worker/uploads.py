"""Store paths of a job into the server's cache. Layer: worker, IO.

Ask which paths the cache lacks, pack those, send them: small NARs of one request together, a large one
alone and streamed, all in the same format. The question also brings the grant to upload with, so a
try that failed begins with a new question: the grant is fresh then, and what arrived is not sent again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog
import trio

from gradient.http.connection import Response
from gradient.http.errors import HttpError
from gradient.model import FailureKind
from gradient.nar.bundle import CONTENT_TYPE, BundleItem, EntryHeader, bundled, write_bundle
from gradient.nar.chunks import Kept
from gradient.nar.pack import Packer
from gradient.nix.daemon.path_info import PathInfo
from gradient.wire.messages import QueryMode, UploadGrant
from gradient.worker.errors import JobFault
from gradient.worker.job import Job
from gradient.worker.machine import Machine
from gradient.worker.patience import Watched
from gradient.worker.shared_requests import SharedRequestFailed
from gradient.worker.store_info import path_infos
from gradient.worker.store_names import base_name, base_names

# NARs up to this size share a request, and a request holds so many bytes of them: it is packed in memory.
SMALL_NAR: Final = 2**20  # bytes
BUNDLE_SIZE: Final = 4 * 2**20  # bytes of NAR
BUNDLE_ENTRIES: Final = 1000
# Packing so little takes less time than handing it to a thread and back (0.2 ms).
INLINE_SIZE: Final = 64 * 2**10  # bytes of NAR

TRIES: Final = 3
FIRST_PAUSE: Final = 1.0  # seconds
# Longest time without a byte going out or an answer coming: the server commits within 130 s.
STALL_LIMIT: Final = 180.0  # seconds
# Too busy, restarting, or a grant that ran out: worth another try. Anything else will be refused again.
_RETRYABLE: Final = frozenset({401, 403, 408, 425, 429, 500, 502, 503, 504})

log = structlog.get_logger(__name__)


class UploadRefused(Exception):
    """One try failed. `final`: another will, too."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class Uploader:
    """The uploads of one job; each path is asked about and sent once at most."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self._job = job
        self._machine = machine
        self._taken: set[str] = set()

    async def upload(self, paths: Iterable[str], known: Mapping[str, BundleItem] | None = None) -> None:
        """Return when the cache holds all of `paths`, or another call is at it.

        `known` are paths whose NAR the caller has at hand; the others are valid in the store, which is
        asked for their references. Raises JobFault: Transient when the server does not take them.
        """
        new = [path for path in dict.fromkeys(paths) if path not in self._taken]
        self._taken.update(new)
        if not new:
            return
        answer = await self._job.queries.cache(self._job.job_id, new, QueryMode.PUSH)
        missing = [path for path in new if not answer.holds(path)]
        await self._deliver_all(await self._items(missing, known or {}), answer.grant)

    async def upload_new(self, infos: Sequence[PathInfo]) -> None:
        """The same for paths that were made just now: small ones are sent without asking, with the grant of
        an earlier question, since the cache hardly has them. One it has after all it skips."""
        items = [path_item(info) for info in infos]
        grant = self._job.queries.usable_grant()
        if grant is None or sum(info.nar_size for info in infos) > SMALL_NAR:
            await self.upload((info.path for info in infos), {i.header.store_path: i for i in items})
        else:
            self._taken.update(info.path for info in infos)
            await self._deliver_all(items, grant)

    async def _deliver_all(self, items: Collection[BundleItem], grant: UploadGrant | None) -> None:
        bundles = plan_bundles(items)
        if len(bundles) == 1:
            await self._deliver(bundles[0], grant)
        elif bundles:
            async with trio.open_nursery() as nursery:
                for bundle in bundles:
                    nursery.start_soon(self._deliver, bundle, grant)

    async def _items(self, paths: Sequence[str], known: Mapping[str, BundleItem]) -> list[BundleItem]:
        unknown = [path for path in paths if path not in known]
        described = dict(zip(unknown, await self._describe(unknown), strict=True))
        return [known.get(path) or described[path] for path in paths]

    async def _describe(self, paths: Sequence[str]) -> list[BundleItem]:
        return [path_item(info) for info in await path_infos(self._machine, paths)]

    async def _deliver(self, items: Sequence[BundleItem], grant: UploadGrant | None) -> None:
        pause = FIRST_PAUSE
        for attempt in range(1, TRIES + 1):
            try:
                await self._send(items, grant, shared=attempt == 1)
                return
            except (UploadRefused, HttpError, SharedRequestFailed) as error:
                final = attempt == TRIES or (isinstance(error, UploadRefused) and error.final)
                if final:
                    raise JobFault(FailureKind.TRANSIENT, f"the upload failed: {error}") from error
                log.info("upload failed, trying again", job=self._job.job_id, error=str(error))
            await trio.sleep(pause)
            pause *= 2
            items, grant = await self._still_missing(items)
            if not items:
                return

    async def _still_missing(
        self, items: Sequence[BundleItem]
    ) -> tuple[list[BundleItem], UploadGrant | None]:
        paths = [item.header.store_path for item in items]
        answer = await self._job.queries.cache(self._job.job_id, paths, QueryMode.PUSH)
        return [item for item in items if not answer.holds(item.header.store_path)], answer.grant

    async def _send(self, items: Sequence[BundleItem], grant: UploadGrant | None, *, shared: bool) -> None:
        if grant is None:
            raise UploadRefused("the server gave no grant to upload with")
        if shared and _size(items) <= INLINE_SIZE:
            await self._machine.small_uploads.send(items, grant, self._request)
            return
        async with self._machine.uploads:
            await self._request(items, grant)

    async def _request(self, items: Sequence[BundleItem], grant: UploadGrant) -> None:
        size = _size(items)
        with trio.move_on_after(STALL_LIMIT) as patience:
            if size <= INLINE_SIZE:
                response = await self._post(grant, pack_bundle(items))
            elif size <= BUNDLE_SIZE:
                response = await self._post(grant, await trio.to_thread.run_sync(pack_bundle, items))
            else:
                async with bundled(items) as stream:
                    response = await self._post(grant, Watched(stream, patience, STALL_LIMIT))
        if patience.cancelled_caught:
            raise UploadRefused(f"nothing moved for {STALL_LIMIT:g} s")
        if response.status != 200:
            said = response.body[:500].decode(errors="replace").strip()
            raise UploadRefused(f"HTTP {response.status}: {said}", final=response.status not in _RETRYABLE)

    async def _post(self, grant: UploadGrant, body: bytes | AsyncIterator[bytes]) -> Response:
        return await self._machine.http.upload(
            grant.url, token=grant.token, body=body, method="POST", headers={"Content-Type": CONTENT_TYPE}
        )


def _size(items: Iterable[BundleItem]) -> int:
    """Bytes of NAR; one of unknown size is a large one."""
    return sum(SMALL_NAR + 1 if (size := item.header.nar_size) is None else size for item in items)


def plan_bundles(items: Collection[BundleItem]) -> list[list[BundleItem]]:
    """Small NARs together, within the limits of a request; a larger one, or one of unknown size, alone."""
    bundles: list[list[BundleItem]] = []
    small: list[BundleItem] = []
    size = 0
    for item in items:
        item_size = item.header.nar_size
        if item_size is None or item_size > SMALL_NAR:
            bundles.append([item])
            continue
        if small and (size + item_size > BUNDLE_SIZE or len(small) == BUNDLE_ENTRIES):
            bundles.append(small)
            small, size = [], 0
        small.append(item)
        size += item_size
    return [*bundles, small] if small else bundles


def pack_bundle(items: Sequence[BundleItem]) -> bytes:
    """The bundle in memory. Blocking for a few bytes or in a thread; raises as `write_bundle`."""
    return b"".join(Kept(write_bundle(items, Packer())))


def path_item(info: PathInfo) -> BundleItem:
    """A path of the local store as an upload."""
    header = EntryHeader(
        store_path=info.path,
        references=base_names(info.references),
        deriver=info.deriver and base_name(info.deriver),
        ca=info.ca,
        nar_size=info.nar_size,
    )
    return BundleItem(header, Path(info.path))
