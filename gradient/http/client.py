"""`HttpClient`: JSON calls, uploads and downloads over http and https.

No timeouts here: every wait ends with the caller's cancel scope. No proxies. Redirects are followed for
downloads only, and a token never leaves the origin it was given for.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import attrs
import h11
import trio

from gradient import __version__
from gradient.http.connection import Connection, Head, Response
from gradient.http.dial import dial
from gradient.http.errors import BadUrl, ConnectionLost, ProtocolFault
from gradient.http.json_calls import call_json
from gradient.http.pool import Pool
from gradient.http.url import Url

REDIRECT_LIMIT: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
# For giving a connection back or closing it while the caller is being cancelled.
_SETTLE_LIMIT: Final = 1.0  # seconds

USER_AGENT: Final = f"gradient/{__version__}"

T = TypeVar("T")


@attrs.frozen
class Download:
    """An answer whose body is read piece by piece: `async for piece in download`. Once, and not after
    the `async with` it came from."""

    status: int
    headers: Mapping[str, str]
    _connection: Connection = attrs.field(repr=False, alias="connection")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """A piece of at most 256 KiB. Raises ConnectionLost when the body is cut short, ProtocolFault."""
        piece = await self._connection.next_piece()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def read(self, limit: int) -> bytes:
        """The whole body; raises AnswerTooLarge past `limit` bytes, and what iterating raises."""
        return await self._connection.read(limit)


class HttpClient:
    """Keeps connections open between requests; `async with`, or `aclose` at the end. For any number of
    tasks at once: a request takes a connection for itself.

    `tls` is the system's default context unless given; SSL_CERT_FILE names another CA file to it.
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._pool = Pool(self._context)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with trio.move_on_after(_SETTLE_LIMIT, shield=True):
            await self.aclose()

    async def aclose(self) -> None:
        """Close the idle connections; one in use is closed when its request is over."""
        await self._pool.aclose()

    async def request_json(
        self, method: str, url: str, token: str | None = None, body: Any = None
    ) -> tuple[int, Any]:
        """Send `body` as JSON (None: no body); the status and the answer's value (None: empty).

        Raises BadUrl, ConnectFailed, ConnectionLost, ProtocolFault (no JSON), AnswerTooLarge.
        """
        where = Url.parse(url)
        stream = await dial(where.origin, self._context)
        headers = {"Accept": "application/json", "User-Agent": USER_AGENT, **_credentials(token)}
        return await call_json(stream, where, method, headers, body)

    async def upload(
        self,
        url: str,
        *,
        token: str | None,
        body: AsyncIterable[bytes] | bytes,
        content_length: int | None = None,
        method: str = "PUT",
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send `body`; the whole answer. An iterable goes chunked unless `content_length` is given.

        A server that answers before it has read everything ends the sending, and its answer is
        returned. Exceptions of an iterable come out as they are. Bytes may be sent twice, when a kept
        connection turns out to be dead before anything was answered; an iterable never.
        Raises BadUrl, ConnectFailed, ConnectionLost, ProtocolFault, AnswerTooLarge, BadBody (an iterable
        that is not as long as `content_length`).
        """
        where = Url.parse(url)
        length = len(body) if isinstance(body, bytes) else content_length
        framing = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
        request = _request(method, where, token, {**framing, **(headers or {})})
        if isinstance(body, bytes):
            connection, head = await self._replayed(where, lambda c: c.ask(request, body))
        else:
            connection = await self._pool.take(where.origin) or await self._pool.open(where.origin)
            head = await _or_close(connection, connection.converse(request, body))
        answer = await _or_close(connection, connection.read())
        await self._pool.give_back(connection)
        return Response(head.status, head.headers, answer)

    @asynccontextmanager
    async def download(
        self,
        url: str,
        *,
        token: str | None = None,
        range: tuple[int, int | None] | None = None,
    ) -> AsyncIterator[Download]:
        """GET `url`, or the bytes of `range` (first, last; None: to the end), following redirects.

        Any status is an answer. Raises BadUrl, ConnectFailed, ConnectionLost, ProtocolFault; the body
        comes with the iteration and raises there.
        """
        where = Url.parse(url)
        headers = {} if range is None else {"Range": f"bytes={range[0]}-{_text(range[1])}"}
        connection, head = await self._follow(where, token, headers)
        try:
            yield Download(head.status, head.headers, connection)
        finally:
            with trio.move_on_after(_SETTLE_LIMIT, shield=True):
                await self._pool.give_back(connection)

    def _context(self) -> ssl.SSLContext:
        """Made at the first https request: reading every CA takes 30 ms that most processes can save."""
        self._tls = self._tls or ssl.create_default_context()
        return self._tls

    async def _follow(
        self, url: Url, token: str | None, headers: Mapping[str, str]
    ) -> tuple[Connection, Head]:
        start = url.origin
        for _ in range(REDIRECT_LIMIT + 1):
            request = _request("GET", url, token if url.origin == start else None, headers)
            connection, head = await self._replayed(url, partial(Connection.ask, request=request))
            if head.status not in _REDIRECTS or "location" not in head.headers:
                return connection, head
            await connection.aclose()
            url = _redirected(url, head.headers["location"])
        raise ProtocolFault(f"{start} redirects more than {REDIRECT_LIMIT} times")

    async def _replayed(
        self, url: Url, ask: Callable[[Connection], Awaitable[Head]]
    ) -> tuple[Connection, Head]:
        """Ask on a kept connection; on a new one if there is none, or if it was dead all along."""
        kept = await self._pool.take(url.origin)
        if kept is not None:
            try:
                return kept, await _or_close(kept, ask(kept))
            except ConnectionLost:
                if kept.heard:
                    raise
        connection = await self._pool.open(url.origin)
        return connection, await _or_close(connection, ask(connection))


async def _or_close(connection: Connection, job: Awaitable[T]) -> T:
    """`job`; after any exception the connection is closed, because what went over it is unknown."""
    try:
        return await job
    except BaseException:
        with trio.move_on_after(_SETTLE_LIMIT, shield=True):
            await connection.aclose()
        raise


def _redirected(url: Url, location: str) -> Url:
    try:
        return url.join(location)
    except BadUrl as error:
        raise ProtocolFault(f"{url} redirects to {error}") from error


def _request(method: str, url: Url, token: str | None, headers: Mapping[str, str]) -> h11.Request:
    all_headers = {
        "Host": url.origin.authority,
        "User-Agent": USER_AGENT,
        "Accept": "*/*",
        **_credentials(token),
        **headers,
    }
    return h11.Request(method=method, target=url.target, headers=list(all_headers.items()))


def _credentials(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _text(last: int | None) -> str:
    return "" if last is None else str(last)
