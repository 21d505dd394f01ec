"""The binary cache, as `nix` reads it. Layer: web.

Whatever is not there is 404, never another refusal: `nix` takes 403 and 5xx for a broken cache and
stops. A NAR is read piece by piece, so a slow client holds neither memory nor a thread.
Source: NixOS/nix, src/libstore/http-binary-cache-store.cc.
"""

from __future__ import annotations

import re
from typing import Final

import attrs
from quart import Response, request

from gradient.graph.cache_reads import served_nar, served_paths
from gradient.graph.log_reads import find_derivation, newest_log
from gradient.nar.errors import NoSuchObject, StoreUnavailable
from gradient.nar.narinfo import CONTENT_TYPE, NarInfo
from gradient.nar.store import NarStore, nar_key
from gradient.nix.errors import NixError
from gradient.nix.store_path import STORE_DIR, StorePath
from gradient.web.answers import TEXT, text_answer
from gradient.web.errors import NotFound
from gradient.web.logs import LogBody
from gradient.web.ranges import Span, Unsatisfiable, requested_span
from gradient.web.routes import Route
from gradient.web.site import Site
from gradient.web.streams import Stream

# Lower is asked first; cache.nixos.org says 40.
PRIORITY: Final = 10
# Read in one go: a thread hop is then nothing beside the copying.
PIECE: Final = 2**20  # bytes

_HASH_PART: Final = re.compile(r"[0-9a-df-np-sv-z]{32}")
_FILE_HASH: Final = re.compile(r"[0-9a-df-np-sv-z]{52}")
_INFO: Final = f"StoreDir: {STORE_DIR}\nWantMassQuery: 1\nPriority: {PRIORITY}\n"


async def cache_info(site: Site, name: str) -> Response:
    """`nix-cache-info`."""
    _check_name(site, name)
    return text_answer(_INFO, content_type="text/x-nix-cache-info")


async def narinfo(site: Site, name: str, hash_part: str) -> Response:
    """`<hash part>.narinfo`."""
    _check_name(site, name)
    if _HASH_PART.fullmatch(hash_part) is None:
        raise NotFound("no such path")
    async with site.readers.connection() as connection:
        served = (await served_paths(connection, site.cache.id, [hash_part])).get(hash_part)
    if served is None:
        raise NotFound("no such path")
    return text_answer(NarInfo.of(served.record, (served.signature,)).render(), content_type=CONTENT_TYPE)


async def nar(site: Site, name: str, digits: str) -> Response:
    """`nar/<file hash>.nar.zst`, all of it or a range."""
    _check_name(site, name)
    if _FILE_HASH.fullmatch(digits) is None:
        raise NotFound("no such NAR")
    file_hash = f"sha256:{digits}"
    async with site.readers.connection() as connection:
        found = await served_nar(connection, site.cache.id, file_hash)
    if found is None:
        raise NotFound("no such NAR")
    size = found.file_size
    headers = {"Accept-Ranges": "bytes", "ETag": f'"{digits}"'}
    try:
        span = requested_span(request.headers.get("Range"), size) if _may_be_partial(digits) else None
    except Unsatisfiable:
        return Response(b"", 416, {**headers, "Content-Range": f"bytes */{size}"}, content_type=TEXT)
    part = span or Span(0, size)
    if span is not None:
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{size}"
    body: Pieces | bytes = b""
    if request.method != "HEAD":
        body = await _body(site, found.store_path, part)
        if part.start == 0:  # what is read in parts is fetched once
            site.fetched(file_hash)
    response = Response(body, 206 if span else 200, headers, content_type="application/x-nix-nar")
    # Set last: for a HEAD it is not that of the body, which Quart would write here.
    response.headers["Content-Length"] = str(part.size)
    return response


async def build_log(site: Site, name: str, base_name: str) -> Response:
    """`log/<base name of a .drv>`, for `nix log`."""
    _check_name(site, name)
    try:
        path = StorePath.from_base(base_name)
    except NixError:
        raise NotFound("no such derivation") from None
    async with site.readers.connection() as connection:
        derivation = await find_derivation(connection, path.hash_part, path.name.removesuffix(".drv"))
        log = None if derivation is None else await newest_log(connection, derivation)
    if log is None:
        raise NotFound("no such log")
    return Response(LogBody(site.readers, log.attempt), content_type=TEXT)


def _check_name(site: Site, name: str) -> None:
    if name != site.cache.name:
        raise NotFound("no such cache")


def _may_be_partial(digits: str) -> bool:
    """Whether a range would be of the object that the client began to read (If-Range)."""
    return request.headers.get("If-Range", f'"{digits}"') == f'"{digits}"'


async def _body(site: Site, store_path: str, span: Span) -> Pieces | bytes:
    """The first piece is read before the answer begins: an object that is gone is a 404 then."""
    key = nar_key(store_path)
    try:
        first = await site.store.get(key, span.start, min(span.stop, span.start + PIECE))
    except NoSuchObject:
        site.suspect(StorePath.parse(store_path).hash_part)
        raise NotFound("no such NAR") from None
    return first if span.size <= PIECE else Pieces(site.store, key, span, first)


@attrs.define(eq=False)
class Pieces(Stream):
    """The bytes of an object, one piece in memory at a time."""

    _store: NarStore
    _key: str
    _span: Span
    _first: bytes | None
    _position: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._position = self._span.start

    async def __anext__(self) -> bytes:
        if self._position >= self._span.stop:
            raise StopAsyncIteration
        piece, self._first = self._first, None
        if piece is None:
            stop = min(self._span.stop, self._position + PIECE)
            piece = await self._store.get(self._key, self._position, stop)
        if not piece:
            raise StoreUnavailable(f"{self._key} is shorter than its {self._span.stop} bytes")
        self._position += len(piece)
        return piece


ROUTES: Final = (
    Route("GET", "/cache/<name>/nix-cache-info", cache_info),
    Route("GET", "/cache/<name>/<hash_part>.narinfo", narinfo),
    Route("GET", "/cache/<name>/nar/<digits>.nar.zst", nar),
    Route("GET", "/cache/<name>/log/<base_name>", build_log),
)
