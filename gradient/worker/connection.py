"""The connection loop: find the server, serve a session, wait, again. Layer: worker.

Pauses double from one second to a minute, and only a session that was served brings them back to one:
a server that refuses us, or is on its way down, must not be asked every second for ever. A token that the
server refuses at the very first meeting is a mistake of whoever started us, and waiting mends none; refused
later, it is being replaced.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import attrs
import structlog
import trio

from gradient.http.client import HttpClient
from gradient.http.errors import BadUrl, HttpError
from gradient.nursery.backoff import Backoff
from gradient.nursery.health import leaves
from gradient.settings import SettingsError
from gradient.wire.errors import ConnectFailed, HandshakeRefused, LinkClosed, WireError
from gradient.wire.greeting import introduce
from gradient.wire.handshake import ALREADY_CONNECTED, ANY_PEER, UNAUTHORIZED
from gradient.wire.messages import Capabilities, PeerToken
from gradient.wire.transport import Link, connect
from gradient.worker.session import Session

# For the answer of a server that is up.
LOOKUP_LIMIT: Final = 15.0  # seconds

log = structlog.get_logger(__name__)


class TokenRefused(Exception):
    """The server does not accept the worker's token, and never did."""


class NoServer(Exception):
    """What answers at the server's address is no Gradient server, or none that works."""


@attrs.frozen
class Credentials:
    """Read anew for each session: a server that restarts may listen elsewhere, a token may be replaced."""

    server_url: str
    token: str = attrs.field(repr=False)


# What keeps a session from coming about, or ends it; anything else is a bug.
_EXPECTED: Final = (WireError, HttpError, NoServer, SettingsError)


@attrs.define(eq=False)
class Uplink:
    """The worker's way to its server. `make_session` puts a session on a link: (link, HTTP address)."""

    worker_id: str
    credentials: Callable[[], Awaitable[Credentials]]
    http: HttpClient
    make_session: Callable[[Link, str], Session]
    # What people call this worker.
    name: str = attrs.field(default="", kw_only=True)
    # Opens the link; tests have no sockets.
    connect: Callable[[str], AbstractAsyncContextManager[Link]] = attrs.field(default=connect, kw_only=True)
    # Whether a server has ever let us in.
    _known: bool = attrs.field(default=False, init=False)
    # The session that is being served.
    _session: Session | None = attrs.field(default=None, init=False)

    async def run(self) -> None:
        """Serve sessions until cancelled. The session's jobs end with it. Raises TokenRefused, BadUrl."""
        backoff = Backoff()
        while True:
            served = False
            try:
                served = await self._serve_once()
            except* _EXPECTED as group:
                for error in leaves(group):
                    self._refused(error)
            if served:
                backoff.reset()
            pause = backoff.next_pause()
            log.info("connecting again", seconds=pause)
            await trio.sleep(pause)

    def _refused(self, error: BaseException) -> None:
        """Say why there is no session. Raises TokenRefused or BadUrl where another try would end the same."""
        if not self._known and isinstance(error, BadUrl):
            raise error
        if not self._known and isinstance(error, HandshakeRefused) and error.code == UNAUTHORIZED:
            raise TokenRefused(f"{in_words(error)}: name the file of a worker token with --token-file")
        log.warning("no session", why=in_words(error))

    async def stop(self) -> None:
        """Tell the server, abort every job and wait for the reports: five seconds at most. For a drain."""
        if self._session is None:
            return
        try:
            if late := await self._session.stop():
                log.warning("jobs that did not report in time", jobs=late)
        except* LinkClosed as group:
            log.info("the link ended first", why=in_words(leaves(group)[0]))

    def waiting_for(self) -> str:
        """What a stop still waits for, in words."""
        running = self._session.jobs if self._session is not None else ()
        return ", ".join(running) or "nothing"

    async def _serve_once(self) -> bool:
        """One session, to its end; whether it was served. Raises what is expected when there was none."""
        credentials = await self.credentials()
        proto_url = await self._find_proto(credentials.server_url)
        tokens = [PeerToken(ANY_PEER, credentials.token)]
        async with self.connect(proto_url) as link:
            await introduce(link, self.worker_id, Capabilities(), tokens, self.name)
            self._known = True
            log.info("connected", server=credentials.server_url, worker=self.worker_id)
            return await self._serve(self.make_session(link, credentials.server_url))

    async def _serve(self, session: Session) -> bool:
        self._session = session
        try:
            await session.run()
        except* LinkClosed as group:
            log.warning("disconnected", why=in_words(leaves(group)[0]))
        finally:
            self._session = None
        return not session.server_drains

    async def _find_proto(self, server_url: str) -> str:
        """Ask the server for its protocol address."""
        answer: Any = None
        with trio.move_on_after(LOOKUP_LIMIT) as scope:
            status, answer = await self.http.request_json("GET", f"{server_url}/api/v1/server")
        if scope.cancelled_caught:
            raise NoServer(f"{server_url} does not answer")
        url = answer.get("proto_url") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(url, str) or not url.startswith(("ws://", "wss://")):
            raise NoServer(f"{server_url} is no Gradient server (HTTP {status})")
        return url


def in_words(error: BaseException) -> str:
    """Why there is no session, in one line that says what to do where we know."""
    match error:
        case HandshakeRefused(code=code, reason=reason) if code == UNAUTHORIZED:
            return f"the server does not accept this worker's token: {reason}"
        case HandshakeRefused(code=code, reason=reason) if code == ALREADY_CONNECTED:
            return f"{reason}: a second one on this machine needs a data directory of its own"
        case HandshakeRefused(reason=reason):
            return f"the server refused the session: {reason}"
        case ConnectFailed():
            return f"the server cannot be reached: {error}"
    return str(error)
