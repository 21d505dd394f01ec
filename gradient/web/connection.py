"""One request between hypercorn and Quart: bodies with backpressure, and a tidy end. Layer: web.

Quart's own body has no bound: it takes in what the client sends whether or not a handler reads it. Here
a body holds a few chunks, and then TCP holds the client back. Nothing else may buffer a request.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import structlog
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart.utils import encode_headers
from quart.wrappers import Request
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest

from gradient.web.errors import UNAVAILABLE, BodyStalled, BodyTooLarge

log = structlog.get_logger()

# Chunks of at most 64 KiB that wait for the handler.
_BACKLOG: Final = 16
# Seconds without a byte of a body after which its client is given up: it holds a place of others.
STALL_LIMIT: Final = 60.0
# Seconds in which the rest of a body that no handler wanted may still come, after the answer. A client
# that sends all before it reads would otherwise see a broken connection and not the answer.
LINGER: Final = 2.0


class RequestBody:
    """The body as an asynchronous iterator of what came; every byte once."""

    def __init__(self, expected_size: int | None, max_content_length: int | None) -> None:
        self._send, self._receive = trio.open_memory_channel[bytes](_BACKLOG)
        self._ended = trio.Event()

    async def put(self, data: bytes) -> None:
        """Hand a chunk to the handler; waits while it has enough of them."""
        if data:
            with suppress(trio.BrokenResourceError):  # discarded: nobody wants it
                await self._send.send(data)

    def end(self) -> None:
        """All of it came."""
        self._send.close()
        self._ended.set()

    def discard(self) -> None:
        """Drop what is left."""
        self._receive.close()

    async def linger(self) -> None:
        """Wait for its end, but not for long."""
        with trio.move_on_after(LINGER):
            await self._ended.wait()

    def __aiter__(self) -> RequestBody:
        return self

    async def __anext__(self) -> bytes:
        """Raises BodyStalled when nothing comes for STALL_LIMIT."""
        with trio.move_on_after(STALL_LIMIT):
            try:
                return self._joined(await self._receive.receive())
            except trio.EndOfChannel:
                raise StopAsyncIteration from None
        raise BodyStalled(f"nothing more of the request came for {STALL_LIMIT:g} s")

    def _joined(self, first: bytes) -> bytes:
        """`first` and the chunks that wait behind it: a reader in a thread pays for each call."""
        chunks = [first]
        try:
            while True:
                chunks.append(self._receive.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return b"".join(chunks)

    async def read(self, limit: int) -> bytes:
        """All of it, for a body of at most `limit` bytes; raises BodyTooLarge, BodyStalled."""
        data = b""
        async for chunk in self:
            data += chunk
            if len(data) > limit:
                raise BodyTooLarge(f"the request is larger than {limit} bytes")
        return data


class BoundedRequest(TrioRequest):
    """A Quart request whose body is a RequestBody."""

    body_class = RequestBody  # type: ignore[assignment]


class NoWebSocket:
    """The answer to a WebSocket that was opened here: there is none, workers have a listener of their own."""

    def __init__(self, app: object, scope: object) -> None:
        pass

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Refuse, as any other path that is not there."""
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        await send({"type": "websocket.http.response.start", "status": 404, "headers": headers})
        body = b"no WebSocket here: workers connect to the proto_url of /api/v1/server\n"
        await send({"type": "websocket.http.response.body", "body": body, "more_body": False})


class Connection(TrioASGIHTTPConnection):
    """One request and its answer: a task that receives, a task that handles and sends."""

    _answered = False

    async def handle_messages(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, receive: ASGIReceiveCallable
    ) -> None:
        """Feed the body; a client that goes away cancels the handler."""
        body: Any = request.body
        while (message := await receive())["type"] == "http.request":
            await body.put(message.get("body", b""))
            if not message.get("more_body", False):
                body.end()
        # hypercorn says "disconnected" also from within the last send of a complete answer. Cancelling
        # that would keep it from starting the idle timeout of the connection.
        if not self._answered:
            nursery.cancel_scope.cancel()

    async def handle_request(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, send: ASGISendCallable
    ) -> None:
        """Handle, then send the answer in as many pieces as it comes in."""
        response: Any = await self.app.handle_request(request)
        body: Any = request.body
        body.discard()
        headers = encode_headers(response.headers)
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        try:
            async with response.response as pieces:
                async for piece in pieces:
                    data = piece.encode() if isinstance(piece, str) else piece
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except UNAVAILABLE as error:
            # Left without its end: a client can tell it from a complete answer, and asks again.
            log.warning("answer cut short", path=request.path, error=str(error))
            nursery.cancel_scope.cancel()
            return
        self._answered = True
        # The answer is out; ending it closes a connection whose request is not over.
        await body.linger()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        nursery.cancel_scope.cancel()
