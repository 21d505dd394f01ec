"""A worker as a child process, and the worker's view of the parent that started it.

The child's standard input is the leash: its first line is the server's URL, and its end means that the
parent is gone, however it went, and stops the child. The child leads a session of its own, so that a
Ctrl-C reaches only the parent, which then decides the order in which things stop.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import attrs
import trio

from gradient.cli.faults import BadEnvironment, Exit, Fault, NotAuthorised
from gradient.cli.run import cancel_when
from gradient.nursery.signals import Stop
from gradient.nursery.stop_window import STOP_WINDOW

# The worker's own window, and a moment for the interpreter to end.
STOP_LIMIT: Final = STOP_WINDOW + 1.0  # seconds
# For a worker that was told to stop at once: it kills its children and goes.
STOP_AT_ONCE_LIMIT: Final = 2.0  # seconds
# The object of --json is the last thing a child says.
LAST_WORDS: Final = 64 * 2**10  # bytes
LEASH: Final = "--leashed"

Say = Callable[[str], None]


def worker_command(*options: str) -> tuple[str, ...]:
    """The command line of a leashed worker."""
    return (sys.executable, "-m", "gradient", "work", "--json", LEASH, *options)


@attrs.define(eq=False)
class WorkerChild:
    """One child; `say` gets the lines of its stderr."""

    command: Sequence[str]
    say: Say
    # Set once the process is gone; `fault` is then why, unless it was told to stop.
    ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    fault: Fault | None = attrs.field(default=None, init=False)
    _process: trio.Process = attrs.field(init=False)
    _stopping: bool = attrs.field(default=False, init=False)
    _last_words: bytes = attrs.field(default=b"", init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the process to its end; started once it runs. Cancelled, it is stopped at once."""
        self._process = await trio.lowlevel.open_process(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._relay)
                nursery.start_soon(self._listen)
                task_status.started()
                await self._process.wait()
                # Pipes that a grandchild still holds open have nothing more to say.
                nursery.cancel_scope.deadline = trio.current_time() + 0.5
        finally:
            with trio.move_on_after(2 * STOP_AT_ONCE_LIMIT, shield=True):
                await self._stop_at_once()
            if not self._stopping:
                self.fault = _fault(self._process.returncode, self._last_words)
            self.ended.set()

    async def tell(self, server_url: str) -> None:
        """Let it connect. A child that is gone already is not told: `ended` says so."""
        assert self._process.stdin is not None
        with suppress(trio.BrokenResourceError):
            await self._process.stdin.send_all(f"{server_url}\n".encode())

    async def stop(self) -> None:
        """Have it stop and wait for that, STOP_LIMIT at most; then it is stopped at once."""
        self._stopping = True
        with suppress(ProcessLookupError):
            self._process.terminate()
        with trio.move_on_after(STOP_LIMIT):
            await self.ended.wait()
            return
        await self._stop_at_once()

    async def _stop_at_once(self) -> None:
        """A second wish to stop, by the signal that the first was not; if that does not help, SIGKILL.

        Only to the child itself: it, or its end, closes the connections that its builds live by."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            if self._process.poll() is not None:
                return
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
            if number is not signal.SIGTERM:
                with trio.move_on_after(STOP_AT_ONCE_LIMIT):
                    await self._process.wait()

    async def _relay(self) -> None:
        assert self._process.stderr is not None
        rest = b""
        with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            async for piece in self._process.stderr:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self.say(line.decode(errors="replace"))

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            async for piece in self._process.stdout:
                self._last_words = (self._last_words + piece)[-LAST_WORDS:]


def _fault(code: int | None, last_words: bytes) -> Fault:
    """Why a child ended that nobody had told to."""
    kind = NotAuthorised if code == Exit.UNAUTHORISED else BadEnvironment
    try:
        said = json.loads(last_words.strip().rpartition(b"\n")[2])
        return kind(str(said["errors"][0]["message"]))
    except (ValueError, KeyError, IndexError, TypeError):
        return kind(f"the worker ended by itself (exit code {code})")


# --- the child's end ------------------------------------------------------------------------------


@attrs.define(eq=False)
class Leash:
    """The parent, as its worker sees it."""

    _stdin: trio.lowlevel.FdStream = attrs.field(factory=lambda: trio.lowlevel.FdStream(os.dup(0)))

    async def server_url(self, stop: Stop) -> str | None:
        """The server to connect to, as soon as the parent knows; None when the parent is gone before, or a
        stop is asked for."""
        url: str | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_when, stop.gently, nursery.cancel_scope)
            url = await self._first_line()
            nursery.cancel_scope.cancel()
        return url

    async def _first_line(self) -> str | None:
        said = b""
        while not said.endswith(b"\n"):
            piece = await self._stdin.receive_some(4096)
            if not piece:
                return None
            said += piece
        return said.decode().strip()

    async def hold(self, stop: Stop) -> None:
        """Ask for a stop once the parent is gone."""
        with suppress(trio.BrokenResourceError):
            while await self._stdin.receive_some(4096):
                pass
        stop.request()
