"""The handshake on a real link over memory streams, and its goodbyes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from gradient.wire import messages as m
from gradient.wire.codec import FRAME_LIMIT_BEFORE_AUTH
from gradient.wire.errors import HandshakeRefused, LinkClosed
from gradient.wire.greeting import greet, introduce
from gradient.wire.handshake import Established
from gradient.wire.transport import accept, connect_over

WORKER = "0d7c7a9e-9a1c-4f43-9d0e-8a6f3a1c2b4d"
ALL = m.Capabilities()


@attrs.frozen
class Book:
    """A registrar with one token; `turned_away` refuses everybody."""

    token: str = "good"
    turned_away: m.Reject | None = None

    async def find_peers(self, worker_id: str) -> Sequence[str] | m.Reject:
        return self.turned_away or ("project",)

    async def check_tokens(self, worker_id: str, tokens: Mapping[str, str]) -> Mapping[str, str | None]:
        return {peer: None if token == self.token else "wrong token" for peer, token in tokens.items()}


@attrs.define
class Outcome:
    """What each end got: the session or the refusal, and how the link ended for the worker."""

    server: Established | HandshakeRefused | None = None
    worker: Established | HandshakeRefused | None = None
    end: LinkClosed | None = None


async def meet(book: Book, worker_side: Any) -> Outcome:
    near, far = trio.testing.memory_stream_pair()
    outcome = Outcome()

    async def serve() -> None:
        try:
            async with accept(far) as link:
                outcome.server = await greet(link, book, ALL)
                # Only a trusted peer may send as much.
                assert await link.receive() == m.LogChunk("j", 1, bytes(FRAME_LIMIT_BEFORE_AUTH))
        except HandshakeRefused as refusal:
            outcome.server = refusal

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with connect_over(near) as link:
            try:
                outcome.worker = await worker_side(link)
                await link.send(m.LogChunk("j", 1, bytes(FRAME_LIMIT_BEFORE_AUTH)))
            except HandshakeRefused as refusal:
                outcome.worker = refusal
            with pytest.raises(LinkClosed) as caught:
                await link.receive()
            outcome.end = caught.value
    return outcome


def present(token: str, worker_id: str = WORKER) -> Any:
    return lambda link: introduce(link, worker_id, ALL, (m.PeerToken("*", token),))


async def test_a_worker_with_a_good_token_is_trusted() -> None:
    outcome = await meet(Book(), present("good"))
    assert outcome.server == outcome.worker == Established(1, WORKER, ALL, ("project",), ())
    assert outcome.end is not None
    assert outcome.end.code == 1000


@pytest.mark.parametrize(
    ("book", "side", "code", "close_code", "reason"),
    [
        (Book(), present("bad"), 401, 1008, "project: wrong token"),
        (Book(), present("good", "x"), 400, 1008, "UUID"),
        (Book(turned_away=m.Reject(403, "unknown")), present("good"), 403, 1008, "unknown"),
        (Book(turned_away=m.Reject(496, "twice")), present("good"), 496, 1008, "twice"),
    ],
)
async def test_both_ends_learn_of_a_refusal(
    book: Book, side: Any, code: int, close_code: int, reason: str
) -> None:
    outcome = await meet(book, side)
    for end in (outcome.server, outcome.worker):
        assert isinstance(end, HandshakeRefused)
        assert end.code == code
        assert reason in end.reason
    assert outcome.end is not None
    assert outcome.end.code == close_code


@pytest.mark.parametrize("message", [m.Draining(), b"\x92\x63\x80"])
async def test_nonsense_instead_of_a_handshake(message: Any) -> None:
    async def nonsense(link: Any) -> None:
        if isinstance(message, bytes):
            await link._websocket.send_message(message)
        else:
            await link.send(message)
        reply = await link.receive()
        raise HandshakeRefused(reply.code, reply.reason)

    outcome = await meet(Book(), nonsense)
    assert isinstance(outcome.server, HandshakeRefused)
    assert isinstance(outcome.worker, HandshakeRefused)
    assert outcome.server.code == outcome.worker.code == 400
    assert outcome.end is not None
    assert outcome.end.code == 1002


async def test_a_worker_that_says_nothing_is_refused_after_15_s(autojump_clock: Any) -> None:
    async def silence(link: Any) -> None:
        reply = await link.receive()
        raise HandshakeRefused(reply.code, reply.reason)

    outcome = await meet(Book(), silence)
    assert isinstance(outcome.server, HandshakeRefused)
    assert "longer than 15 s" in outcome.server.reason
    assert trio.current_time() == 15
