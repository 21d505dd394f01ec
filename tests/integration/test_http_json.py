"""JSON calls through asks, over real sockets: good answers, bad ones, none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from gradient.http import json_calls
from gradient.http.client import HttpClient
from gradient.http.errors import (
    AnswerTooLarge,
    BadUrl,
    ConnectFailed,
    ConnectionLost,
    HttpError,
    ProtocolFault,
)
from tests.integration.http_support import Peer, certificate, serving


async def test_a_call_and_its_answer() -> None:
    heads: list[str] = []

    async def script(peer: Peer) -> None:
        heads.append(await peer.head())
        body = await peer.body(len(json.dumps({"flake": "ü"})))
        await peer.answer(201, json.dumps({"got": json.loads(body)}))

    async with serving(script) as url, HttpClient() as client:
        answer = await client.request_json("POST", f"{url}/api/x?y=1", "token", {"flake": "ü"})
    assert answer == (201, {"got": {"flake": "ü"}})
    assert heads[0].startswith("POST /api/x?y=1 HTTP/1.1\r\n")
    assert f"Host: {url.removeprefix('http://')}\r\n" in heads[0]
    assert "Authorization: Bearer token" in heads[0]
    assert "Content-Type: application/json" in heads[0]


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("HTTP/1.1 204 No Content\r\n\r\n", (204, None)),
        ("HTTP/1.1 404 Not Found\r\nContent-Length: 14\r\n\r\n" + '{"error":true}', (404, {"error": True})),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n", (200, [1])),
        ("HTTP/1.0 200 OK\r\n\r\n[2]", (200, [2])),
        ("HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", (302, None)),
        (
            "HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nSet-Cookie: c=d; Path=/\r\nContent-Length: 2\r\n\r\n{}",
            (200, {}),
        ),
    ],
)
async def test_answers(answer: str, result: tuple[int, Any]) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(answer)

    async with serving(script) as url, HttpClient() as client:
        assert await client.request_json("GET", url, "token") == result


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        ("", ConnectionLost, "hung up"),
        ("HTTP/1.1 200 OK\r\nContent-Len", ConnectionLost, "hung up"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", ConnectionLost, "hung up"),
        ("SSH-2.0-OpenSSH\r\n\r\n", ProtocolFault, "no proper HTTP"),
        ("HTTP/1.1 200 OK\r\nX: " + "a" * 200_000, ProtocolFault, "no proper HTTP"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<p/>", ProtocolFault, "HTTP 200 .* no JSON"),
        ("HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\n<p/>", ProtocolFault, "HTTP 502 .* no JSON"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + "[" * 100_000, ProtocolFault, "no JSON"),
        ("HTTP/1.1 200 OK\r\nX: \xff\r\nContent-Length: 2\r\n\r\n{}", ProtocolFault, "no proper HTTP"),
        ("HTTP/1.1 200 OK\r\nSet-Cookie: a\r\nContent-Length: 2\r\n\r\n{}", ProtocolFault, "no proper HTTP"),
        ("HTTP/1.1 103 Early Hints\r\n\r\n", HttpError, "http://127"),
    ],
)
async def test_what_is_no_answer(answer: str, error: type[Exception], why: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(answer.encode("latin-1"))

    async with serving(script) as url, HttpClient() as client:
        with pytest.raises(error, match=why) as caught:
            await client.request_json("GET", f"{url}/path?secret", "secret")
    assert "secret" not in str(caught.value)


async def test_an_answer_over_the_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_calls, "JSON_LIMIT", 1000)

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            await peer.send(" " * 100)

    async with serving(script) as url, HttpClient() as client:
        with pytest.raises(AnswerTooLarge, match="more than 1000 bytes"):
            await client.request_json("GET", url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://localhost:1", "Connection refused"),  # two addresses, both refuse
        ("http://no-such-host.invalid", ""),
        (f"http://{'a' * 70}.invalid", "label"),
    ],
)
async def test_a_server_out_of_reach(url: str, why: str) -> None:
    async with HttpClient() as client:
        with pytest.raises(ConnectFailed, match=f"cannot be reached: .*{why}"):
            await client.request_json("GET", url)


async def test_a_url_that_is_none() -> None:
    async with HttpClient() as client:
        with pytest.raises(BadUrl):
            await client.request_json("GET", "127.0.0.1:3000/api")


@pytest.mark.parametrize("answer", ["", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n1"])
async def test_the_callers_deadline_ends_the_wait_and_the_connection(answer: str) -> None:
    """Here the deadline is a cancel once the server has the request: exact, and without a clock."""
    with trio.CancelScope() as scope:
        hung_up = trio.Event()

        async def script(peer: Peer) -> None:
            await peer.head()
            await peer.send(answer)
            scope.cancel()
            with trio.CancelScope(shield=True):
                assert not await peer.more()
                hung_up.set()

        async with serving(script) as url, HttpClient() as client:
            await client.request_json("GET", url)
    assert scope.cancelled_caught
    assert hung_up.is_set()


async def test_cancelled_while_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with HttpClient() as client:
        with trio.CancelScope() as scope:

            async def never(*_: object, **__: object) -> None:
                scope.cancel()
                await trio.sleep_forever()

            monkeypatch.setattr(trio, "open_tcp_stream", never)
            await client.request_json("GET", "http://127.0.0.1:1")
        assert scope.cancelled_caught


async def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(peer: Peer) -> None:
        if await peer.head():
            await peer.answer(200, "[]")

    context, ca = certificate(tmp_path)
    async with serving(script, context) as url:
        async with HttpClient() as client:
            with pytest.raises(ConnectFailed, match=r"(?i)certificate verify failed"):
                await client.request_json("GET", url)
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
        async with HttpClient() as client:
            assert await client.request_json("GET", url) == (200, [])
            with pytest.raises(ConnectFailed, match=r"(?i)hostname mismatch|not valid for"):
                await client.request_json("GET", url.replace("127.0.0.1", "localhost"))


async def test_tls_with_a_server_that_has_none() -> None:
    async def script(peer: Peer) -> None:
        await peer.more()
        await peer.send("HTTP/1.1 400 Bad Request\r\n\r\n")

    async with serving(script) as url, HttpClient() as client:
        with pytest.raises(ConnectFailed, match="does not speak TLS"):
            await client.request_json("GET", url.replace("http:", "https:"))
