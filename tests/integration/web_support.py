"""A whole web side on real parts for tests: PostgreSQL, graph writer, object store, sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from gradient.graph.access import FirstRows, ensure_first_rows, hash_token, new_token
from gradient.graph.pg import Connection
from gradient.graph.pg_pool import Pool
from gradient.graph.transaction import Message
from gradient.graph.writer import GraphWriter
from gradient.http.client import HttpClient
from gradient.http.connection import Response
from gradient.nar.bundle import BundleItem, EntryHeader, bundled
from gradient.nar.grants import Grants
from gradient.nar.signing import SecretKey
from gradient.nar.store import NarStore
from gradient.nar.tree import Directory, Node, regular_file
from gradient.nursery.health import HealthTable
from gradient.passes.pool import WorkerPool
from gradient.sessions.live import LiveHub
from gradient.web.app import App, make_app
from gradient.web.serve_http import serve_http
from gradient.web.site import Site, Urls
from gradient.web.uploads import Cache
from tests.graph.world import START, World, hash_part

T = TypeVar("T")


class LiveWorld(World):
    """A World whose moves are published, as the graph writer's are."""

    def __init__(self, connection: Connection, live: LiveHub) -> None:
        super().__init__(connection)
        self.live = live

    async def apply(self, message: Message[T]) -> T:
        answer = await super().apply(message)
        self.live.publish(self.moves)
        return answer

    async def log(self, name: str, text: bytes) -> None:
        """The running attempt of `name` writes to its log: announced first, stored after."""
        build = await self.id(name)
        self.live.publish_log(build, text)
        await self.connection.execute(
            """
            INSERT INTO build_log_chunk
            SELECT a.id, (SELECT count(*) FROM build_log_chunk c WHERE c.build_attempt = a.id), %(text)s
            FROM build_attempt a WHERE a.derivation = %(build)s ORDER BY a.id DESC LIMIT 1
            """,
            {"build": build, "text": text},
        )


@attrs.define
class Web:
    """A running server and a client of it."""

    app: App
    world: LiveWorld
    client: HttpClient
    token: str
    stop: trio.Event
    folder: Path

    @property
    def site(self) -> Site:
        return self.app.site

    @property
    def url(self) -> str:
        return self.site.urls.http

    async def call(
        self, method: str, path: str, body: Any = None, *, token: str | None = None
    ) -> tuple[int, Any]:
        """A JSON call; writes carry the administrator's token unless told otherwise."""
        if method == "POST" and token is None:
            token = self.token
        return await self.client.request_json(method, self.url + path, token or None, body)

    async def get(self, path: str, **range: tuple[int, int | None]) -> Response:
        """A GET with its whole body."""
        async with self.client.download(self.url + path, **range) as answer:
            return Response(answer.status, answer.headers, await answer.read(2**30))

    async def upload(self, *items: BundleItem, token: str | None = None) -> Response:
        """Upload trees as a worker does."""
        url = f"{self.url}/api/v1/uploads"
        async with bundled(items) as body:
            return await self.client.upload(url, token=token or self.token, body=body, method="POST")

    @property
    def spooled(self) -> list[str]:
        """Files in the making."""
        return sorted(path.name for path in (self.folder / "spool").iterdir())

    @property
    def objects(self) -> list[Path]:
        """Stored objects."""
        return [path for path in (self.folder / "objects").rglob("*") if path.is_file()]


def item(name: str, content: bytes | Node, **header: Any) -> BundleItem:
    """A tree to upload under a path that stands for `name`."""
    node = regular_file(content) if isinstance(content, bytes) else content
    return BundleItem(EntryHeader(store_path(name), **header), node)


def store_path(name: str) -> str:
    return f"/nix/store/{hash_part(name)}-{name}"


def folder(**files: bytes) -> Directory:
    return Directory(tuple((name.encode(), regular_file(content)) for name, content in sorted(files.items())))


@asynccontextmanager
async def running_web(database_url: str, folder: Path) -> AsyncIterator[Web]:
    """The server on a free port; stopped at the end, as a drain does."""
    token, live = new_token(), LiveHub()
    stop = trio.Event()
    async with (
        await Connection.connect(database_url) as connection,
        Pool.open(database_url, size=4) as readers,
        HttpClient() as client,
        trio.open_nursery() as nursery,
    ):
        rows = await ensure_first_rows(connection, START, hash_token(token), hash_token(new_token()))
        writer = GraphWriter(database_url, live.publish)
        await nursery.start(writer.run)
        app = make_app(_site(rows, readers, writer, folder, live))
        port = await nursery.start(partial(serve_http, app, "127.0.0.1", 0, stop=stop))
        app.site.urls = Urls(f"http://127.0.0.1:{port}", "ws://127.0.0.1:1/proto")
        yield Web(app, LiveWorld(connection, live), client, token, stop, folder)
        stop.set()
        writer.close()


def _site(rows: FirstRows, readers: Pool, writer: GraphWriter, folder: Path, live: LiveHub) -> Site:
    return Site(
        readers=readers,
        submit=writer.submit,
        store=NarStore.open(folder),
        grants=Grants(b"s" * 32),
        cache=Cache(rows.cache, "main", SecretKey.generate("test-1")),
        project="main",
        live=live,
        health=HealthTable(),
        workers=WorkerPool(),
        urls=Urls("", ""),
        version="0.1.0",
        data_version=1,
    )


def lines(body: bytes) -> list[Mapping[str, Any]]:
    """The events of a finished stream, without its blank lines."""
    return [json.loads(line) for line in body.splitlines() if line]
