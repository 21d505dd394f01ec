"""One connection to a Nix daemon, one operation at a time.

Layer: rank 1. An operation that fails or is cancelled leaves bytes in the air, so it poisons the
connection: it is closed at once and never used again. That is also how a build is stopped: the daemon
kills the builder and its children when its client is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Final, TypeAlias, TypeVar

import attrs
import trio

from gradient.nix.daemon import framing, operations
from gradient.nix.daemon.address import DaemonAddress
from gradient.nix.daemon.build_result import BuildResult
from gradient.nix.daemon.errors import ConnectionUnusable, DaemonGone, DaemonProtocolError
from gradient.nix.daemon.framing import ByteSource, FrameWriter, Write
from gradient.nix.daemon.handshake import NEWEST_MINOR, DaemonInfo, greet_daemon
from gradient.nix.daemon.nar_extent import NarChunks
from gradient.nix.daemon.operations import AddMethod, BuildMode, Garbage, Operation
from gradient.nix.daemon.options import DaemonOptions
from gradient.nix.daemon.path_info import PathInfo
from gradient.nix.daemon.stream import DaemonStream, MessageSink
from gradient.nix.daemon.transport import CLOSE_LIMIT, Transport, open_transport

T = TypeVar("T")
# Writes the content of a request, piece by piece, to what it is given.
Content: TypeAlias = Callable[[Write], Awaitable[None]]

DEFAULT_OPTIONS: Final = DaemonOptions()
# How long a cancelled operation waits for a pause in the daemon's messages before it closes.
_SETTLE_LIMIT: Final = 0.3  # seconds


async def connect(
    address: DaemonAddress, options: DaemonOptions = DEFAULT_OPTIONS, *, newest: int = NEWEST_MINOR
) -> DaemonConnection:
    """A greeted connection with `options` set. Use it as a context manager, or `aclose` it.

    Raises `NixMissing`, `DaemonTooOld`, `DaemonGone`, `DaemonProtocolError`, `DaemonError`. Cancelled,
    it leaves nothing open. Has no limit of its own: a program that only listens would be waited for.
    """
    return await greet(await open_transport(address), options, newest=newest)


async def greet(
    transport: Transport, options: DaemonOptions = DEFAULT_OPTIONS, *, newest: int = NEWEST_MINOR
) -> DaemonConnection:
    """Like `connect`, over an open transport, which is closed when the greeting fails."""
    connection = DaemonConnection(*await _greeted(transport, newest))
    await connection.set_options(options)
    return connection


async def open_stream(address: DaemonAddress, *, newest: int) -> tuple[DaemonStream, DaemonInfo]:
    """A greeted stream, for who speaks the protocol on it otherwise: our proxy. The caller closes it."""
    return await _greeted(await open_transport(address), newest)


async def _greeted(transport: Transport, newest: int) -> tuple[DaemonStream, DaemonInfo]:
    stream = DaemonStream(transport)
    try:
        info = await stream.converse(greet_daemon(newest))
        await stream.finish_messages()
    except BaseException:
        with trio.move_on_after(CLOSE_LIMIT, shield=True):
            await transport.aclose()
        raise
    return stream, info


@attrs.define(eq=False)
class DaemonConnection:
    """A greeted connection. Not for two tasks at once: a second operation raises `ConnectionUnusable`.

    Every operation raises `DaemonError` for the daemon's own answer, `DaemonGone` and
    `DaemonProtocolError` for a broken other end. After any of these, or a cancellation, the
    connection is closed before the error arrives; a `--stdio` child has then ended, its builders too.
    """

    _stream: DaemonStream
    info: DaemonInfo
    # Name of the operation that runs now.
    _running: str | None = attrs.field(default=None, init=False)
    # Why the connection cannot be used any more, None while it can.
    _ended: str | None = attrs.field(default=None, init=False)

    async def __aenter__(self) -> DaemonConnection:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        with trio.move_on_after(CLOSE_LIMIT, shield=True):
            await self.aclose()

    @property
    def is_usable(self) -> bool:
        """Whether the next operation can be tried: nothing runs, nothing failed, the peer has not closed."""
        return self._ended is None and self._running is None and self._stream.is_silent

    async def aclose(self) -> None:
        """Close; a child daemon is ended and reaped within `CLOSE_LIMIT` seconds, also when cancelled."""
        self._ended = self._ended or "it was closed"
        with trio.move_on_after(CLOSE_LIMIT, shield=True):
            await self._stream.transport.aclose()

    # --- questions ----------------------------------------------------------------------------------

    async def set_options(self, options: DaemonOptions) -> None:
        """Change the settings of this connection."""
        await self._run(operations.set_options(options))

    async def is_valid_path(self, path: str) -> bool:
        """Whether `path` is registered in the store."""
        return await self._run(operations.is_valid_path(path))

    async def query_valid_paths(self, paths: Iterable[str]) -> frozenset[str]:
        """Those of `paths` that are valid; nothing is substituted."""
        return await self._run(operations.query_valid_paths(paths))

    async def query_path_info(self, path: str) -> PathInfo | None:
        """What the store knows of `path`, None when it is not valid."""
        return await self._run(operations.query_path_info(path))

    async def query_derivation_output_map(self, drv_path: str) -> dict[str, str | None]:
        """Output name to full path; None for an output whose path is only known once built."""
        return await self._run(operations.query_derivation_output_map(drv_path))

    # --- garbage collection -------------------------------------------------------------------------

    async def add_temp_root(self, path: str) -> None:
        """Keep `path` from garbage collection until this connection closes."""
        await self._run(operations.add_temp_root(path))

    async def add_indirect_root(self, link: str) -> None:
        """Register the symlink with the absolute file name `link` as a garbage collection root."""
        await self._run(operations.add_indirect_root(link))

    async def delete_dead_paths(self, max_freed: int) -> Garbage:
        """Collect garbage until `max_freed` bytes are freed."""
        return await self._run(operations.delete_dead_paths(max_freed))

    # --- adding and reading content -----------------------------------------------------------------

    async def add_to_store(
        self,
        name: str,
        method: AddMethod,
        content: ByteSource,
        references: Iterable[str] = (),
        *,
        repair: bool = False,
    ) -> PathInfo:
        """Add content-addressed content and return its path info. Needs no trust and no signature.

        `content` is a NAR for RECURSIVE, plain bytes otherwise. What iterating it raises arrives here.
        """
        operation = operations.add_to_store(name, method, references, repair=repair)
        return await self._run(operation, content=partial(framing.copy, content))

    async def add_to_store_nar(
        self, info: PathInfo, nar: ByteSource, *, dont_check_sigs: bool = False, repair: bool = False
    ) -> None:
        """Register `info` with its NAR. `dont_check_sigs` only has effect where the daemon trusts us.

        The daemon refuses (`DaemonError`) a NAR that differs from `info`, and missing references.
        """
        operation = operations.add_to_store_nar(info, repair=repair, dont_check_sigs=dont_check_sigs)
        await self._run(operation, content=partial(framing.copy, nar))

    async def add_multiple_to_store(
        self,
        items: Sequence[tuple[PathInfo, ByteSource]],
        *,
        dont_check_sigs: bool = False,
        repair: bool = False,
    ) -> None:
        """Register many paths in one request; each after those it refers to."""
        operation = operations.add_multiple_to_store(repair=repair, dont_check_sigs=dont_check_sigs)
        await self._run(operation, content=partial(framing.copy_paths, items))

    async def add_build_log(self, drv_path: str, log: ByteSource) -> None:
        """Store the log of `drv_path` as if it had been built here. Needs a daemon that trusts us."""
        await self._run(operations.add_build_log(drv_path), content=partial(framing.copy, log))

    @asynccontextmanager
    async def nar_from_path(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """`async with connection.nar_from_path(path) as chunks: async for chunk in chunks: ...`

        The chunks are the NAR of `path`, bounded in size. Leaving the block before the last one
        poisons the connection: what is still on its way cannot be told from the next reply.
        """
        operation = operations.nar_from_path(path)
        async with self._exclusively(operation.op.name):
            await self._stream.send(operation.request)
            await self._stream.finish_messages()
            chunks = NarChunks(self._stream.take)
            yield chunks
            if not chunks.is_complete:
                await self._poison(f"the NAR of {path} was not read to its end")

    # --- building -----------------------------------------------------------------------------------

    async def build_paths_with_results(
        self,
        derived_paths: Sequence[str],
        *,
        mode: BuildMode = BuildMode.NORMAL,
        on_message: MessageSink | None = None,
    ) -> tuple[BuildResult, ...]:
        """Make `derived_paths` valid (`/nix/store/...-x.drv!*`, `...drv!out,dev`, or a plain path).

        A failed build is a result, not an exception; unless `keep_going` is set, paths that were not
        finished when another failed are failures without words, or missing. `on_message` sees log
        lines and progress as they come (`stderr.log_line` picks the log). Cancelling closes the
        connection, which kills the builders: at once for a child daemon, within about a second for
        one behind a socket.
        """
        operation = operations.build_paths_with_results(derived_paths, mode, self.info.minor)
        return await self._run(operation, on_message=on_message)

    # --- how an operation runs ----------------------------------------------------------------------

    async def _run(
        self,
        operation: Operation[T],
        *,
        content: Content | None = None,
        on_message: MessageSink | None = None,
    ) -> T:
        async with self._exclusively(operation.op.name):
            await self._stream.send(operation.request)
            if content is not None:
                await _send_content(self._stream, content)
            else:
                await self._follow(on_message)
            return await self._stream.read(operation.read_result())

    async def _follow(self, on_message: MessageSink | None) -> None:
        """Read messages up to the last one, and when cancelled, leave the daemon in a state to notice it.

        Nix can miss that its client closed the connection when that happens while it handles a line
        of a build's log, and then the builder lives on until its next line (seen with 2.34). So close
        while nothing moves; a builder that never pauses is noticed at its next line anyway.
        """
        try:
            await self._stream.finish_messages(on_message)
        except trio.Cancelled:
            with trio.move_on_after(_SETTLE_LIMIT, shield=True):
                await self._stream.settle()
            raise

    @asynccontextmanager
    async def _exclusively(self, what: str) -> AsyncIterator[None]:
        if self._ended is not None:
            raise ConnectionUnusable(f"this connection to the Nix daemon cannot be used: {self._ended}")
        if self._running is not None:
            raise ConnectionUnusable(f"this connection to the Nix daemon is busy with {self._running}")
        self._running = what
        try:
            yield
        except BaseException:
            with trio.move_on_after(CLOSE_LIMIT, shield=True):
                await self._poison(f"{what} failed or was cancelled on it")
            raise
        finally:
            self._running = None

    async def _poison(self, why: str) -> None:
        self._ended = self._ended or why
        with trio.move_on_after(CLOSE_LIMIT, shield=True):
            await self._stream.transport.aclose()


@attrs.define(eq=False)
class _Upload:
    """The sending half of a request with content, run beside the reading of the answer."""

    stream: DaemonStream
    content: Content
    # Set before the end of the content is sent: an answer that comes earlier cannot be a success.
    is_complete: bool = False
    # What iterating over the content raised.
    error: Exception | None = None

    async def run(self, scope: trio.CancelScope) -> None:
        try:
            frames = FrameWriter(self.stream.send)
            await self.content(frames.write)
            await frames.flush()
            self.is_complete = True
            await self.stream.send(framing.END)
        except DaemonGone:
            pass  # the reading half finds the daemon's reason, or the end of the stream
        except Exception as error:
            self.error = error
            scope.cancel()


async def _send_content(stream: DaemonStream, content: Content) -> None:
    """Send `content` and read the messages, both at once: a daemon that reports an error or a log line
    while nobody reads would otherwise wait for us as we wait for it."""
    upload = _Upload(stream, content)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(upload.run, nursery.cancel_scope)
        try:
            await stream.finish_messages()
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    # Plain errors, not groups: both halves stored theirs, and only one is the cause.
    if upload.error is not None:
        raise upload.error
    if failure is not None:
        raise failure
    if not upload.is_complete:
        raise DaemonProtocolError("the daemon answered success before it had all content")
