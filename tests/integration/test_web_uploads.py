"""Uploads over real sockets: what is kept, what is refused, what is left behind."""

from __future__ import annotations

import math
import os
from datetime import timedelta

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gradient.graph.cache_reads import held_paths
from gradient.graph.path_gc import Ages, CollectPaths
from gradient.graph.writer import WriterStopped
from gradient.nar.bundle import BundleItem, bundled
from gradient.nar.narinfo import NarInfo
from gradient.nar.signing import PublicKey
from gradient.nar.store import nar_key
from gradient.passes.nar_files import NarFiles
from gradient.web import connection
from gradient.web.connection import RequestBody
from gradient.web.uploads import MAX_CONCURRENT
from tests.graph.world import START, hash_part
from tests.integration.web_support import Web, folder, item, store_path
from tests.noise import noise
from tests.patience import PATIENCE, until


async def bundle(*items: BundleItem) -> bytes:
    async with bundled(items) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def narinfo(web: Web, name: str) -> NarInfo:
    answer = await web.get(f"/cache/main/{hash_part(name)}.narinfo")
    assert answer.status == 200, answer
    return NarInfo.parse(answer.body.decode())


async def send_part(web: Web, body: bytes, size: int) -> trio.SocketStream:
    """Send the head of an upload of `size` bytes and `body`; the connection stays open."""
    stream = await trio.open_tcp_stream("127.0.0.1", int(web.url.rpartition(":")[2]))
    head = f"POST /api/v1/uploads HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {web.token}\r\n"
    await stream.send_all(f"{head}Content-Length: {size}\r\n\r\n".encode() + body)
    return stream


async def test_a_bundle_is_stored_signed_and_visible(web: Web) -> None:
    reference = store_path("a").removeprefix("/nix/store/")
    deriver = store_path("b.drv").removeprefix("/nix/store/")
    answer = await web.upload(
        item("a", b"content"), item("b", folder(x=b"1", y=b"2"), references=(reference,), deriver=deriver)
    )
    assert answer.status == 200
    assert answer.body.decode() == f'{{"committed":["{store_path("a")}","{store_path("b")}"]}}'
    info = await narinfo(web, "b")
    assert (info.store_path, info.references, info.deriver) == (store_path("b"), (reference,), deriver)
    assert PublicKey.parse(web.site.cache.public_key).verify(info.fingerprint(), info.signatures[0])
    assert len(web.objects) == 2
    assert web.spooled == []


async def test_what_is_held_is_accepted_and_left_alone(web: Web) -> None:
    await web.upload(item("a", b"first"))
    before = await narinfo(web, "a")
    (stored,) = web.objects
    inode = stored.stat().st_ino
    # Another build of the same path: what the cache has signed stays what it serves.
    answer = await web.upload(item("a", b"second"), item("b", b"new"))
    assert answer.status == 200
    assert answer.body.count(b"/nix/store/") == 2
    assert await narinfo(web, "a") == before
    assert stored.stat().st_ino == inode
    assert web.spooled == []


async def test_the_same_path_from_many_at_once(web: Web) -> None:
    """Whoever wins, the row and the object are of the same upload."""
    contents = [noise(2000, number) for number in range(MAX_CONCURRENT + 4)]
    statuses = []

    async def send(content: bytes) -> None:
        statuses.append((await web.upload(item("shared", content), item("also", content))).status)

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for content in contents:
                nursery.start_soon(send, content)
    assert statuses == [200] * len(contents)
    for name in ("shared", "also"):
        info = await narinfo(web, name)
        got = await web.get(f"/cache/main/{info.url}")
        assert (got.status, len(got.body)) == (200, info.file_size)
        stored = await web.site.store.get(nar_key(store_path(name)))
        assert stored == got.body
    assert web.site.claims.claimed == frozenset()
    assert web.spooled == []


@pytest.mark.parametrize("cut", [0, 5, 60, 200, -1])
async def test_a_bundle_that_breaks_off_keeps_nothing(web: Web, cut: int) -> None:
    data = await bundle(item("a", noise(300)), item("b", b"x"))
    answer = await web.client.upload(
        f"{web.url}/api/v1/uploads", token=web.token, body=data[:cut], method="POST"
    )
    assert (answer.status, b"breaks off" in answer.body) == (400, True)
    assert (web.objects, web.spooled) == ([], [])


async def test_a_damaged_nar_is_refused_by_name(web: Web) -> None:
    data = bytearray(await bundle(item("good", b"x"), item("bad", noise(5000))))
    data[-2000] ^= 0xFF
    answer = await web.client.upload(
        f"{web.url}/api/v1/uploads", token=web.token, body=bytes(data), method="POST"
    )
    assert answer.status == 400
    assert f"{store_path('bad')} is" in answer.body.decode()
    assert (web.objects, web.spooled) == ([], [])


