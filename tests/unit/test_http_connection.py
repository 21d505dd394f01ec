"""The order of things on one connection, with a stream that does exactly what a test says."""

from __future__ import annotations

from typing import Any

import h11
import pytest
import trio

from gradient.http.connection import Connection
from gradient.http.errors import ConnectionLost
from gradient.http.url import Origin

ANSWER = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig"


class Broken(trio.abc.Stream):
    """Takes nothing any more; what was received before that is `answer`, seen `later` seconds later."""

    def __init__(self, answer: bytes, later: float) -> None:
        self._answers = [answer, b""]
        self._later = later

    async def send_all(self, data: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise trio.BrokenResourceError

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.sleep(self._later)
        return self._answers.pop(0)

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


def put(length: int) -> h11.Request:
    return h11.Request(method="PUT", target="/", headers=[("Host", "a"), ("Content-Length", str(length))])


@pytest.mark.parametrize("size", [10, 2**20])
async def test_the_answer_of_a_server_that_stopped_reading_counts(size: int, autojump_clock: Any) -> None:
    connection = Connection(Broken(ANSWER, later=1), Origin("http", "a", 80))
    assert (await connection.ask(put(size), bytes(size))).status == 413
    assert await connection.read() == b"big"
    assert not connection.next_request()


@pytest.mark.parametrize("size", [10, 2**20])
async def test_a_server_that_stopped_reading_is_not_waited_for_long(size: int, autojump_clock: Any) -> None:
    connection = Connection(Broken(ANSWER, later=3600), Origin("http", "a", 80))
    with pytest.raises(ConnectionLost, match="stopped reading"):
        await connection.ask(put(size), bytes(size))
    assert trio.current_time() == 5
