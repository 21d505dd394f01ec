"""The HTTP listener: hypercorn's protocol code under our accept loop. Layer: web.

hypercorn's own server is not used: it cannot end a connection whose client stopped reading (its sends are
shielded without a deadline), and one broken connection can take the rest with it. Here each connection
is a task of its own that fails alone, and a drain has an end: streams are told to end, idle
connections close, answers get DRAIN_LIMIT, and then the sockets are closed under whoever is left.
"""

from __future__ import annotations

import errno
import socket
from typing import Any, Final

import attrs
import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Event, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from gradient.web.app import App
from gradient.web.errors import PortInUse

log = structlog.get_logger()

# Seconds for answers that are being sent when the server stops.
DRAIN_LIMIT: Final = 5.0
# Seconds a connection may idle between two requests: workers ask every few seconds while they work.
KEEP_ALIVE: Final = 60.0
# Seconds for which a client may take nothing of what it is being sent, or be out of reach: `nix` stops
# reading while it unpacks, and whoever is gone for good would hold a place for ever.
SEND_LIMIT: Final = 600.0
# Far above what a fleet of workers and their `nix` clients open; a flood is closed at the door.
MAX_CONNECTIONS: Final = 1024
BACKLOG: Final = 256


async def serve_http(
    app: App,
    host: str,
    port: int,
    *,
    stop: trio.Event,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` on every address of `host`; reports the port, which with 0 the system chooses.

    After `stop` it takes no more connections, drains, and returns within DRAIN_LIMIT and a moment. Raises
    PortInUse, and OSError for a host that is none of ours. Cancelling it closes everything at once.
    """
    listeners = await _listen(host, port)
    server = _Server(app)
    async with trio.open_nursery() as connections:
        try:
            async with trio.open_nursery() as accepting:
                for listener in listeners:
                    accepting.start_soon(_accept, server, listener, connections)
                task_status.started(listeners[0].socket.getsockname()[1])
                await stop.wait()
                accepting.cancel_scope.cancel()
            app.site.live.close()
            await server.drain()
        finally:
            server.close()
        connections.cancel_scope.cancel()


async def _listen(host: str, port: int) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"{host}:{port} is in use: stop what listens there, or choose another") from error
        raise


async def _accept(server: _Server, listener: trio.SocketListener, connections: trio.Nursery) -> None:
    await trio.serve_listeners(server.connection, [listener], handler_nursery=connections)


def _give_up_on_the_lost(connection: Any) -> None:
    """Have the kernel end a connection whose peer is gone without a word, or stopped reading."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_LIMIT * 1000))


class _Log:
    """Where hypercorn reports: only what an application raised while it answered is worth a line."""

    def __init__(self, config: Config) -> None:
        pass

    async def access(self, *_: Any) -> None:
        """No line per request: they would be most of the log."""

    async def exception(self, message: str, *_: Any) -> None:
        log.exception(message)


class _TCPServer(TCPServer):
    """hypercorn's, with two differences that keep strangers from filling every place for a connection.

    What a client leaves behind by hanging up is not kept for the idle timeout. And there is no HTTP/2, which
    has no idle timeout before its first request; no client of ours asks for it.
    """

    _ended = False

    async def _read_data(self) -> None:
        self.protocol.protocol._check_protocol = _stay_with_http_1  # type: ignore[union-attr, method-assign]
        await super()._read_data()
        self._ended = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if not (self._ended and isinstance(event, Updated)):
            await super().protocol_send(event)


async def _stay_with_http_1(_: object) -> None:
    """In place of hypercorn's look at whether a request would change the protocol."""


def _config() -> Config:
    config = Config()
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE
    config.keep_alive_max_requests = 2**31
    config.logger_class = _Log  # type: ignore[assignment]
    return config


@attrs.define(eq=False)
class _Server:
    """The open connections."""

    app: App
    _config: Any = attrs.field(factory=_config, init=False)
    _context: Any = attrs.field(factory=lambda: WorkerContext(None), init=False)
    _open: set[trio.SocketStream] = attrs.field(factory=set, init=False)
    _empty: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def connection(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end. Nothing that a peer can cause leaves here."""
        if len(self._open) >= MAX_CONNECTIONS:
            await trio.aclose_forcefully(stream)
            return
        self._open.add(stream)
        try:
            _give_up_on_the_lost(stream.socket)
            await self._serve(stream)
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client went away
        except* Exception as group:
            log.error("a connection failed", exc_info=group)
        finally:
            stream.socket.close()
            self._open.discard(stream)
            if not self._open:
                self._empty.set()

    async def _serve(self, stream: Any) -> None:
        await _TCPServer(ASGIWrapper(self.app), self._config, self._context, ConnectionState({}), stream)

    async def drain(self) -> None:
        """Wait for the connections, at most DRAIN_LIMIT."""
        await self._context.terminated.set()
        if self._open:
            self._empty = trio.Event()
            with trio.move_on_after(DRAIN_LIMIT):
                await self._empty.wait()

    def close(self) -> None:
        """Close every socket: that ends also a send which cancellation cannot reach."""
        for stream in tuple(self._open):
            stream.socket.close()