async def test_a_client_that_goes_away_leaves_nothing(web: Web) -> None:
    data = await bundle(item("a", noise(2_000_000)))
    stream = await send_part(web, data[:1_000_000], len(data))
    await until(lambda: web.spooled)
    await stream.aclose()
    await until(lambda: not web.spooled)
    # The thread ends a moment after its file is gone.
    await until(lambda: web.site.uploads._threads.borrowed_tokens == 0)
    assert web.objects == []


async def test_slow_clients_do_not_keep_others_out(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that have not sent anything yet hold no thread."""
    monkeypatch.setattr(connection, "STALL_LIMIT", math.inf)
    data = await bundle(item("slow", b"x"))
    streams = [await send_part(web, data[:3], len(data)) for _ in range(MAX_CONCURRENT + 8)]
    with trio.fail_after(PATIENCE):
        assert (await web.upload(item("quick", b"y"))).status == 200
    for stream in streams:
        await stream.aclose()


async def test_a_commit_goes_on_when_its_client_has_gone(web: Web) -> None:
    committing, go_on = trio.Event(), trio.Event()
    submit = web.site.uploads.submit

    async def slow_submit(message: object) -> object:
        committing.set()
        await go_on.wait()
        return await submit(message)  # type: ignore[arg-type]

    web.site.uploads.submit = slow_submit  # type: ignore[assignment]
    data = await bundle(item("a", b"x"))
    stream = await send_part(web, data, len(data))
    await committing.wait()
    await stream.aclose()
    # Long enough for the server to notice; the path is still claimed.
    await wait_all_tasks_blocked(0.05)
    assert web.site.claims.claimed == {hash_part("a")}
    go_on.set()
    await until(lambda: not web.site.claims.claimed)
    assert (await narinfo(web, "a")).store_path == store_path("a")


async def test_a_full_disk_is_503(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradient.nar.ingest.write_all", full)
    answer = await web.upload(item("a", b"x"))
    assert (answer.status, b"No space left on device" in answer.body) == (503, True)
    assert (web.objects, web.spooled) == ([], [])
    monkeypatch.undo()
    assert (await web.upload(item("a", b"x"))).status == 200


async def test_a_stopped_writer_is_503_and_nothing_is_visible(web: Web) -> None:
    async def stopped(_: object) -> None:
        raise WriterStopped("the server is stopping")

    submit, web.site.uploads.submit = web.site.uploads.submit, stopped  # type: ignore[assignment]
    assert (await web.upload(item("a", b"x"))).status == 503
    assert (await web.get(f"/cache/main/{hash_part('a')}.narinfo")).status == 404
    web.site.uploads.submit = submit
    # The object lies there without a row; the next upload replaces it.
    assert (await web.upload(item("a", b"another"))).status == 200
    info = await narinfo(web, "a")
    assert len((await web.get(f"/cache/main/{info.url}")).body) == info.file_size


async def test_a_large_upload_stays_out_of_memory(web: Web) -> None:
    """The server holds back a client that sends faster than it stores."""
    held: list[int] = []
    put = RequestBody.put

    async def counted(self: RequestBody, data: bytes) -> None:
        await put(self, data)
        held.append(self._send.statistics().current_buffer_used)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestBody, "put", counted)
        assert (await web.upload(item("big", noise(20_000_000)))).status == 200
    assert len(held) > 100
    assert max(held) <= 16


async def test_a_held_path_has_its_object_whatever_comes_and_goes(web: Web) -> None:
    """Uploads of a path, its retirement and the removal of its object, all at once: what is held can be
    fetched after every round, and what is not is gone in the end. Who wins is no matter here;
    test_upload_orders.py goes through the orders."""
    names = ["a", "b", "c"]
    hashes = tuple(map(hash_part, names))
    site = web.site
    files = NarFiles(site.readers, site.submit, site.store, site.claims)
    ages = Ages(unused_since=START + timedelta(days=3650), promised_since=START + timedelta(days=3650))

    async def send(name: str) -> None:
        other = names[(names.index(name) + 1) % len(names)]
        assert (await web.upload(item(name, os.urandom(500)), item(other, b"x"))).status == 200

    async def collect() -> None:
        await site.submit(CollectPaths(hashes, ages))
        await files.remove_retired()

    with trio.fail_after(60):
        for _ in range(12):
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(send, name)
                    nursery.start_soon(collect)
            async with site.readers.connection() as connection:
                held = await held_paths(connection, hashes)
            for name in names:
                if hash_part(name) in held:
                    info = await narinfo(web, name)
                    assert len((await web.get(f"/cache/main/{info.url}")).body) == info.file_size
        await collect()
    assert web.objects == []
