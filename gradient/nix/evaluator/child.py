"""One `nix repl` child. Layer: rank 1: a process and its pipes.

Requests are answered in the order they were sent, and several may be under way: the pipe hides the
round trip. A child serves one task at a time and, in its life, one flake: what one project's evaluation
has seen, and what it was allowed to read, never reaches another's. A child that was cancelled, broke
the conversation or a limit is `broken`, and only good for being closed.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

import attrs
import trio

from gradient.nix.evaluator import expressions
from gradient.nix.evaluator.errors import ChildDied, EvaluationFailed, EvaluatorUnusable
from gradient.nix.evaluator.messages import tidy
from gradient.nix.evaluator.transcript import Reply, Transcript, TranscriptError

# Requests are written without a reader beside the writer: those under way must fit into the pipe of
# 64 KiB, or child and parent could wait for each other to read.
MAX_REQUEST: Final = 8 * 2**10  # bytes
MAX_UNDER_WAY: Final = 4

READ_SIZE: Final = 64 * 2**10  # bytes: a full pipe
# Decoding more than this takes longer than other tasks should wait (about 1 ms).
DECODE_INLINE: Final = 64 * 2**10  # bytes
# From SIGKILL to the end of the process; only a process in an uninterruptible wait takes longer.
REAP_LIMIT: Final = 5.0  # seconds
# Under memory pressure the kernel should rather take a child, which can be replaced, than the worker.
OOM_SCORE: Final = 600

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@attrs.frozen
class Invocation:
    """How to start a child: the program, its arguments and its whole environment."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: Path


@attrs.frozen
class Answer:
    """The value of a request, and what Nix said beside it (warnings, traces)."""

    value: object
    remarks: str


