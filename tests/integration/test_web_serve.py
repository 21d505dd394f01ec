"""The HTTP listener: ports, early answers, broken clients, and a drain that ends whatever clients do."""

from __future__ import annotations

import math
import os
import socket
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gradient.nar.narinfo import NarInfo
from gradient.web import connection, serve_http
from gradient.web.errors import PortInUse
from tests.graph.world import hash_part
from tests.integration.web_support import Web, item, running_web
from tests.noise import noise
from tests.patience import PATIENCE, until


def port_of(web: Web) -> int:
    return int(web.url.rpartition(":")[2])


async def dial(web: Web) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", port_of(web))


async def everything(stream: trio.SocketStream) -> bytes:
    return b"".join([piece async for piece in stream])


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends here ends for its own reason, or by a limit that its test sets."""
    monkeypatch.setattr(serve_http, "KEEP_ALIVE", math.inf)
    monkeypatch.setattr(connection, "LINGER", math.inf)


@attrs.define(eq=False)
class Seen:
    """How far the server is with a connection."""

    begun: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)


# By the client's port.
Connections = Mapping[int, Seen]


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    """The connections as the server sees them."""
    connections: dict[int, Seen] = defaultdict(Seen)
    serve, serve_one = serve_http._Server._serve, serve_http._Server.connection

    async def begin(server: Any, stream: trio.SocketStream) -> None:
        connections[stream.socket.getpeername()[1]].begun.set()
        await serve(server, stream)

    async def connection(server: Any, stream: trio.SocketStream) -> None:
        port = stream.socket.getpeername()[1]
        await serve_one(server, stream)
        connections[port].ended.set()

    monkeypatch.setattr(serve_http._Server, "_serve", begin)
    monkeypatch.setattr(serve_http._Server, "connection", connection)
    return connections


def seen(connections: Connections, stream: trio.SocketStream) -> Seen:
    return connections[stream.socket.getsockname()[1]]


async def test_a_port_in_use_is_one_clear_error(web: Web) -> None:
    serve = partial(serve_http.serve_http, web.app, "127.0.0.1", port_of(web), stop=trio.Event())
    with pytest.raises(PortInUse, match=f"127.0.0.1:{port_of(web)} is in use"):
        await serve()


async def test_garbage_is_refused_and_the_server_lives(web: Web) -> None:
    for garbage in (b"\x00\xff\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET " + b"/x" * 20_000, b"\r\n" * 100):
        async with await dial(web) as stream:
            # Closed before all of it was read, a connection is reset.
            with trio.fail_after(PATIENCE), suppress(trio.BrokenResourceError):
                await stream.send_all(garbage)
                await stream.send_eof()
                await everything(stream)
    # Bytes behind a complete answer, and a client that resets.
    stream = await dial(web)
    await stream.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await stream.receive_some()
    await stream.send_all(b"\x00garbage\r\n\r\n")
    stream.socket.close()
    assert (await web.call("GET", "/health"))[0] == 200


async def test_there_is_no_http_2(web: Web) -> None:
    """Spoken at once, or asked for: its connections have no idle timeout."""
    preface, upgrade = await dial(web), await dial(web)
    async with preface, upgrade:
        with trio.fail_after(PATIENCE):
            await preface.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert (await everything(preface)).startswith(b"HTTP/1.1 4")
            await upgrade.send_all(
                b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
                b"Connection: close, Upgrade, HTTP2-Settings\r\n\r\n"
            )
            assert (await everything(upgrade)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/", "/proto", "/api/v1/evaluations/1/events"])
async def test_a_websocket_is_refused_like_a_path_that_is_not_there(web: Web, path: str) -> None:
    async with await dial(web) as stream:
        await stream.send_all(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        with trio.fail_after(PATIENCE):
            answer = await everything(stream)
    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.endswith(b"workers connect to the proto_url of /api/v1/server\n\r\n0\r\n\r\n")
    assert (await web.call("GET", "/health"))[0] == 200


async def test_a_refused_upload_is_answered_before_it_is_read(web: Web) -> None:
    """A client that sends everything before it reads sees the answer all the same."""
    body = noise(5_000_000)
    async with await dial(web) as stream:
        head = "POST /api/v1/uploads HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        with trio.fail_after(PATIENCE):
            await stream.send_all(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await everything(stream)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"a token is needed" in answer


async def test_a_refused_upload_does_not_hang_on_a_silent_client(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER", 0.05)
    async with await dial(web) as stream:
        head = b"POST /api/v1/uploads HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nbegin"
        await stream.send_all(head)
        with trio.fail_after(PATIENCE):
            assert (await everything(stream)).startswith(b"HTTP/1.1 401")


async def test_a_connection_carries_many_requests_and_idles_out(
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    connections: Connections,
    mock_clock: MockClock,
) -> None:
    monkeypatch.setattr(serve_http, "KEEP_ALIVE", 60)
    request = b"GET /cache/main/nix-cache-info HTTP/1.1\r\nHost: x\r\n\r\n"
    async with running_web(database_url, tmp_path) as web, await dial(web) as stream:
        ended = seen(connections, stream).ended
        for _ in range(3):
            await stream.send_all(request)
            answer = b""
            while not answer.endswith(b"Priority: 10\n"):
                answer += (piece := await stream.receive_some())
                assert piece
            # The idle timeout begins again after each answer.
            await wait_all_tasks_blocked()
            mock_clock.jump(59)
            await wait_all_tasks_blocked()
            assert not ended.is_set()
        mock_clock.jump(1)
        await until(ended.is_set)
        assert await everything(stream) == b""


async def test_an_answer_that_cannot_go_on_is_cut_short_and_no_crash(web: Web) -> None:
    await web.upload(item("big", noise(3_000_000)))
    url = NarInfo.parse((await web.get(f"/cache/main/{hash_part('big')}.narinfo")).body.decode()).url
    (stored,) = (path for path in web.folder.rglob("*.nar.zst"))
    os.truncate(stored, 2_000_000)
    with structlog.testing.capture_logs() as entries:
        async with await dial(web) as stream:
            await stream.send_all(f"GET /cache/main/{url} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            with trio.fail_after(PATIENCE):
                answer = await everything(stream)
    assert answer.startswith(b"HTTP/1.1 200")
    assert len(answer) < 2_100_000
    assert [entry["event"] for entry in entries] == ["answer cut short"]


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_who_hangs_up_leaves_nothing_behind(connections: Connections, web: Web, sent: bytes) -> None:
    stream = await dial(web)
    ended = seen(connections, stream).ended
    await stream.send_all(sent)
    await stream.aclose()
    with trio.fail_after(PATIENCE):
        await ended.wait()


async def test_a_flood_of_connections_is_closed_at_the_door(
    connections: Connections, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_http, "MAX_CONNECTIONS", 2)
    streams = [await dial(web) for _ in range(2)]
    for stream in streams:
        await seen(connections, stream).begun.wait()
    async with await dial(web) as third:
        with trio.fail_after(PATIENCE), pytest.raises((trio.BrokenResourceError, StopAsyncIteration)):
            if not await third.receive_some():
                raise StopAsyncIteration
    for stream in streams:
        await stream.aclose()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such limit")
async def test_a_client_that_stopped_reading_is_given_up(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: Connections
) -> None:
    monkeypatch.setattr(serve_http, "SEND_LIMIT", 0.2)
    async with running_web(database_url, tmp_path) as web:
        await web.upload(item("big", noise(30_000_000)))
        info = (await web.get(f"/cache/main/{hash_part('big')}.narinfo")).body.decode()
        stalled = await dial(web)
        request = f"GET /cache/main/{NarInfo.parse(info).url} HTTP/1.1\r\nHost: x\r\n\r\n"
        await stalled.send_all(request.encode())
        with trio.fail_after(PATIENCE):
            await seen(connections, stalled).ended.wait()
        assert (await web.call("GET", "/health"))[0] == 200
        await stalled.aclose()


async def test_a_drain_ends_idle_connections_streams_and_answers(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: Connections
) -> None:
    monkeypatch.setattr(serve_http, "DRAIN_LIMIT", math.inf)
    with trio.fail_after(PATIENCE):
        async with running_web(database_url, tmp_path) as web:
            evaluation = await web.world.evaluation()
            idle, streaming = await dial(web), await dial(web)
            path = f"/api/v1/evaluations/{evaluation}/events"
            await streaming.send_all(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            received = await streaming.receive_some()
            await seen(connections, idle).begun.wait()
        # Left: everything was closed, and the stream came to its proper end.
        received += await everything(streaming)
        assert received.endswith(b"0\r\n\r\n")
        assert await everything(idle) == b""
        await idle.aclose()
        await streaming.aclose()


async def test_a_drain_ends_clients_that_stopped_reading(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_http, "DRAIN_LIMIT", 0.1)
    with trio.fail_after(PATIENCE):
        async with running_web(database_url, tmp_path) as web:
            await web.upload(item("big", noise(30_000_000)))
            info = (await web.get(f"/cache/main/{hash_part('big')}.narinfo")).body.decode()
            stalled = await dial(web)
            url = NarInfo.parse(info).url
            await stalled.send_all(f"GET /cache/main/{url} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await stalled.receive_some(10)
            await wait_all_tasks_blocked(0.05)
        await stalled.aclose()


async def test_cancelling_ends_them_too(database_url: str, tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE):
        with pytest.RaisesGroup(KeyError, allow_unwrapped=True, flatten_subgroups=True):
            async with running_web(database_url, tmp_path) as web:
                await web.upload(item("big", noise(30_000_000)))
                info = (await web.get(f"/cache/main/{hash_part('big')}.narinfo")).body.decode()
                stalled = await dial(web)
                url = NarInfo.parse(info).url
                await stalled.send_all(f"GET /cache/main/{url} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                await stalled.receive_some(10)
                await wait_all_tasks_blocked(0.05)
                raise KeyError
        await stalled.aclose()


async def test_a_crash_in_a_handler_is_500_and_costs_one_request(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("gradient.graph.evaluation_reads.evaluations", broken)
    assert await web.call("GET", "/api/v1/evaluations") == (500, {"error": "internal server error"})
    monkeypatch.undo()
    assert (await web.call("GET", "/api/v1/evaluations"))[0] == 200
