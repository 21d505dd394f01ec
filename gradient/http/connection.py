"""One HTTP/1.1 connection: h11 decides what the bytes mean, trio moves them. One request at a time.

A body is sent while the connection listens. A server that refuses an upload answers early and closes;
a client that only writes would see a broken pipe where there was a status and a reason.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import Final

import attrs
import h11
import trio

from gradient.http.errors import AnswerTooLarge, BadBody, ConnectionLost, HttpError, ProtocolFault
from gradient.http.url import Origin

# Status line and headers together; nobody honest needs more.
HEADER_LIMIT: Final = 64 * 2**10  # bytes
# An answer kept in memory: an error text, a receipt.
ANSWER_LIMIT: Final = 2**20  # bytes
# One read. Larger ones gain nothing, smaller ones cost a system call each.
_PIECE: Final = 256 * 2**10  # bytes
# For the answer of a server that stopped reading our body; it was sent before or never.
_LAST_WORDS_LIMIT: Final = 5.0  # seconds
# Interim answers (100, 103) before the one that counts.
_INTERIM_LIMIT: Final = 8


@attrs.frozen
class Head:
    """Status and headers of an answer. Names are lower case, repeated headers joined by a comma."""

    status: int
    headers: Mapping[str, str]


@attrs.frozen
class Response:
    """A complete answer; `body` is at most ANSWER_LIMIT bytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """A connection to `origin` over `stream`. Close it after any exception: what was sent is unknown."""

    def __init__(self, stream: trio.abc.Stream, origin: Origin) -> None:
        self.origin = origin
        # Whether a byte of the current answer has come; if not, a request may be tried again.
        self.heard = False
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_LIMIT)
        # A send or a read ended in an exception: never to be used again.
        self._broken = False
        # The current answer has been read to its end.
        self._complete = False
        # The server sends nothing more on this connection.
        self._ended = False

    async def ask(self, request: h11.Request, body: bytes = b"") -> Head:
        """Send a request whose body is at hand; the head of the answer.

        Raises ConnectionLost, ProtocolFault.
        """
        if len(body) > _PIECE:
            return await self.converse(request, body)
        lost: ConnectionLost | None = None
        try:
            await self._send(request, *([h11.Data(body)] if body else []), h11.EndOfMessage())
        except ConnectionLost as error:
            lost = error
        if lost is None:
            return await self._head()
        # It may have answered before it stopped reading.
        with trio.move_on_after(_LAST_WORDS_LIMIT):
            return await self._head()
        raise lost

    async def converse(self, request: h11.Request, body: AsyncIterable[bytes] | bytes) -> Head:
        """Send a request while listening; the head of the answer. A final answer ends the sending.

        Exceptions of `body` come out as they are; it is closed if it is a generator.
        Raises ConnectionLost, ProtocolFault, BadBody.
        """
        answer: Head | None = None
        failure: Exception | None = None
        speaking = trio.CancelScope()

        async def listen() -> None:
            nonlocal answer, failure
            try:
                answer = await self._head()
            except HttpError as error:
                failure = failure or error
            speaking.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            with speaking:
                try:
                    await self._speak(request, body)
                except Exception as error:
                    failure = failure or error
                    # A server that stopped reading may have said why; after a fault of the body
                    # there is nothing to wait for.
                    patience = _LAST_WORDS_LIMIT if self._broken else 0
                    nursery.cancel_scope.deadline = trio.current_time() + patience
        if answer is not None:
            return answer
        assert failure is not None
        raise failure

    async def next_piece(self) -> bytes | None:
        """The next piece of the answer's body, None at its end. Raises ConnectionLost when it is cut
        short, ProtocolFault. Cancelled: the connection is of no more use."""
        if self._complete:
            return None
        event = await self._next_event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            self._complete = True
            return None
        raise ProtocolFault(f"{self.origin} sent no HTTP body: {event!r}")

    async def read(self, limit: int = ANSWER_LIMIT) -> bytes:
        """The whole body of the answer; raises AnswerTooLarge past `limit` bytes."""
        body = bytearray()
        while (piece := await self.next_piece()) is not None:
            if len(body) + len(piece) > limit:
                self._broken = True
                raise AnswerTooLarge(f"{self.origin} answered with more than {limit} bytes")
            body += piece
        return bytes(body)

    def next_request(self) -> bool:
        """Get ready for another request; False when this connection can carry none."""
        done = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if self._broken or not done or self._http.trailing_data[0]:
            return False
        self._http.start_next_cycle()
        self.heard = self._complete = False
        return True

    def quiet(self) -> bool:
        """Whether the server has sent nothing while idle; an end of stream counts as something."""
        tcp = self._stream.transport_stream if isinstance(self._stream, trio.SSLStream) else self._stream
        return not (isinstance(tcp, trio.SocketStream) and tcp.socket.is_readable())

    async def aclose(self) -> None:
        """Close at once, also when cancelled."""
        await trio.aclose_forcefully(self._stream)

    # --- one direction each ---------------------------------------------------------------------------

    async def _speak(self, request: h11.Request, body: AsyncIterable[bytes] | bytes) -> None:
        try:
            await self._send(request)
            if isinstance(body, bytes):
                await self._send(h11.Data(body))
            else:
                async for piece in body:
                    await self._send(h11.Data(piece))
            await self._send(h11.EndOfMessage())
        finally:
            with trio.move_on_after(_LAST_WORDS_LIMIT, shield=True):
                await _close_generator(body)

    async def _send(self, *events: h11.Event) -> None:
        try:
            data = b"".join(self._http.send(event) or b"" for event in events)
            if data:
                await self._stream.send_all(data)
        except h11.LocalProtocolError as error:
            raise BadBody(f"the body is not as long as was announced: {error}") from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._broken = True
            raise ConnectionLost(f"{self.origin} stopped reading the request") from error
        except BaseException:
            self._broken = True
            raise

    async def _head(self) -> Head:
        for _ in range(_INTERIM_LIMIT):
            event = await self._next_event()
            if isinstance(event, h11.Response):
                return Head(event.status_code, _headers(event))
            if not isinstance(event, h11.InformationalResponse):
                raise ProtocolFault(f"{self.origin} sent no HTTP answer: {event!r}")
        raise ProtocolFault(f"{self.origin} sends one interim answer after the other")

    async def _next_event(self) -> h11.Event:
        try:
            while True:
                event = self._http.next_event()
                if event is not h11.NEED_DATA:
                    assert isinstance(event, h11.Event)  # PAUSED comes to servers only
                    return event
                self._http.receive_data(await self._receive())  # type: ignore[arg-type]
        except h11.RemoteProtocolError as error:
            self._broken = True
            if self._ended:
                raise ConnectionLost(f"{self.origin} hung up before its answer was complete") from error
            raise ProtocolFault(f"{self.origin} does not speak HTTP: {error}") from error
        except BaseException:
            self._broken = True
            raise

    async def _receive(self) -> bytes | bytearray:
        """h11 takes any bytes-like value, whatever its annotation says."""
        try:
            data = await self._stream.receive_some(_PIECE)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionLost(f"the connection to {self.origin} broke: {error.__cause__}") from error
        self.heard = self.heard or bool(data)
        self._ended = not data
        return data


async def _close_generator(body: object) -> None:
    close: Callable[[], Awaitable[None]] | None = getattr(body, "aclose", None)
    if close is not None:
        await close()


def _headers(event: h11.Response) -> dict[str, str]:
    found: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found
