"""The store that an evaluation with imports from derivations talks to: a daemon that never builds.

Layer: rank 1. A Nix evaluator that needs the content of a derivation's output asks its daemon to
build it, and waits. This proxy stands between the two: it forwards everything, byte for byte, and
hands requests to build to a callback, so that the build happens wherever builds happen here. The
evaluator gets its answer from the real daemon afterwards, where the outputs are valid by then.

Only requests are understood, and only as far as where each ends (`requests.py`). Answers pass
unread: a client sends its next request when it has read the answer to the last, so whatever the
daemon says belongs to the request that was forwarded last. The daemon itself is told to start no
builds for us, so that nothing is built behind the callback's back.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

import attrs
import structlog
import trio

from gradient.nix.daemon import handshake, operations, stderr
from gradient.nix.daemon.address import DaemonAddress
from gradient.nix.daemon.connection import connect, open_stream
from gradient.nix.daemon.errors import DaemonFailure, DaemonGone, DaemonProtocolError
from gradient.nix.daemon.operations import Op
from gradient.nix.daemon.options import DaemonOptions
from gradient.nix.daemon.primitives import PIECE, read_u64, u64
from gradient.nix.daemon.requests import SHAPES, read_options_without_building, recorded
from gradient.nix.daemon.stream import DaemonStream
from gradient.nix.daemon.transport import CLOSE_LIMIT, Transport

log = structlog.get_logger(__name__)

# Told the derivations (`.drv`) that an evaluation wants built, all their outputs; or, for a plain store
# path that is missing, that path. Returns when they are valid in the store; raises `ImportFailed` when
# they cannot be. Cancelled when the evaluator goes away.
OnBuild: TypeAlias = Callable[[tuple[str, ...]], Awaitable[None]]

_NO_BUILDS: Final = DaemonOptions(max_build_jobs=0, extra=(("builders", ""),))
_BUILDS: Final = frozenset({Op.BUILD_PATHS, Op.BUILD_PATHS_WITH_RESULTS, Op.BUILD_DERIVATION})
PREFIX: Final = "gradient-proxy-"
SOCKET_NAME: Final = "daemon"
# Bytes of the path of the folder around it: a socket's path has room for 103 where it has least.
MAX_BASE: Final = 72
# The most evaluators of one machine that could connect at the same moment.
_BACKLOG: Final = 64


class ImportFailed(DaemonFailure):
    """What an evaluation wanted built could not be. `reason` is shown as the evaluation's error."""

    def __init__(self, drv: str, reason: str) -> None:
        self.drv, self.reason = drv, reason
        super().__init__(f"{drv} is needed by this evaluation but was not built: {reason}")


