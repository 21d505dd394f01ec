"""Request and response as JSON, with asks. The one importer of asks.

asks keeps whole bodies in memory and reads whatever comes, so only small calls go through it, with the
answer counted while it arrives. Each call has a connection of its own: nothing stale, nothing to retry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import trio

# asks 3.0 pins anyio 3, whose trio backend names `trio.MultiError` in a class statement; trio has had no
# such name since it moved to the built-in groups. It must exist before asks is imported.
trio.MultiError = BaseExceptionGroup  # type: ignore[attr-defined]

import asks  # noqa: E402  # after the line above
import asks.errors  # noqa: E402
import h11  # noqa: E402

from gradient.http.errors import (  # noqa: E402
    AnswerTooLarge,
    ConnectionLost,
    HttpError,
    ProtocolFault,
)
from gradient.http.url import Url  # noqa: E402

# The largest honest answer is a list of builds.
JSON_LIMIT: Final = 16 * 2**20  # bytes

# What asks and its parsing raise for bytes that are no proper answer.
_NO_ANSWER: Final = (
    asks.errors.AsksException,
    h11.ProtocolError,
    AssertionError,
    AttributeError,
    LookupError,
    ValueError,
)


class _Socket:
    """A trio stream as asks wants its sockets. b"" is the end of the stream to h11, and so to asks."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._active = True
        self.host = self.port = ""
        self.ended = False

    async def send(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def receive(self) -> bytes | bytearray:
        data = await self._stream.receive_some()
        self.ended = not data
        return data

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)


class _Session(asks.Session):
    """asks over a connection that is open already: its own way to connect (anyio's) breaks on a trio of
    today as soon as it is cancelled or two addresses refuse."""

    def __init__(self, socket: _Socket) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._socket = socket

    async def _grab_connection(self, url: str) -> _Socket:
        return self._socket


async def call_json(
    stream: trio.abc.Stream, url: Url, method: str, headers: Mapping[str, str], body: Any
) -> tuple[int, Any]:
    """Send `body` (None: no body) over `stream`, which is closed; status and value (None: no body).

    Redirects are not followed: the caller learns of them by their status. Raises ConnectionLost,
    ProtocolFault for an answer that is no JSON, AnswerTooLarge.
    """
    socket, answer = _Socket(stream), bytearray()
    socket.port = str(url.origin.port)

    async def keep(piece: bytes) -> None:
        if len(answer) + len(piece) > JSON_LIMIT:
            raise AnswerTooLarge(f"{url} answered with more than {JSON_LIMIT} bytes")
        answer.extend(piece)

    try:
        response = await _Session(socket).request(  # type: ignore[no-untyped-call]
            method,
            f"{url.origin}{url.target}",
            headers={"Host": url.origin.authority, "Accept-Encoding": "identity", **headers},
            json=body,
            callback=keep,
            retries=0,
            connection_timeout=None,
            follow_redirects=False,
        )
    except HttpError:
        raise
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise ConnectionLost(f"the connection to {url} broke") from error
    except _NO_ANSWER as error:
        if socket.ended:
            raise ConnectionLost(f"{url} hung up before its answer was complete") from error
        raise ProtocolFault(f"{url} sent no proper HTTP answer: {error}") from error
    finally:
        await socket.aclose()
    return response.status_code, _value(url, response.status_code, bytes(answer))


def _value(url: Url, status: int, answer: bytes) -> Any:
    if not answer:
        return None
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ProtocolFault(f"{url} answered HTTP {status} with something that is no JSON") from error
