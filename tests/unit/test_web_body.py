"""Request bodies: backpressure, ends, stalls. The clock jumps; nothing here is real."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gradient.web.connection import LINGER, STALL_LIMIT, RequestBody
from gradient.web.errors import BodyStalled, BodyTooLarge


def body_of(*chunks: bytes, ended: bool = True) -> RequestBody:
    body = RequestBody(None, None)
    for chunk in chunks:
        body._send.send_nowait(chunk)
    if ended:
        body.end()
    return body


async def test_chunks_that_wait_come_as_one() -> None:
    body = body_of(b"a", b"b", b"c")
    assert [chunk async for chunk in body] == [b"abc"]


async def test_an_unread_body_holds_its_sender_back(nursery: trio.Nursery) -> None:
    body = RequestBody(None, None)
    sent = 0

    async def sender() -> None:
        nonlocal sent
        for _ in range(100):
            await body.put(b"x")
            sent += 1
        body.end()

    nursery.start_soon(sender)
    await wait_all_tasks_blocked()
    assert 0 < sent < 20
    assert len(await body.read(100)) == 100
    assert sent == 100


async def test_a_discarded_body_lets_its_sender_go_on(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    body = RequestBody(None, None)

    async def sender() -> None:
        for _ in range(100):
            await body.put(b"x")
        body.end()

    nursery.start_soon(sender)
    await wait_all_tasks_blocked()
    body.discard()
    start = trio.current_time()
    await body.linger()
    assert trio.current_time() == start


async def test_lingering_has_an_end(autojump_clock: MockClock) -> None:
    body = body_of(ended=False)
    start = trio.current_time()
    await body.linger()
    assert trio.current_time() - start == pytest.approx(LINGER)


async def test_a_silent_client_is_given_up(autojump_clock: MockClock) -> None:
    body = body_of(b"begin", ended=False)
    assert await anext(body) == b"begin"
    start = trio.current_time()
    with pytest.raises(BodyStalled):
        await anext(body)
    assert trio.current_time() - start == pytest.approx(STALL_LIMIT)


async def test_a_body_is_read_up_to_a_limit() -> None:
    assert await body_of(b"ab", b"cd").read(4) == b"abcd"
    assert await body_of().read(4) == b""
    with pytest.raises(BodyTooLarge):
        await body_of(b"ab", b"cd").read(3)
