"""The handshake on a link: drives `handshake.py`, with the deadline and the goodbye. Both ends.

Raises HandshakeRefused on the end that refuses and on the end that is refused, LinkClosed when the
peer just goes. Afterwards the link trusts its peer with full-sized frames.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, Protocol

import trio

from gradient.wire.errors import HandshakeRefused, RemoteProtocolError
from gradient.wire.handshake import (
    MALFORMED,
    CheckTokens,
    Established,
    FindPeers,
    Receive,
    Send,
    Step,
    server_side,
    worker_side,
)
from gradient.wire.messages import Capabilities, PeerToken, Reject
from gradient.wire.transport import Link

HANDSHAKE_LIMIT: Final = 15.0  # seconds, from the open WebSocket to the ack


class Registrar(Protocol):
    """What the server's handshake asks of the rest of the server."""

    async def find_peers(self, worker_id: str) -> Sequence[str] | Reject:
        """Answer FindPeers."""

    async def check_tokens(self, worker_id: str, tokens: Mapping[str, str]) -> Mapping[str, str | None]:
        """Answer CheckTokens."""


async def greet(
    link: Link, registrar: Registrar, granted: Capabilities, *, accepting: bool = True
) -> Established:
    """The server's end. A refused worker is sent a Reject, and the link is closed."""
    try:
        session = await _within_limit(link, server_side(granted, accepting=accepting), registrar)
    except RemoteProtocolError as error:
        refusal = HandshakeRefused(MALFORMED, str(error), close_code=1002)
    except HandshakeRefused as error:
        refusal = error
    else:
        link.trust()
        return session
    await link.send(Reject(refusal.code, refusal.reason))
    await link.close(refusal.close_code, refusal.reason)
    raise refusal


async def introduce(
    link: Link, worker_id: str, capabilities: Capabilities, tokens: Sequence[PeerToken], name: str = ""
) -> Established:
    """The worker's end."""
    session = await _within_limit(link, worker_side(worker_id, capabilities, tokens, name=name), None)
    link.trust()
    return session


async def _within_limit(
    link: Link, side: Generator[Step, Any, Established], registrar: Registrar | None
) -> Established:
    with trio.move_on_after(HANDSHAKE_LIMIT):
        return await _drive(link, side, registrar)
    raise HandshakeRefused(MALFORMED, f"the handshake took longer than {HANDSHAKE_LIMIT:g} s")


async def _drive(
    link: Link, side: Generator[Step, Any, Established], registrar: Registrar | None
) -> Established:
    answer: Any = None
    while True:
        try:
            step = side.send(answer)
        except StopIteration as done:
            session: Established = done.value
            return session
        answer = await _answer(link, step, registrar)


async def _answer(link: Link, step: Step, registrar: Registrar | None) -> Any:
    match step:
        case Send(message):
            return await link.send(message)
        case Receive():
            return await link.receive()
        case FindPeers(worker_id) if registrar is not None:
            return await registrar.find_peers(worker_id)
        case CheckTokens(worker_id, tokens) if registrar is not None:
            return await registrar.check_tokens(worker_id, tokens)
        case _:
            raise AssertionError(f"a worker's handshake has no {type(step).__name__}")
