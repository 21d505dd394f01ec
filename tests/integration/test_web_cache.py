"""The binary cache over real sockets, byte by byte. What `nix` makes of it: test_web_nix.py."""

from __future__ import annotations

from typing import Any

import h11
import pytest
import trio

from gradient.http.client import HttpClient
from gradient.nar.narinfo import NarInfo
from gradient.nar.store import nar_key
from gradient.web import serve_http
from gradient.web.cache import PIECE
from tests.graph.world import hash_part
from tests.integration.web_support import Web, item, store_path
from tests.noise import noise
from tests.patience import PATIENCE

PATH = f"/cache/main/{hash_part('a')}.narinfo"


async def stored(web: Web, content: bytes = b"content") -> tuple[NarInfo, bytes]:
    """Upload a path `a`; its narinfo and its object."""
    assert (await web.upload(item("a", content))).status == 200
    info = NarInfo.parse((await web.get(PATH)).body.decode())
    return info, await web.site.store.get(nar_key(store_path("a")))


async def ask(web: Web, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request as h11 sees it: framing of the answer included."""
    client = h11.Connection(h11.CLIENT)
    names = [("Host", "x"), *((name.replace("_", "-"), value) for name, value in headers.items())]
    stream = await trio.open_tcp_stream("127.0.0.1", int(web.url.rpartition(":")[2]))
    async with stream:
        await stream.send_all(client.send(h11.Request(method=method, target=path, headers=names)))
        await stream.send_all(client.send(h11.EndOfMessage()))
        status, found, body = 0, {}, b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                client.receive_data(await stream.receive_some())
            elif isinstance(event, h11.Response):
                status = event.status_code
                found = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            else:
                raise AssertionError(event)
    return status, found, body


async def test_cache_info(web: Web) -> None:
    status, headers, body = await ask(web, "GET", "/cache/main/nix-cache-info")
    assert (status, headers["content-type"]) == (200, "text/x-nix-cache-info")
    assert body == b"StoreDir: /nix/store\nWantMassQuery: 1\nPriority: 10\n"


@pytest.mark.parametrize(
    "path",
    [
        "/cache/main/" + "0" * 32 + ".narinfo",
        "/cache/main/" + "e" * 32 + ".narinfo",
        "/cache/main/short.narinfo",
        "/cache/main/nar/" + "0" * 52 + ".nar.zst",
        "/cache/main/nar/../../etc/passwd.nar.zst",
        "/cache/main/nar/" + "0" * 52 + ".nar.xz",
        "/cache/main/log/" + "0" * 32 + "-x.drv",
        "/cache/main/log/x",
        "/cache/main/realisations/sha256:00!out.doi",
        "/cache/main/build-trace-v2/x",
        "/cache/main/" + "0" * 32 + ".ls",
        "/cache/main/debuginfo/00",
        "/cache/main/",
        "/cache/main",
        "/cache/other/nix-cache-info",
        f"/cache/other/{hash_part('a')}.narinfo",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_whatever_is_not_there_is_404(web: Web, method: str, path: str) -> None:
    await web.upload(item("a", b"content"))
    status, _, body = await ask(web, method, path)
    assert status == 404
    assert (body == b"") == (method == "HEAD")


async def test_a_narinfo(web: Web) -> None:
    info, stored_bytes = await stored(web)
    status, headers, body = await ask(web, "GET", PATH)
    assert (status, headers["content-type"]) == (200, "text/x-nix-narinfo")
    assert info.file_size == len(stored_bytes)
    head_status, head_headers, head_body = await ask(web, "HEAD", PATH)
    assert (head_status, head_body) == (200, b"")
    assert head_headers["content-length"] == headers["content-length"] == str(len(body))


async def test_a_path_without_signature_or_object_is_not_visible(web: Web) -> None:
    info, _ = await stored(web)
    await web.world.connection.execute("UPDATE cached_path SET file_hash = NULL")
    assert (await ask(web, "GET", PATH))[0] == 404
    assert (await ask(web, "GET", f"/cache/main/{info.url}"))[0] == 404
    await web.world.connection.execute("UPDATE cached_path SET file_hash = %s", (info.file_hash,))
    await web.world.connection.execute("DELETE FROM cached_path_signature")
    assert (await ask(web, "GET", PATH))[0] == 404
    assert (await ask(web, "GET", f"/cache/main/{info.url}"))[0] == 404


async def test_a_whole_nar_and_its_head(web: Web) -> None:
    info, data = await stored(web)
    status, headers, body = await ask(web, "GET", f"/cache/main/{info.url}")
    assert (status, body) == (200, data)
    assert headers["content-type"] == "application/x-nix-nar"
    assert headers["accept-ranges"] == "bytes"
    assert headers["content-length"] == str(len(data))
    status, head, body = await ask(web, "HEAD", f"/cache/main/{info.url}")
    assert (status, body) == (200, b"")
    assert {**head, "date": ""} == {**headers, "date": ""}


@pytest.mark.parametrize("size", [100, 3 * PIECE + 17])
async def test_parts_of_a_nar(web: Web, size: int) -> None:
    info, data = await stored(web, noise(size))
    url, total = f"/cache/main/{info.url}", len(data)
    for text, start, stop in (
        ("bytes=0-9", 0, 10),
        (f"bytes={total - 5}-", total - 5, total),
        ("bytes=-7", total - 7, total),
        (f"bytes=10-{total + 1000}", 10, total),
        (f"bytes={total // 3}-{total - 2}", total // 3, total - 1),
    ):
        status, headers, body = await ask(web, "GET", url, Range=text)
        assert (status, body) == (206, data[start:stop])
        assert headers["content-range"] == f"bytes {start}-{stop - 1}/{total}"
        assert headers["content-length"] == str(stop - start)
        status, head, body = await ask(web, "HEAD", url, Range=text)
        assert (status, body, head["content-length"]) == (206, b"", str(stop - start))


async def test_a_part_beyond_the_end(web: Web) -> None:
    info, data = await stored(web)
    status, headers, _ = await ask(web, "GET", f"/cache/main/{info.url}", Range=f"bytes={len(data)}-")
    assert (status, headers["content-range"]) == (416, f"bytes */{len(data)}")


async def test_a_resumed_download_is_of_the_same_object_or_whole(web: Web) -> None:
    info, data = await stored(web)
    url = f"/cache/main/{info.url}"
    etag = (await ask(web, "HEAD", url))[1]["etag"]
    assert (await ask(web, "GET", url, Range="bytes=3-", If_Range=etag))[::2] == (206, data[3:])
    assert (await ask(web, "GET", url, Range="bytes=3-", If_Range='"other"'))[::2] == (200, data)


async def test_an_object_that_is_gone_is_404(web: Web) -> None:
    info, _ = await stored(web)
    await web.site.store.delete(nar_key(store_path("a")))
    missed: list[str] = []
    web.site.suspect = missed.append
    assert (await ask(web, "GET", f"/cache/main/{info.url}"))[0] == 404
    assert missed == [hash_part("a")]


async def test_a_fetch_is_noted_once_and_nothing_else_is(web: Web) -> None:
    info, data = await stored(web)
    url = f"/cache/main/{info.url}"
    fetched: list[str] = []
    web.site.fetched = fetched.append
    await ask(web, "GET", PATH)
    await ask(web, "HEAD", url)
    await ask(web, "GET", url, Range=f"bytes={len(data)}-")
    await ask(web, "GET", url.replace("nar.zst", "nar.xz"))
    assert fetched == []
    assert (await ask(web, "GET", url))[2] == data
    assert fetched == [info.file_hash]
    # In two parts.
    await ask(web, "GET", url, Range="bytes=0-4")
    await ask(web, "GET", url, Range="bytes=5-")
    assert fetched == [info.file_hash] * 2
    await web.site.store.delete(nar_key(store_path("a")))
    await ask(web, "GET", url)
    assert fetched == [info.file_hash] * 2


async def test_a_large_nar_is_read_piece_by_piece(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes nothing keeps neither the object in memory nor a thread."""
    info, data = await stored(web, noise(5 * PIECE))
    sending, taken = hold_pieces(monkeypatch)
    read = []
    get = web.site.store.get

    async def counted(key: str, start: int = 0, stop: int | None = None) -> bytes:
        piece = await get(key, start, stop)
        read.append(len(piece))
        return piece

    web.site.store.get = counted  # type: ignore[method-assign]
    async with HttpClient() as client, client.download(f"{web.url}/cache/main/{info.url}") as download:
        with trio.fail_after(PATIENCE):
            await sending.wait()
        await trio.testing.wait_all_tasks_blocked(0.05)
        before_it_takes = list(read)
        taken.set()
        body = b"".join([piece async for piece in download])
    assert body == data
    assert before_it_takes == [PIECE]
    assert max(read) == PIECE


def hold_pieces(monkeypatch: pytest.MonkeyPatch) -> tuple[trio.Event, trio.Event]:
    """From now on, who connects takes no piece before the second event is set; the first says that one is
    being sent. How much a socket holds is the kernel's affair."""
    sending, taken = trio.Event(), trio.Event()
    serve = serve_http._Server._serve

    async def held(server: Any, stream: Any) -> None:
        send_all = stream.send_all

        async def send(data: bytes) -> None:
            if len(data) >= PIECE:
                sending.set()
                await taken.wait()
            await send_all(data)

        stream.send_all = send
        await serve(server, stream)

    monkeypatch.setattr(serve_http._Server, "_serve", held)
    return sending, taken


async def test_the_log_of_a_derivation(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    path = f"/cache/main/log/{hash_part('a.drv')}-a.drv"
    assert (await ask(web, "GET", path))[0] == 404
    await world.start("a")
    await world.log("a", b"hello \x1b[1mworld\x1b[0m\n")
    status, headers, body = await ask(web, "GET", path)
    assert (status, body) == (200, b"hello \x1b[1mworld\x1b[0m\n")
    assert headers["content-type"] == "text/plain; charset=utf-8"
