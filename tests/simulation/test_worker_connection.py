"""The connection loop: pauses that double, sessions that reset them or do not, words for what is wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import structlog
import trio
import trio.testing

from gradient.http.errors import BadUrl, ConnectFailed, HttpError
from gradient.nursery.health import leaves
from gradient.settings import SettingsError
from gradient.wire import messages as wire
from gradient.wire.errors import HandshakeRefused, LinkClosed
from gradient.wire.greeting import (
    greet,
    introduce,  # noqa: F401 - the real handshake runs in these tests
)
from gradient.wire.transport import Link, accept, connect_over
from gradient.worker.connection import Credentials, TokenRefused, Uplink
from gradient.worker.session import Session
from tests.simulation.worker_world import CAPABILITIES, Store, Work

WORKER = "01234567-89ab-cdef-0123-456789abcdef"


@attrs.define(eq=False)
class Registrar:
    """Knows one project, `p`, and its token."""

    token: str

    async def find_peers(self, worker_id: str) -> list[str]:
        return ["p"]

    async def check_tokens(self, worker_id: str, tokens: Any) -> dict[str, str | None]:
        return {"p": None if tokens.get("p") == self.token else "wrong token"}


class Server:
    """What the worker dials: each connection is served by the next script, then nobody answers."""

    def __init__(self, *scripts: Callable[[Link], Any]) -> None:
        self.scripts = list(scripts)
        self.dialled: list[float] = []
        self.fault: HttpError = ConnectFailed("http://server.test cannot be reached: Connection refused")

    async def request_json(self, method: str, url: str) -> tuple[int, Any]:
        await trio.lowlevel.checkpoint()
        self.dialled.append(trio.current_time())
        if not self.scripts:
            raise self.fault
        return 200, {"proto_url": "ws://server.test/proto"}

    @asynccontextmanager
    async def connect(self, url: str) -> AsyncIterator[Link]:
        script = self.scripts.pop(0)
        near, far = trio.testing.memory_stream_pair()

        async def serve(*, task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            try:
                async with accept(far) as link:
                    await script(link)
            except (HandshakeRefused, LinkClosed):
                pass

        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            async with connect_over(near) as link:
                yield link
            nursery.cancel_scope.cancel()

    @property
    def pauses(self) -> list[float]:
        return [round(b - a, 3) for a, b in zip(self.dialled, self.dialled[1:], strict=False)]


async def found() -> Credentials:
    return Credentials("http://server.test", "token")


def uplink(server: Server, credentials: Callable[[], Awaitable[Credentials]] = found) -> Uplink:
    return Uplink(
        WORKER,
        credentials,
        server,  # type: ignore[arg-type]
        lambda link, url: Session(link, url, CAPABILITIES, Store(), Work()),  # type: ignore[arg-type]
        connect=server.connect,
    )


async def serve_briefly(link: Link) -> None:
    """A session that stands, for a while."""
    await greet(link, Registrar("token"), wire.Capabilities())
    await trio.sleep(30)


async def take_leave(link: Link) -> None:
    """A session of a server that stops."""
    await greet(link, Registrar("token"), wire.Capabilities())
    await link.send(wire.Draining())
    await trio.sleep(1)


async def refuse(link: Link) -> None:
    """A server that knows another token."""
    await greet(link, Registrar("another"), wire.Capabilities())


async def run_for(worker: Uplink, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await worker.run()


@pytest.fixture
def logged() -> Any:
    with structlog.testing.capture_logs() as entries:
        yield entries


async def test_pauses_double_to_a_minute_while_nobody_answers(
    autojump_clock: trio.testing.MockClock, logged: Any
) -> None:
    server = Server()
    await run_for(uplink(server), 300)
    assert server.pauses[:9] == [1, 2, 4, 8, 16, 32, 60, 60, 60]


async def test_a_served_session_brings_the_pause_back_to_a_second(
    autojump_clock: trio.testing.MockClock, logged: Any
) -> None:
    server = Server(take_leave, refuse, serve_briefly, refuse)
    await run_for(uplink(server), 60)
    assert server.pauses[:4] == [1 + 1, 2, 30 + 1, 2]


async def test_refused_and_drained_sessions_keep_escalating(
    autojump_clock: trio.testing.MockClock, logged: Any
) -> None:
    server = Server(take_leave, refuse, take_leave, refuse)
    await run_for(uplink(server), 60)
    assert server.pauses[:4] == [1 + 1, 2, 1 + 4, 8]


async def test_a_token_that_was_never_accepted_ends_the_worker(
    autojump_clock: trio.testing.MockClock, logged: Any
) -> None:
    with pytest.RaisesGroup(TokenRefused, flatten_subgroups=True, allow_unwrapped=True) as raised:
        await uplink(Server(refuse)).run()
    assert "does not accept this worker's token: no valid token: p: wrong token" in str(
        leaves(raised.value)[0]
    )


async def test_an_address_that_is_none_ends_the_worker(autojump_clock: trio.testing.MockClock) -> None:
    server = Server()
    server.fault = BadUrl("not an http:// or https:// URL")
    with pytest.RaisesGroup(BadUrl, flatten_subgroups=True, allow_unwrapped=True):
        await uplink(server).run()


async def test_a_token_refused_later_is_one_clear_line_and_waited_for(
    autojump_clock: trio.testing.MockClock, logged: Any
) -> None:
    server = Server(serve_briefly, refuse, serve_briefly)
    await run_for(uplink(server), 40)
    lines = [entry["why"] for entry in logged if entry["event"] == "no session"]
    assert lines == ["the server does not accept this worker's token: no valid token: p: wrong token"]
    assert server.pauses[:2] == [30 + 1, 2]


async def test_a_missing_token_file_is_waited_for(
    autojump_clock: trio.testing.MockClock, logged: Any
) -> None:
    tries: list[int] = []

    async def credentials() -> Credentials:
        tries.append(1)
        if len(tries) < 3:
            raise SettingsError("token: there is none")
        return Credentials("http://server.test", "token")

    server = Server(serve_briefly)
    await run_for(uplink(server, credentials), 10)
    assert len(tries) == 3
    assert len(server.dialled) == 1


async def test_what_is_no_gradient_server_is_said(
    autojump_clock: trio.testing.MockClock, logged: Any
) -> None:
    class Other(Server):
        async def request_json(self, method: str, url: str) -> tuple[int, Any]:
            await trio.lowlevel.checkpoint()
            return 404, {"error": "nothing here"}

    await run_for(uplink(Other()), 0.5)
    assert any("is no Gradient server (HTTP 404)" in entry.get("why", "") for entry in logged)


async def test_a_stop_without_a_session_is_immediate(
    autojump_clock: trio.testing.MockClock, logged: Any
) -> None:
    worker = uplink(Server())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await trio.sleep(2)
        began = trio.current_time()
        await worker.stop()
        assert trio.current_time() == began
        nursery.cancel_scope.cancel()
