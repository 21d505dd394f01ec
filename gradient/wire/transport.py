"""One WebSocket connection as a `Link` that carries messages, both ends. The only importer of
trio-websocket.

    body ── send ──> Outbox (two lanes) ── writer ──> WatchedStream ──> peer
    body <── async for ── decode <── library's queue <── library's reader <── WatchedStream

The tasks beside the body stand in one nursery that the context manager owns: the library's reader, the
writer, the beat (an unsolicited pong every 10 s: a heartbeat that needs no answer, so it also serves a
peer that pauses its reader), and the watches over silence and end. None of them raises: whatever ends
the link is kept as its end, the body meets it as `LinkClosed` at its next `send` or read, and the body's
own exceptions come out of the context manager as they were, in no group.

Back-pressure: a body that does not read stops the library's reader at its full queue, and TCP holds the
peer back. Such a pause is ours and never counts as the peer's silence (`watched.py`).
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Self, TypeVar

import attrs
import structlog
import trio
import trio_websocket

from gradient.wire.codec import FRAME_LIMIT, FRAME_LIMIT_BEFORE_AUTH, Message, decode, encode
from gradient.wire.dial import Address, dial, peer_name
from gradient.wire.errors import (
    ConnectFailed,
    LinkClosed,
    RemoteProtocolError,
    SendStalled,
    first_of,
)
from gradient.wire.lanes import Outbox, lane_of
from gradient.wire.messages import FROM_SERVER, FROM_WORKER
from gradient.wire.watched import WatchedStream

PATH: Final = "/proto"

# From the first byte to the open WebSocket, TCP and TLS included.
OPEN_LIMIT: Final = 15.0  # seconds
# For the last queued frames, the goodbye and the peer's answer to it; then the socket is cut.
CLOSE_LIMIT: Final = 2.0  # seconds
# Frames the library holds undecoded. More would only be memory: 8 MiB each in the worst case.
_LIBRARY_QUEUE: Final = 8
# The library's default of 4 KiB makes 2,000 system calls of a full frame.
_RECEIVE_BUFFER: Final = 64 * 2**10  # bytes

GOING_AWAY: Final = 1001
PROTOCOL_VIOLATION: Final = 1002
ABNORMAL: Final = 1006
FLOODING: Final = 1008
INTERNAL_ERROR: Final = 1011

log = structlog.get_logger(__name__)


@attrs.frozen
class Limits:
    """How patient a link is, in seconds."""

    # Longest silence of the peer before the link is dead: twelve of its beats.
    silence: float = 120.0
    # Our own sign of life.
    beat: float = 10.0
    # Longest time without the peer taking a byte of ours.
    stall: float = 30.0


SERVER_LIMITS: Final = Limits()
# A server whose database is slow holds its workers back through TCP on purpose. To give up after 30 s
# would abort every running build for it; a server that is gone shows by its silence.
WORKER_LIMITS: Final = Limits(stall=600.0)

T = TypeVar("T")
Upgrade = Callable[[trio.Nursery, trio.abc.Stream], Awaitable[trio_websocket.WebSocketConnection]]


class Link:
    """One connection. Made by `connect`, `accept` or `link_over`; lives as long as their `async with`.

    `send` may be called by many tasks; only one may read.
    """

    def __init__(
        self,
        websocket: trio_websocket.WebSocketConnection,
        stream: WatchedStream,
        *,
        allowed: frozenset[type],
        limits: Limits,
        peer: str,
    ) -> None:
        #: The other end, `127.0.0.1:49152`: for logs.
        self.peer = peer
        self._websocket = websocket
        self._stream = stream
        self._allowed = allowed
        self._limits = limits
        self._frame_limit = FRAME_LIMIT_BEFORE_AUTH
        self._outbox = Outbox()
        self._written = trio.Event()
        # Why the link is over; set once, None while it lives.
        self._end: LinkClosed | None = None
        # What we tell a peer that broke the protocol.
        self._complaint: str | None = None

    @property
    def ended(self) -> LinkClosed | None:
        """Why the link is over, None while it lives."""
        return self._end

    def trust(self) -> None:
        """The peer has proved who it is: accept frames up to FRAME_LIMIT from it."""
        self._frame_limit = FRAME_LIMIT
        # The library has no public way to change it; a test holds that this works.
        self._websocket._max_message_size = FRAME_LIMIT

    async def send(self, message: Message) -> None:
        """Queue `message` in its lane; wait while the lane is full.

        Returning means queued, not delivered. Cancelled while it waits: not queued, the link is well.
        Raises LinkClosed (SendStalled) once the link is over, LocalProtocolError for what is no message.
        """
        frame = encode(message)
        try:
            await self._outbox.put(lane_of(message), frame)
        except trio.ClosedResourceError:
            raise self._closed() from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message. The iteration has no quiet end: it raises LinkClosed, or RemoteProtocolError
        for a frame that breaks the protocol. Cancelled: no message is lost."""
        try:
            frame = await self._websocket.get_message()
        except trio_websocket.ConnectionClosed:
            raise self._closed() from None
        try:
            return self._decoded(frame)
        except RemoteProtocolError as error:
            self._complaint = str(error)
            raise

    async def receive(self) -> Message:
        """The next message, outside a loop; raises as the iteration does."""
        return await anext(self)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Write what is queued, say goodbye, hang up. Takes at most CLOSE_LIMIT, also when cancelled;
        raises nothing of the network's. Closing twice is fine."""
        self._over(LinkClosed(code, reason))
        with trio.move_on_after(CLOSE_LIMIT, shield=True):
            await self._written.wait()
            await _unless_ended(self._stream, partial(self._websocket.aclose, code, reason))
        await trio.aclose_forcefully(self._stream)

    # --- the tasks beside the body; none of them raises -------------------------------------------

    async def _run(self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._beat)
                nursery.start_soon(self._watch_silence)
                nursery.start_soon(self._watch_end)
                task_status.started()

    async def _write(self) -> None:
        try:
            while (frame := await self._outbox.next()) is not None:
                await self._websocket.send_message(frame)
        except trio_websocket.ConnectionClosed:
            self._lost()
        finally:
            self._written.set()

    async def _beat(self) -> None:
        try:
            while True:
                await trio.sleep(self._limits.beat)
                await self._websocket.pong()
        except trio_websocket.ConnectionClosed:
            self._lost()

    async def _watch_silence(self) -> None:
        while True:
            left = self._limits.silence - self._stream.silent_for()
            if left <= 0:
                break
            await trio.sleep(left)
        self._over(LinkClosed(ABNORMAL, f"the peer was silent for {self._limits.silence:g} s"))
        await trio.aclose_forcefully(self._stream)

    async def _watch_end(self) -> None:
        """Wake senders when the connection ends, though nothing is written or read just then."""
        await self._stream.ended.wait()
        self._lost()

    # --- how it ends ------------------------------------------------------------------------------

    def _decoded(self, frame: bytes | str) -> Message:
        if isinstance(frame, str):
            raise RemoteProtocolError("a text frame; messages are binary")
        return decode(frame, self._allowed, self._frame_limit)

    def _over(self, end: LinkClosed) -> None:
        self._end = self._end or end
        self._outbox.close()

    def _lost(self) -> None:
        """The library says that the connection is gone: keep why."""
        if self._stream.stalled:
            self._over(SendStalled(ABNORMAL, f"the peer took no byte for {self._limits.stall:g} s"))
            return
        why = self._websocket.closed
        code = ABNORMAL if why is None else int(why.code)
        default = "the connection broke" if code == ABNORMAL else ""
        self._over(LinkClosed(code, (why.reason if why else None) or default))

    def _closed(self) -> LinkClosed:
        """The end, as an exception of its own for each task that meets it."""
        self._lost()
        assert self._end is not None
        return type(self._end)(self._end.code, self._end.reason)

    async def _take_leave(self, error: BaseException | None) -> None:
        """Close with what the body's exception means to the peer."""
        if self._complaint is not None:
            await self.close(PROTOCOL_VIOLATION, self._complaint)
        elif error is None:
            await self.close()
        elif _is_cancellation(error):
            await self.close(GOING_AWAY, "stopping")
        else:
            await self.close(INTERNAL_ERROR, "internal error")


