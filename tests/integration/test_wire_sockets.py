"""Links over real sockets: the listener, its limits and its neighbours."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio

from gradient.wire import messages as m
from gradient.wire.codec import FRAME_LIMIT
from gradient.wire.errors import ConnectFailed, LinkClosed
from gradient.wire.listener import serve_links
from gradient.wire.transport import Link, connect
from tests.patience import PATIENCE

Handler = Callable[[Link], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, **options: Any) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        [(host, port)] = await nursery.start(
            partial(serve_links, handler, host="127.0.0.1", port=0, **options)
        )
        yield f"ws://{host}:{port}/proto"
        nursery.cancel_scope.cancel()


async def echo(link: Link) -> None:
    link.trust()
    async for message in link:
        await link.send(m.AbortJob("echo", type(message).__name__))


async def test_messages_over_tcp() -> None:
    async with serving(echo) as url, connect(url) as link:
        assert link.peer == url.removesuffix("/proto")
        tcp = link._stream._inner
        assert isinstance(tcp, trio.SocketStream)
        assert tcp.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await link.send(m.LogChunk("j", 1, bytes(FRAME_LIMIT - 100)))
        assert await link.receive() == m.AbortJob("echo", "LogChunk")


async def test_one_hostile_peer_costs_nobody_else_anything() -> None:
    """Broken rules, a frame over the limit and a stranger's bytes: the neighbour's link does not notice."""
    async with serving(echo) as url, connect(url) as neighbour:
        async with connect(url) as link:
            await link._websocket.send_message(b"\x00")
            with pytest.raises(LinkClosed, match=r"1002: frame is not"):
                await link.receive()
        async with connect(url) as link:
            await link._websocket.send_message(bytes(FRAME_LIMIT + 1))
            with pytest.raises(LinkClosed, match="1009"):
                await link.receive()
        address = urlsplit(url)
        assert address.hostname
        assert address.port
        async with await trio.open_tcp_stream(address.hostname, address.port) as stranger:
            await stranger.send_all(b"\x16\x03\x01" * 100)
            answer = b"".join([piece async for piece in stranger])
        assert answer.startswith(b"HTTP/1.1 400")
        await neighbour.send(m.Draining())
        assert await neighbour.receive() == m.AbortJob("echo", "Draining")


async def test_a_bug_in_a_handler_is_loud() -> None:
    async def buggy(link: Link) -> None:
        await link.receive()
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with serving(buggy) as url, connect(url) as link:
            await link.send(m.Draining())
            await trio.sleep_forever()


async def test_a_session_that_ends_in_a_group_ends_alone() -> None:
    async def grouped(link: Link) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.receive)
            nursery.start_soon(trio.sleep_forever)

    async with serving(grouped) as url:
        for _ in range(2):
            async with connect(url) as link:
                await link._websocket.send_message(b"\x00")
                with pytest.raises(LinkClosed, match="1002"):
                    await link.receive()


async def test_connections_over_the_limit_are_told_to_come_back() -> None:
    async def once(link: Link) -> None:
        await link.send(m.Draining())
        await link.receive()

    async with serving(once, connection_limit=1) as url:
        async with connect(url) as link:
            await link.receive()
            with pytest.raises(ConnectFailed, match="HTTP 503"):
                async with connect(url):
                    raise AssertionError
        # The place is free once the server has seen the goodbye.
        with trio.fail_after(PATIENCE):
            while True:
                if await connects(url):
                    break
                await trio.lowlevel.checkpoint()


async def connects(url: str) -> bool:
    try:
        async with connect(url) as link:
            await link.receive()
    except ConnectFailed:
        return False
    return True


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ws://127.0.0.1:1/proto", "ws://127.0.0.1:1 cannot be reached"),
        ("ws://no-such-host.invalid/proto", "ws://no-such-host.invalid cannot be reached"),
    ],
)
async def test_a_server_that_is_not_there(url: str, why: str) -> None:
    with pytest.raises(ConnectFailed, match=why):
        async with connect(url):
            raise AssertionError


async def test_tls_with_a_server_that_has_none() -> None:
    async with serving(echo) as url:
        with pytest.raises(ConnectFailed, match="does not speak TLS"):
            async with connect(url.replace("ws:", "wss:"), ssl_context=ssl.create_default_context()):
                raise AssertionError


@pytest.mark.parametrize("url", ["http://x/proto", "ws:///proto", "ws://user:secret@x/proto", "proto"])
async def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="not a ws:// or wss:// URL") as caught:
        async with connect(url):
            raise AssertionError
    assert "secret" not in str(caught.value)


async def test_a_port_in_use_is_an_oserror() -> None:
    async with serving(echo) as url:
        with pytest.raises(OSError, match="in use"):
            await serve_links(echo, host="127.0.0.1", port=urlsplit(url).port or 0)


async def test_the_server_says_goodbye_when_it_is_cancelled() -> None:
    ends: list[LinkClosed] = []
    connected = trio.Event()

    async def client(url: str) -> None:
        async with connect(url) as link:
            await link.send(m.Draining())
            await link.receive()
            connected.set()
            with pytest.raises(LinkClosed) as caught:
                await link.receive()
            ends.append(caught.value)

    async with trio.open_nursery() as outside:
        with trio.CancelScope() as scope:
            async with serving(echo) as url:
                outside.start_soon(client, url)  # noqa: ASYNC111  # outlives the server on purpose
                await connected.wait()
                scope.cancel()
                await trio.sleep_forever()
    assert [end.code for end in ends] == [1001]
