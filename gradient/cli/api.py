"""The server's HTTP API as the commands use it, and its refusals as faults.

Answers are taken as they come: a field that is missing is a server of another version, and that is what
the user is told.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from gradient.cli.events import EventLines
from gradient.cli.faults import BadFlake, BadUsage, Fault, NotAuthorised, NotFound, ServerUnreachable
from gradient.cli.options import Connection
from gradient.http.client import Download, HttpClient
from gradient.http.errors import BadUrl, ConnectFailed, HttpError
from gradient.model import CachedSource
from gradient.nar.bundle import CONTENT_TYPE
from gradient.nix.store_path import StorePath
from gradient.settings import program

# The server answers small questions from its database; a minute of silence is a server that hangs.
ANSWER_LIMIT: Final = 60.0  # seconds
# The longest log that `log_tail` asks for is a screenful.
TAIL_LIMIT: Final = 256 * 2**10  # bytes


class ServerRefused(Fault):
    """The server did not do it, for a reason of its own."""


@attrs.frozen
class ServerFacts:
    """What a server says of itself."""

    version: str
    cache_url: str
    public_key: str


@attrs.frozen
class Created:
    """A new evaluation and the address of its page."""

    evaluation: int
    page: str


@attrs.define(eq=False)
class Api:
    """One server. Every method raises ServerUnreachable, NotAuthorised or ServerRefused, in one line."""

    client: HttpClient
    connection: Connection

    async def server(self) -> ServerFacts:
        """What the server is."""
        answer = await self._get("/api/v1/server")
        return ServerFacts(*_fields(answer, "version", "cache_url", "public_key"))

    async def create_evaluation(
        self, what: CachedSource | str, wildcards: tuple[str, ...], comment: str | None = None
    ) -> Created:
        """Have an uploaded source, or the flake at a URL, evaluated and built. Raises BadFlake."""
        flake = {"repository": {"url": what}} if isinstance(what, str) else {"source": attrs.asdict(what)}
        body = {**flake, "wildcards": list(wildcards), "comment": comment}
        return Created(*_fields(await self._post("/api/v1/evaluations", body), "evaluation", "url"))

    async def evaluations(self, limit: int) -> list[dict[str, Any]]:
        """The newest evaluations, short."""
        answer = await self._get(f"/api/v1/evaluations?limit={limit}")
        (rows,) = _fields(answer, "evaluations")
        return list(rows)

    async def evaluation(self, evaluation: int) -> dict[str, Any]:
        """The snapshot of one. Raises NotFound."""
        return await self._get(f"/api/v1/evaluations/{evaluation}")

    async def abort(self, evaluation: int) -> None:
        """Ask for its end; it has ended when its status says so."""
        await self._post(f"/api/v1/evaluations/{evaluation}/abort", {})

    async def status(self) -> dict[str, Any]:
        """Workers, evaluations and the queue."""
        return await self._get("/api/v1/status")

    async def build(self, build: int) -> dict[str, Any]:
        """One build. Raises NotFound."""
        return await self._get(f"/api/v1/builds/{build}")

    async def log_tail(self, build: int, lines: int) -> str:
        """The last lines of a build's newest log, "" when it has none."""
        async with self.download(f"/api/v1/builds/{build}/log?tail={lines}") as download:
            text = await download.read(TAIL_LIMIT)
            return text.decode(errors="replace") if download.status == 200 else ""

    async def cache(self) -> str:
        """The path of the cache on the server as we reach it, which need not be how others do."""
        address = (await self.server()).cache_url
        return address[address.rindex("/cache/") :] if "/cache/" in address else address

    async def holds(self, path: StorePath) -> bool:
        """Whether the server's cache has a path."""
        async with self.download(f"{await self.cache()}/{path.hash_part}.narinfo") as download:
            await download.read(TAIL_LIMIT)
            return download.status == 200

    async def upload(self, bundle: AsyncIterable[bytes]) -> None:
        """Send NARs. Takes as long as it takes; what iterating raises comes out as it is."""
        try:
            answer = await self.client.upload(
                self._url("/api/v1/uploads"),
                token=self.connection.token,
                body=bundle,
                method="POST",
                headers={"Content-Type": CONTENT_TYPE},
            )
        except HttpError as error:
            raise self._unreachable(error) from error
        _check(answer.status, _json(answer.body))

    @asynccontextmanager
    async def events(self, evaluation: int) -> AsyncIterator[EventLines]:
        """The stream of an evaluation, from a snapshot on."""
        async with self.download(f"/api/v1/evaluations/{evaluation}/events") as download:
            if download.status != 200:
                _check(download.status, _json(await download.read(TAIL_LIMIT)))
            yield EventLines(download)

    @asynccontextmanager
    async def download(self, path_or_url: str) -> AsyncIterator[Download]:
        """Any answer, whatever its status, piece by piece; the pieces raise HttpError."""
        try:
            async with self.client.download(self._url(path_or_url)) as download:
                yield download
        except HttpError as error:
            raise self._unreachable(error) from error

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._call("POST", path, self.connection.token, body)

    async def _call(
        self, method: str, path: str, token: str | None = None, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            with trio.fail_after(ANSWER_LIMIT):
                status, answer = await self.client.request_json(method, self._url(path), token, body)
        except (HttpError, trio.TooSlowError) as error:
            raise self._unreachable(error) from error
        _check(status, answer)
        if not isinstance(answer, dict):
            raise ServerRefused("the server's answer is not understood: is it of another version?")
        return answer

    def _url(self, path_or_url: str) -> str:
        return path_or_url if "://" in path_or_url else self.connection.url + path_or_url

    def _unreachable(self, error: Exception) -> Fault:
        if isinstance(error, BadUrl):
            return BadUsage(f"the server's address {self.connection.url}: {error}")
        if isinstance(error, ConnectFailed):
            again = f"; start it again with `{program()} serve`" if self.connection.here else ""
            return ServerUnreachable(f"the server {error}{again}")
        if isinstance(error, trio.TooSlowError):
            return ServerUnreachable(f"the server did not answer within {ANSWER_LIMIT:g} s")
        return ServerUnreachable(f"the server at {self.connection.url} does not answer: {error}")


def _check(status: int, answer: Any) -> None:
    """Raise what a refusal means."""
    if status < 400:
        return
    said = answer.get("error") if isinstance(answer, dict) else None
    words = str(said or f"the server answered with HTTP status {status}")
    match status:
        case 400:
            raise BadFlake(words)
        case 401 | 403:
            raise NotAuthorised(f"not authorised: {words}")
        case 404:
            raise NotFound(words)
        case 502 | 503 | 504:
            raise ServerUnreachable(words)
        case _:
            raise ServerRefused(words)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _fields(answer: dict[str, Any], *names: str) -> list[Any]:
    missing = [name for name in names if name not in answer]
    if missing:
        raise ServerRefused(f"the server's answer has no {missing[0]}: is it of another version?")
    return [answer[name] for name in names]