def _is_cancellation(error: BaseException) -> bool:
    """Whether nothing went wrong: a body that has a nursery is cancelled in a group."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)


# --- opening ------------------------------------------------------------------------------------------


@asynccontextmanager
async def connect(
    url: str, *, ssl_context: ssl.SSLContext | None = None, limits: Limits = WORKER_LIMITS
) -> AsyncIterator[Link]:
    """The worker's end of a link to `ws://host[:port]/proto` or `wss://...`.

    `ssl_context` for wss is the system's default one unless given. Raises ConnectFailed when no link
    comes about within OPEN_LIMIT, ValueError for a URL that is none. Leaving closes the link: 1000, 1001
    when cancelled, 1002 after a RemoteProtocolError, 1011 after any other exception, which comes out
    as it was.
    """
    address = Address.parse(url)
    with trio.move_on_after(OPEN_LIMIT) as scope:
        stream = await dial(address, ssl_context)
    if scope.cancelled_caught:
        raise ConnectFailed(f"{address} did not answer within {OPEN_LIMIT:g} s")
    upgrade = partial(_client_upgrade, host=address.host_header, resource=address.path)
    async with link_over(stream, upgrade, allowed=FROM_SERVER, limits=limits, peer=str(address)) as link:
        yield link


@asynccontextmanager
async def accept(stream: trio.abc.Stream, *, limits: Limits = SERVER_LIMITS) -> AsyncIterator[Link]:
    """The server's end of a link over a new connection; the stream is closed at the end.

    Raises ConnectFailed when no WebSocket for PATH is asked for within OPEN_LIMIT (404 for another path);
    leaving is as with `connect`.
    """
    peer = peer_name(stream)
    async with link_over(stream, _server_upgrade, allowed=FROM_WORKER, limits=limits, peer=peer) as link:
        yield link


@asynccontextmanager
async def connect_over(stream: trio.abc.Stream, *, limits: Limits = WORKER_LIMITS) -> AsyncIterator[Link]:
    """As `connect`, over a stream that exists already: for tests in memory."""
    upgrade = partial(_client_upgrade, host="localhost", resource=PATH)
    async with link_over(stream, upgrade, allowed=FROM_SERVER, limits=limits, peer="stream") as link:
        yield link


@asynccontextmanager
async def link_over(
    stream: trio.abc.Stream, upgrade: Upgrade, *, allowed: frozenset[type], limits: Limits, peer: str
) -> AsyncIterator[Link]:
    """Upgrade `stream` and run the link's tasks around the body."""
    watched = WatchedStream(stream, limits.stall)
    # The tasks outlive a cancelled body by the goodbye: their scopes are shields while the body runs, and
    # are cancelled here after a close that takes at most CLOSE_LIMIT. Not sooner: a task that is shielded
    # before it has started would survive the cancellation of its start.
    library, tasks = trio.CancelScope(), trio.CancelScope()
    link: Link | None = None
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            websocket = await nursery.start(_run_library, upgrade, watched, library)
            link = Link(websocket, watched, allowed=allowed, limits=limits, peer=peer)
            await nursery.start(link._run, tasks)
            library.shield = tasks.shield = True
            yield link
        except BaseException as error:  # noqa: ASYNC103  # raised below: here the nursery would wrap it
            failure = error
        if link is not None:
            with trio.move_on_after(CLOSE_LIMIT, shield=True):
                await link._take_leave(failure)
        library.cancel()
        tasks.cancel()
    if failure is not None:
        raise failure