@attrs.define(eq=False)
class Child:
    """A running child. Made by `start`; whoever holds it must `aclose` it."""

    # The flake this child evaluates; None for a child that evaluates none.
    flake: str | None
    _process: trio.Process
    _stdin: trio.lowlevel.FdStream
    _stdout: trio.lowlevel.FdStream
    _transcript: Transcript
    # Requests under way, oldest first: the first is the one being evaluated.
    _pending: deque[int] = attrs.field(factory=deque, init=False)
    _replies: deque[Reply] = attrs.field(factory=deque, init=False)
    _sent: int = attrs.field(default=0, init=False)
    # Why the child was condemned, in words; once set it never answers again.
    _verdict: str | None = attrs.field(default=None, init=False)
    _broken: bool = attrs.field(default=False, init=False)
    # Until the group's leader is reaped its number cannot be anyone else's, and the group may be killed.
    _reaped: bool = attrs.field(default=False, init=False)
    opened: bool = attrs.field(default=False, init=False)

    @classmethod
    async def start(cls, invocation: Invocation, flake: str | None) -> Child:
        """Start a child and hear it speak. Raises EvaluatorUnusable; cancelled, nothing is left running."""
        token = secrets.token_hex(16)
        try:
            process = await trio.lowlevel.open_process(
                invocation.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=invocation.environment,
                cwd=invocation.folder,
                start_new_session=True,
            )
        except OSError as error:
            raise EvaluatorUnusable(f"cannot start {invocation.argv[0]}: {error.strerror}") from error
        assert isinstance(process.stdin, trio.lowlevel.FdStream)
        assert isinstance(process.stdout, trio.lowlevel.FdStream)
        child = cls(flake, process, process.stdin, process.stdout, Transcript(token))
        try:
            child._prefer_for_oom()
            await child._write(expressions.protocol_definitions(token))
            await child.ask("null")
        except ChildDied as error:
            await child.aclose()
            raise EvaluatorUnusable(f"{invocation.argv[0]} does not evaluate: {error}") from error
        except BaseException:
            await child.aclose()
            raise
        return child

    @property
    def pid(self) -> int:
        """The process, leader of its own process group."""
        return self._process.pid

    @property
    def under_way(self) -> int:
        """How many requests are sent and not yet answered."""
        return len(self._pending)

    @property
    def reusable(self) -> bool:
        """Whether the child can be lent again: idle, unbroken and alive."""
        return not self._broken and not self._pending and not self._has_ended()

    async def ask(self, expression: str) -> Answer:
        """Send one expression and wait for its value. Raises as `send` and `receive` do."""
        await self.send(expression)
        return await self.receive()

    async def send(self, expression: str) -> None:
        """Queue an expression. Raises EvaluationFailed when it is too long, ChildDied."""
        assert len(self._pending) < MAX_UNDER_WAY
        lines = expressions.request(self._sent + 1, expression)
        if len(lines) > MAX_REQUEST:
            raise EvaluationFailed(f"the request is longer than {MAX_REQUEST // 2**10} KiB")
        self._sent += 1
        self._pending.append(self._sent)
        await self._write(lines)

    async def receive(self) -> Answer:
        """The answer to the oldest request. Raises EvaluationFailed (the child lives on) or ChildDied."""
        reply = await self._next_reply()
        self._pending.popleft()
        if reply.printed is None:
            raise EvaluationFailed(tidy(reply.diagnostics) or "Nix gave no value and no reason")
        return Answer(await _decode(reply), reply.diagnostics)

    async def define(self, lines: str) -> None:
        """Bind names, with nothing under way; errors show when one is used. Raises ChildDied."""
        assert not self._pending
        await self._write(lines)

    def rss(self) -> int:
        """Resident memory in bytes, 0 where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.pid}/statm").read_text().split()
            return int(fields[1]) * _PAGE
        except (OSError, IndexError):  # no /proc here, or the process is gone
            return 0

    def condemn(self, verdict: str) -> None:
        """Kill the child now; the request it is at fails with ChildDied and these words."""
        self._verdict = verdict
        self.kill()

    def kill(self) -> None:
        """Kill the child's process group at once. Safe to repeat."""
        self._broken = True
        if not self._reaped:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def aclose(self) -> None:
        """Kill the child, reap it and close its pipes, cancelled or not; takes REAP_LIMIT at most."""
        self.kill()
        with trio.move_on_after(REAP_LIMIT, shield=True):
            await self._reap()
            await self._stdin.aclose()
            await self._stdout.aclose()

    async def _write(self, lines: str) -> None:
        try:
            await self._stdin.send_all(lines.encode("ascii"))
        except trio.BrokenResourceError:
            raise await self._death() from None
        except BaseException:
            self._broken = True  # half a line may have gone out
            raise

    async def _next_reply(self) -> Reply:
        while not self._replies:
            data = await self._stdout.receive_some(READ_SIZE)
            if not data:
                raise await self._death()
            try:
                self._replies += self._transcript.feed(bytes(data))
            except TranscriptError as error:
                self.condemn(f"was ended: it gave {error}")
                raise await self._death() from error
        reply = self._replies.popleft()
        if reply.number != self._pending[0]:
            self.condemn("was ended: it answered out of turn")
            raise await self._death()
        return reply

    async def _death(self) -> ChildDied:
        """The error that tells how the child ended."""
        self.kill()
        with trio.move_on_after(REAP_LIMIT):
            await self._reap()
        cause = self._verdict or _how_it_ended(self._process.returncode)
        last_words = tidy(self._transcript.last_words())
        return ChildDied(f"the evaluator {cause}" + (f"\n{last_words}" if last_words else ""))

    async def _reap(self) -> None:
        await self._process.wait()
        self._reaped = True

    def _has_ended(self) -> bool:
        """Whether nobody holds the other end of the pipe any more."""
        poll = select.poll()
        poll.register(self._stdout.fileno(), 0)  # a hang-up is told unasked
        return bool(poll.poll(0))

    def _prefer_for_oom(self) -> None:
        try:
            Path(f"/proc/{self.pid}/oom_score_adj").write_text(str(OOM_SCORE))
        except OSError:
            return  # not Linux, or a kernel that lets nobody


async def _decode(reply: Reply) -> object:
    assert reply.printed is not None
    try:
        if len(reply.printed) <= DECODE_INLINE:
            return reply.value
        return await trio.to_thread.run_sync(lambda: reply.value)
    except ValueError as error:
        raise EvaluationFailed(f"the value cannot be written as JSON: {error}") from error


def _how_it_ended(returncode: int | None) -> str:
    if returncode is None:
        return "does not answer and does not die"
    if returncode < 0:
        return f"was killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    return f"ended with exit status {returncode}"
