"""The byte stream to a daemon: its socket, or the pipes of a `nix-daemon --stdio` child.

Layer: rank 1. A child has its own session, so that a terminal's Ctrl-C does not reach it, and is
always reaped by `Transport.aclose`. A daemon that sees its connection close kills what it builds; it
gets a moment for that before it is killed itself, as its builders have sessions of their own and
would outlive it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from contextlib import suppress
from typing import IO, Final

import attrs
import trio

from gradient.nix.daemon.address import DaemonAddress, SocketAddress, StdioAddress
from gradient.nix.daemon.errors import DaemonGone, NixMissing, strip_ansi

# Daemons end their builders within about a second; a worker that stops has five for everything.
END_GRACE: Final = 2.5  # seconds
# How long a daemon may take to see that its pipes are closed. Later it is told by SIGTERM as well, which
# some need: Nix can lose its own wake-up when the pipe closes while it handles a line of a build's log.
_NUDGE: Final = 0.25  # seconds
# Reaping after SIGKILL is immediate unless the kernel holds the process in a disk wait.
REAP_LIMIT: Final = 1.0  # seconds
CLOSE_LIMIT: Final = END_GRACE + REAP_LIMIT + 0.5  # seconds
# How much of a dead child's stderr is quoted.
_LAST_WORDS: Final = 2048  # bytes


@attrs.define(eq=False)
class DaemonChild:
    """A `nix-daemon --stdio` process of ours."""

    _process: trio.Process
    # An unnamed file rather than a pipe: nobody has to read it, and a talkative daemon never blocks on it.
    _stderr: IO[bytes]

    async def end(self) -> None:
        """Wait for the process, whose pipes are closed; kill it when it does not end. Never blocks long."""
        with trio.move_on_after(END_GRACE, shield=True):
            while not await self._ended_within(_NUDGE):
                self._process.terminate()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with trio.move_on_after(REAP_LIMIT, shield=True):
                await self._process.wait()
        self._stderr.close()

    async def _ended_within(self, seconds: float) -> bool:
        with trio.move_on_after(seconds):
            await self._process.wait()
        return self._process.returncode is not None

    def last_words(self) -> str:
        """The end of what the process wrote on stderr."""
        if self._stderr.closed:
            return ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _LAST_WORDS))
        return strip_ansi(self._stderr.read().decode(errors="replace")).strip()


@attrs.define(eq=False)
class Transport:
    """A byte stream to a daemon. `fd` is where its bytes arrive, None for a stream in memory."""

    stream: trio.abc.Stream
    fd: int | None = None
    child: DaemonChild | None = None

    def is_silent(self) -> bool:
        """Whether nothing waits to be read, the end of the stream included. Does not block."""
        if self.fd is None:
            return True
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return not poller.poll(0)

    def last_words(self) -> str:
        """What a child said on stderr, for an error message; "" for a socket."""
        return self.child.last_words() if self.child else ""

    async def aclose(self) -> None:
        """Close, and end the child if there is one: at most `CLOSE_LIMIT` seconds, also when cancelled."""
        with trio.move_on_after(CLOSE_LIMIT, shield=True):
            await trio.aclose_forcefully(self.stream)
            if self.child:
                await self.child.end()


async def open_transport(address: DaemonAddress) -> Transport:
    """Connect to the daemon at `address`, or start it. Raises `NixMissing`, `DaemonGone`."""
    match address:
        case SocketAddress(path):
            return await _open_socket(path)
        case StdioAddress(argv):
            return await _start_child(argv)


async def _open_socket(path: str) -> Transport:
    try:
        stream = await trio.open_unix_socket(path)
    except (FileNotFoundError, ConnectionRefusedError, PermissionError) as error:
        raise NixMissing(f"no Nix daemon can be reached on {path}: {error.strerror}") from error
    except OSError as error:
        raise DaemonGone(f"connecting to the Nix daemon on {path} failed: {error}") from error
    return Transport(stream, fd=stream.socket.fileno())


async def _start_child(argv: tuple[str, ...]) -> Transport:
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by DaemonChild.end
    try:
        process = await trio.lowlevel.open_process(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            env=_child_environment(),
        )
    except OSError as error:
        stderr.close()
        raise NixMissing(f"{argv[0]} cannot be started: {error.strerror}") from error
    except BaseException:
        stderr.close()
        raise
    assert isinstance(process.stdin, trio.lowlevel.FdStream)
    assert isinstance(process.stdout, trio.lowlevel.FdStream)
    stream = trio.StapledStream(process.stdin, process.stdout)
    return Transport(stream, fd=process.stdout.fileno(), child=DaemonChild(process, stderr))


def _child_environment() -> dict[str, str]:
    # NIX_REMOTE=daemon, which login profiles set, would make the child only forward to the socket's daemon.
    return {name: value for name, value in os.environ.items() if name != "NIX_REMOTE"}