async def _run_library(
    upgrade: Upgrade,
    stream: WatchedStream,
    scope: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[trio_websocket.WebSocketConnection],
) -> None:
    """Run the library's reader until the connection ends or `scope` is cancelled; started once the
    WebSocket is open.

    The reader runs none of our code, and a hostile peer can make it raise nearly anything (a header that
    is no UTF-8, a ping after our close). So this is where such exceptions end: before the start as
    ConnectFailed, after it as a broken connection.
    """
    opened = False
    failure = ConnectFailed("the peer hung up before the WebSocket was open")
    try:
        with scope:
            async with trio.open_nursery() as nursery:
                with trio.fail_after(OPEN_LIMIT):
                    websocket = await _unless_ended(stream, partial(upgrade, nursery, stream))
                if websocket is None:
                    raise failure
                opened = True
                task_status.started(websocket)
    except* ConnectFailed as group:
        failure = ConnectFailed(*first_of(group).args)
    except* trio_websocket.ConnectionRejected as group:
        failure = ConnectFailed(_rejection(first_of(group)))
    except* trio.TooSlowError:
        failure = ConnectFailed(f"no WebSocket within {OPEN_LIMIT:g} s")
    except* Exception as group:
        log.info("websocket reader failed", error=repr(first_of(group)))
        failure = ConnectFailed(f"no valid WebSocket handshake: {first_of(group)}")
    finally:
        await trio.aclose_forcefully(stream)
    if not opened:
        raise failure


async def _unless_ended(stream: WatchedStream, job: Callable[[], Awaitable[T]]) -> T | None:
    """`job()`, cancelled when the stream ends, because the library would then wait for ever; None then."""
    result: T | None = None

    async def give_up() -> None:
        await stream.ended.wait()
        race.cancel_scope.cancel()

    async with trio.open_nursery() as race:
        race.start_soon(give_up)
        result = await job()
        race.cancel_scope.cancel()
    return result


async def _client_upgrade(
    nursery: trio.Nursery, stream: trio.abc.Stream, *, host: str, resource: str
) -> trio_websocket.WebSocketConnection:
    return await trio_websocket.wrap_client_stream(
        nursery,
        stream,  # type: ignore[arg-type]  # any trio stream will do
        host,
        resource,
        message_queue_size=_LIBRARY_QUEUE,
        max_message_size=FRAME_LIMIT_BEFORE_AUTH,
        receive_buffer_size=_RECEIVE_BUFFER,
    )


async def _server_upgrade(
    nursery: trio.Nursery, stream: trio.abc.Stream
) -> trio_websocket.WebSocketConnection:
    request = await trio_websocket.wrap_server_stream(
        nursery,
        stream,
        message_queue_size=_LIBRARY_QUEUE,
        max_message_size=FRAME_LIMIT_BEFORE_AUTH,
        receive_buffer_size=_RECEIVE_BUFFER,
    )
    if request.path.partition("?")[0] != PATH:
        await request.reject(404, body=f"the protocol is at {PATH}\n".encode())
        raise ConnectFailed(f"asked for {request.path}, not {PATH}")
    return await request.accept()


def _rejection(error: BaseException) -> str:
    status = getattr(error, "status_code", "?")
    return f"the server answered HTTP {status} instead of opening a WebSocket"
