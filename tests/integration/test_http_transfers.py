"""Uploads and downloads over real sockets, with servers that help, refuse, hang up and lie."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path
from typing import Any, Self

import pytest
import trio

from gradient.http.client import HttpClient
from gradient.http.connection import ANSWER_LIMIT
from gradient.http.errors import (
    AnswerTooLarge,
    BadBody,
    ConnectFailed,
    ConnectionLost,
    HttpError,
    ProtocolFault,
)
from tests.integration.http_support import Peer, certificate, serving
from tests.patience import PATIENCE

OK = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Pieces:
    """A body that yields `pieces`, then `error`, or the last piece for ever."""

    def __init__(self, *pieces: bytes, endless: bool = False, error: Exception | None = None) -> None:
        self.closed = False
        self._pieces = chain(pieces, repeat(pieces[-1])) if endless else iter(pieces)
        self._error = error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        for piece in self._pieces:
            return piece
        raise self._error or StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


# --- uploads ------------------------------------------------------------------------------------------


async def test_upload_of_bytes_of_pieces_and_of_announced_pieces() -> None:
    got: list[tuple[str, bytes]] = []

    async def script(peer: Peer) -> None:
        while head := await peer.head():
            chunked = "Transfer-Encoding: chunked" in head
            got.append((head, await peer.chunked_body() if chunked else await peer.body(6)))
            await peer.answer(201, "kept", "ETag: x")

    async with serving(script) as url, HttpClient() as client:
        first = await client.upload(f"{url}/1", token="t", body=b"abcdef")
        second = await client.upload(f"{url}/2", token=None, body=Pieces(b"ab", b"", b"cdef"))
        third = await client.upload(
            f"{url}/3",
            token=None,
            body=Pieces(b"abc", b"def"),
            content_length=6,
            method="POST",
            headers={"Content-Type": "application/x-nix-nar"},
        )
    assert [body for _, body in got] == [b"abcdef"] * 3
    assert got[0][0].startswith("PUT /1 HTTP/1.1\r\n")
    assert "Authorization: Bearer t" in got[0][0]
    assert "Authorization" not in got[1][0]
    assert got[2][0].startswith("POST /3 ")
    assert "Content-Type: application/x-nix-nar" in got[2][0]
    for answer in (first, second, third):
        assert (answer.status, answer.body, answer.headers["etag"]) == (201, b"kept", "x")


@pytest.mark.parametrize("size", [2**22, None], ids=["bytes", "endless pieces"])
@pytest.mark.parametrize("status", [413, 200])
async def test_an_early_answer_ends_the_upload(size: int | None, status: int) -> None:
    """The server answers after the head and closes over unread bytes, which resets the connection."""

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.answer(status, "enough", "Connection: close")

    body = Pieces(bytes(2**16), endless=True)
    async with serving(script) as url, HttpClient() as client:
        sent: Any = body if size is None else bytes(size)
        answer = await client.upload(url, token=None, body=sent)
    assert (answer.status, answer.body) == (status, b"enough")
    assert size or body.closed


async def test_an_early_answer_ends_the_upload_though_the_server_reads_nothing_more() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.answer(409, "have it")
        await trio.sleep_forever()

    async with serving(script) as url, HttpClient() as client:
        with trio.fail_after(PATIENCE):
            answer = await client.upload(url, token=None, body=Pieces(bytes(2**16), endless=True))
    assert (answer.status, answer.body) == (409, b"have it")


@pytest.mark.parametrize("body", [bytes(2**22), None])
async def test_a_server_that_just_hangs_up_on_an_upload(body: bytes | None) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()

    async with serving(script) as url, HttpClient() as client:
        sent: Any = Pieces(bytes(2**16), endless=True) if body is None else body
        with pytest.raises(ConnectionLost):
            await client.upload(url, token=None, body=sent)


@pytest.mark.parametrize("length", [5, 7])
async def test_a_body_of_another_length_than_announced(length: int) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        while await peer.more():
            pass

    async with serving(script) as url, HttpClient() as client:
        with pytest.raises(BadBody):
            await client.upload(url, token=None, body=Pieces(b"abc", b"def"), content_length=length)


async def test_an_exception_of_the_body_comes_out_as_it_is() -> None:
    body = Pieces(b"x", error=FileNotFoundError("gone"))

    async def script(peer: Peer) -> None:
        while await peer.more():
            pass

    async with serving(script) as url, HttpClient() as client:
        with pytest.raises(FileNotFoundError, match="gone"):
            await client.upload(url, token=None, body=body)
    assert body.closed


async def test_a_cancelled_upload_closes_connection_and_body() -> None:
    body = Pieces(b"x" * 1000, endless=True)
    with trio.CancelScope() as scope:

        async def script(peer: Peer) -> None:
            await peer.head()
            await peer.body(10_000)
            scope.cancel()
            await trio.sleep_forever()

        async with serving(script) as url, HttpClient() as client:
            await client.upload(url, token=None, body=body)
    assert scope.cancelled_caught
    assert body.closed


async def test_an_answer_to_an_upload_is_bounded() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await peer.send(b"10000\r\n" + bytes(0x10000) + b"\r\n")

    async with serving(script) as url, HttpClient() as client:
        with pytest.raises(AnswerTooLarge, match=str(ANSWER_LIMIT)):
            await client.upload(url, token=None, body=b"")


# --- downloads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["keep-alive", "close"])
async def test_a_body_that_was_read_stays_read(kept: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(f"HTTP/1.1 200 OK\r\nConnection: {kept}\r\nContent-Length: 2\r\n\r\nok")
        await peer.more()

    async with serving(script) as url, HttpClient() as client, client.download(url) as download:
        assert await download.read(2) == b"ok"
        assert await download.read(2) == b""


async def test_download_and_ranges() -> None:
    content = bytes(range(256)) * 4096
    heads: list[str] = []

    async def script(peer: Peer) -> None:
        while head := await peer.head():
            heads.append(head)
            await peer.send(
                f"HTTP/1.1 206 Partial\r\nContent-Length: {len(content)}\r\nX-A: 1\r\nx-a: 2\r\n\r\n"
            )
            await peer.send(content)

    async with serving(script) as url, HttpClient() as client:
        async with client.download(f"{url}/nar", token="t", range=(10, None)) as download:
            assert download.status == 206
            assert download.headers["x-a"] == "1, 2"
            assert b"".join([piece async for piece in download]) == content
            assert [piece async for piece in download] == []
        async with client.download(url, range=(0, 99)) as download:
            assert await download.read(len(content)) == content
        async with client.download(url) as download:
            with pytest.raises(AnswerTooLarge):
                await download.read(1000)
    assert "Range: bytes=10-\r\n" in heads[0] + "\r\n"
    assert "Authorization: Bearer t" in heads[0]
    assert "Range: bytes=0-99\r\n" in heads[1] + "\r\n"
    assert "Range" not in heads[2]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", ConnectionLost),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", ConnectionLost),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nnonsense\r\n", ProtocolFault),
        ("HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nhalf", ProtocolFault),
        ("HTTP/1.1 200 OK\r\nX: " + "a" * 200_000, ProtocolFault),
        ("HTTP/1.1 100 Continue\r\n\r\n" * 100, ProtocolFault),
        ("HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", HttpError),
        ("\0" * 100, ProtocolFault),
        ("", ConnectionLost),
    ],
)
async def test_answers_that_are_wrong(answer: str, error: type[Exception]) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(answer)

    async def fetch(client: HttpClient, url: str) -> None:
        async with client.download(f"{url}/secret") as download:
            async for _ in download:
                pass

    async with serving(script) as url, HttpClient() as client:
        with pytest.raises(error) as caught:
            await fetch(client, url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_keep_the_token_at_home(status: int) -> None:
    heads: dict[str, str] = {}

    async def elsewhere(peer: Peer) -> None:
        heads["elsewhere"] = await peer.head()
        await peer.send(OK)

    async with serving(elsewhere) as other, HttpClient() as client:

        async def script(peer: Peer) -> None:
            head = await peer.head()
            heads[head.split()[1]] = head
            await peer.answer(status, "", f"Location: {'/b' if '/a ' in head else other + '/c?q=1'}")

        async with serving(script) as url:
            async with client.download(f"{url}/a", token="t", range=(1, 2)) as download:
                assert await download.read(2) == b"ok"
    assert "Bearer t" in heads["/a"]
    assert "Bearer t" in heads["/b"]
    assert heads["elsewhere"].startswith("GET /c?q=1 ")
    assert "Bearer" not in heads["elsewhere"]
    assert "Range: bytes=1-2" in heads["elsewhere"]


@pytest.mark.parametrize(
    ("location", "why"), [("/again", "more than 5 times"), ("file:///etc/passwd", "redirects to")]
)
async def test_redirects_that_lead_nowhere(location: str, why: str) -> None:
    async def script(peer: Peer) -> None:
        while await peer.head():
            await peer.answer(302, "", f"Location: {location}")

    async with serving(script) as url, HttpClient() as client:
        with pytest.raises(ProtocolFault, match=why):
            async with client.download(url):
                raise AssertionError


async def test_a_body_of_the_callers_that_fails_closes_the_connection() -> None:
    closed = trio.Event()

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome")
        assert not await peer.more()
        closed.set()

    async with serving(script) as url, HttpClient() as client:
        with pytest.raises(KeyError):
            async with client.download(url):
                raise KeyError
        with trio.fail_after(PATIENCE):
            await closed.wait()


# --- connections --------------------------------------------------------------------------------------


async def ok(client: HttpClient, url: str) -> None:
    async with client.download(url) as download:
        assert await download.read(2) == b"ok"


async def test_a_connection_is_used_again() -> None:
    numbers: list[int] = []
    together = trio.Event()

    async def script(peer: Peer) -> None:
        while await peer.head():
            numbers.append(peer.number)
            if len(numbers) > 3:  # the next three, answered once all of them have come
                if len(numbers) == 6:
                    together.set()
                await together.wait()
            await peer.send(OK)

    async with serving(script) as url, HttpClient() as client:
        for _ in range(3):
            await ok(client, url)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ok, client, url)
        for _ in range(3):
            await ok(client, url)
    assert numbers[:3] == [0, 0, 0]
    assert set(numbers) == {0, 1, 2}


@pytest.mark.parametrize(
    "answer",
    [
        "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad",  # an answer nobody asked for
    ],
)
async def test_a_connection_that_is_over_is_not_used_again(answer: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(answer)
        await peer.more()

    async with serving(script) as url, HttpClient() as client:
        for _ in range(2):
            await ok(client, url)


async def test_an_unread_body_is_not_taken_for_the_next_answer() -> None:
    async def script(peer: Peer) -> None:
        while await peer.head():
            await peer.send(OK)

    async with serving(script) as url, HttpClient() as client:
        async with client.download(url):
            pass
        await ok(client, url)


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    closed = trio.Event()

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(OK)
        await peer.stream.aclose()
        closed.set()

    async with serving(script) as url, HttpClient() as client:
        for _ in range(3):
            await ok(client, url)
            await closed.wait()
            closed = trio.Event()


async def test_a_request_that_meets_the_closing_of_a_kept_connection_is_sent_again() -> None:
    """The server closes when the second request arrives, unanswered: a body of bytes goes again, on a
    new connection, and one that cannot be repeated does not."""
    seen: list[tuple[int, str]] = []

    async def script(peer: Peer) -> None:
        if (await peer.head()).startswith("PUT"):
            await peer.body(1)
        await peer.send(OK)
        if head := await peer.head():
            seen.append((peer.number, head.split()[0]))

    async with serving(script) as url, HttpClient() as client:
        await ok(client, url)
        await ok(client, url)
        assert (await client.upload(url, token=None, body=b"x")).status == 200
        with pytest.raises(ConnectionLost):
            await client.upload(url, token=None, body=Pieces(b"x"))
        await ok(client, url)
    assert seen == [(0, "GET"), (1, "PUT"), (2, "PUT")]


async def test_an_answer_that_began_is_not_asked_for_again() -> None:
    heads: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.head()
        heads.append(peer.number)
        await peer.send(OK)
        if await peer.head():
            heads.append(peer.number)
            await peer.send("HTTP/1.1 2")

    async with serving(script) as url, HttpClient() as client:
        await ok(client, url)
        with pytest.raises(ConnectionLost):
            await ok(client, url)
    assert heads == [0, 0]


async def test_idle_connections_are_not_kept_for_ever(autojump_clock: Any) -> None:
    numbers: list[int] = []

    async def script(peer: Peer) -> None:
        while await peer.head():
            numbers.append(peer.number)
            await peer.send(OK)

    autojump_clock.autojump_threshold = float("inf")
    async with serving(script) as url, HttpClient() as client:
        await ok(client, url)
        autojump_clock.jump(29)
        await ok(client, url)
        autojump_clock.jump(31)
        await ok(client, url)
    assert numbers == [0, 0, 1]


async def test_closing_the_client_closes_idle_connections() -> None:
    closed = trio.Event()

    async def script(peer: Peer) -> None:
        while await peer.head():
            await peer.send(OK)
        closed.set()

    async with serving(script) as url:
        async with HttpClient() as client:
            await ok(client, url)
        with trio.fail_after(PATIENCE):
            await closed.wait()


async def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, ca = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    numbers: list[int] = []

    async def script(peer: Peer) -> None:
        while head := await peer.head():
            numbers.append(peer.number)
            if head.startswith("PUT"):
                await peer.body(2**20)
            await peer.send(OK)

    async with serving(script, context) as url, HttpClient() as client:
        assert (await client.upload(url, token="t", body=bytes(2**20))).body == b"ok"
        await ok(client, url)
        await ok(client, url)
    assert numbers == [0, 0, 0]


async def test_out_of_reach() -> None:
    async with HttpClient() as client:
        with pytest.raises(ConnectFailed, match=r"http://127\.0\.0\.1:1 cannot be reached"):
            await client.upload("http://127.0.0.1:1/secret", token=None, body=b"")
        with pytest.raises(ConnectFailed):
            async with client.download("http://127.0.0.1:1/"):
                raise AssertionError
