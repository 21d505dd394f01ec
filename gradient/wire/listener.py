"""The server's listener: one link for each connection, one session's trouble never another's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog
import trio

from gradient.wire.dial import peer_name
from gradient.wire.errors import WireError, first_of
from gradient.wire.transport import SERVER_LIMITS, Limits, Link, accept

# Connections at once, strangers included; each costs a descriptor and up to FRAME_LIMIT_BEFORE_AUTH.
CONNECTION_LIMIT: Final = 256
_RETRY_AFTER: Final = 10  # seconds a refused client is told to wait
# For reading a request that is refused anyway, and for the refusal.
_REFUSAL_LIMIT: Final = 2.0  # seconds

log = structlog.get_logger(__name__)


async def serve_links(
    handler: Callable[[Link], Awaitable[None]],
    *,
    host: str,
    port: int,
    limits: Limits = SERVER_LIMITS,
    connection_limit: int = CONNECTION_LIMIT,
    task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen and run `handler(link)` for each connection, until cancelled; the addresses bound are the
    started value. The link is closed when the handler ends.

    A handler ends by returning or by a WireError (also in a group): both are one session's matter. Any
    other exception is a bug, closes that link with 1011 and leaves here, in a group. Raises OSError
    when the port cannot be bound. Over `connection_limit` connections get HTTP 503.
    """
    listeners = await trio.open_tcp_listeners(port, host=host)
    room = trio.CapacityLimiter(connection_limit)
    serve = partial(_serve_one, handler=handler, limits=limits, room=room)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, serve, listeners)
        task_status.started([listener.socket.getsockname()[:2] for listener in listeners])


async def _serve_one(
    stream: trio.SocketStream,
    *,
    handler: Callable[[Link], Awaitable[None]],
    limits: Limits,
    room: trio.CapacityLimiter,
) -> None:
    token, peer = object(), peer_name(stream)
    try:
        room.acquire_on_behalf_of_nowait(token)
    except trio.WouldBlock:
        log.warning("no room for another connection", peer=peer)
        await _refuse_for_now(stream)
        return
    try:
        async with accept(stream, limits=limits) as link:
            await handler(link)
    except* WireError as group:
        log.info("link ended", peer=peer, why=str(first_of(group)))
    finally:
        room.release_on_behalf_of(token)


async def _refuse_for_now(stream: trio.SocketStream) -> None:
    """HTTP 503. The request is read first: closing over unread bytes would take the answer with it."""
    answer = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {_RETRY_AFTER}\r\n"
    try:
        with trio.move_on_after(_REFUSAL_LIMIT):
            await stream.receive_some(2**16)
            await stream.send_all(f"{answer}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
    except trio.BrokenResourceError:
        log.debug("refused connection was gone already")