@attrs.define(eq=False)
class DaemonProxy:
    """Serves `upstream` without its builds, on a socket in a folder that only this user may enter."""

    upstream: DaemonAddress
    on_build: OnBuild
    # The protocol version that the daemon speaks, where the caller knows; to ask costs a connection.
    newest: int | None = None

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Started with the store's address, for `nix --store ADDRESS`.

        Raises what `connect` raises when there is no daemon to ask for its version. A client or daemon that
        breaks off later ends its session alone; what `on_build` raises other than `DaemonFailure`
        ends the proxy.
        """
        newest = self.newest
        if newest is None:
            async with await connect(self.upstream) as connection:
                newest = connection.info.minor
        folder = _make_folder()
        try:
            path = os.path.join(folder, SOCKET_NAME)  # noqa: ASYNC240 - joins strings
            listener = await _listen(path)
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, partial(self._serve, newest), [listener])
                task_status.started(f"unix://{path}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _serve(self, newest: int, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                await self._session(newest, DaemonStream(Transport(stream)))
        except* DaemonFailure as group:
            log.info("an evaluator's connection to the store ended", exc_info=group)

    async def _session(self, newest: int, client: DaemonStream) -> None:
        minor = await client.converse(handshake.greet_client(newest))
        daemon, info = await open_stream(self.upstream, newest=minor)
        try:
            if info.minor != minor:
                raise DaemonProtocolError("the Nix daemon is another version than when the proxy began")
            await daemon.send(operations.set_options(_NO_BUILDS).request)
            await daemon.finish_messages()
            await client.converse(handshake.introduce(info))
            await client.send(stderr.last())
            await _Session(client, daemon, self.upstream, self.on_build).run()
        finally:
            with trio.move_on_after(CLOSE_LIMIT, shield=True):
                await daemon.transport.aclose()


@attrs.define(eq=False)
class _Session:
    """One client and its own connection to the daemon, both greeted with the same version."""

    client: DaemonStream
    daemon: DaemonStream
    upstream: DaemonAddress
    on_build: OnBuild
    # Held while bytes go to the client: the answers that pass, or one of ours.
    _answering: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    async def run(self) -> None:
        """Forward until the client leaves."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._forward_answers)
            while await self._forward_request():
                pass
            nursery.cancel_scope.cancel()

    async def _forward_answers(self) -> None:
        while True:
            data = await self.daemon.take_some()
            async with self._answering:
                await self.client.send(data)

    async def _forward_request(self) -> bool:
        """One request. False when the session is over: the client left, or asked what it may not."""
        try:
            number = await self.client.read(read_u64())
        except DaemonGone:
            return False
        if number == Op.SET_OPTIONS:
            arguments = await self.client.read(read_options_without_building())
            await self.daemon.send(u64(number) + arguments)
            return True
        shape = SHAPES.get(number)
        if shape is None:
            await self._refuse(f"an evaluation may not use operation {number} of the Nix daemon")
            return False
        paths, arguments = await self.client.read(recorded(shape.read()))
        try:
            await self._make_valid(Op(number), paths)
        except ImportFailed as error:
            await self._refuse(str(error))
            return True
        await self.daemon.send(u64(number) + arguments)
        if shape.has_content:
            await self._forward_content()
        return True

    async def _forward_content(self) -> None:
        while size := await self.client.read(read_u64()):
            await self.daemon.send(u64(size))
            while size:
                piece = await self.client.take(min(size, PIECE))
                await self.daemon.send(piece)
                size -= len(piece)
        await self.daemon.send(u64(0))

    async def _make_valid(self, op: Op, paths: tuple[str, ...]) -> None:
        """Have `paths` built when `op` asks for that. Raises `ImportFailed`; `DaemonGone` when the client
        leaves meanwhile."""
        if op in _BUILDS or (op is Op.ENSURE_PATH and not await self._is_valid(paths[0])):
            await self._while_client_waits(paths)

    async def _is_valid(self, path: str) -> bool:
        async with await connect(self.upstream) as connection:
            return await connection.is_valid_path(path)

    async def _while_client_waits(self, paths: tuple[str, ...]) -> None:
        failure: ImportFailed | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.client.wait_for_end)
            try:
                await self.on_build(paths)
            except ImportFailed as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _refuse(self, reason: str) -> None:
        async with self._answering:
            await self.client.send(stderr.failure(reason))


def _make_folder() -> str:
    """A private folder whose name leaves room for the socket's; those of killed proxies go away."""
    for base in (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"):
        if len(os.fsencode(base)) <= MAX_BASE and os.access(base, os.W_OK | os.X_OK):
            break
    _sweep(base)
    return tempfile.mkdtemp(prefix=PREFIX, dir=base)


def _sweep(base: str) -> None:
    """Remove what proxies left that were killed: where nobody listens any more."""
    for folder in glob.glob(os.path.join(glob.escape(base), f"{PREFIX}*")):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(os.path.join(folder, SOCKET_NAME))
            except ConnectionRefusedError:
                shutil.rmtree(folder, ignore_errors=True)
            except OSError:
                pass  # not made yet, too busy to answer, or somebody else's


async def _listen(path: str) -> trio.SocketListener:
    """Listen at `path`, where there is never a socket that refuses."""
    listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await listener.bind(path + "~")
    listener.listen(_BACKLOG)
    os.rename(path + "~", path)  # noqa: ASYNC240
    return trio.SocketListener(listener)
