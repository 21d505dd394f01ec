"""One `nix repl` child. Layer: rank 1: a process and its pipes.

A child serves one task at a time, with one request under way, and in its life one flake: what one
project's evaluation has seen, and what it was allowed to read, never reaches another's. A child that was
cancelled, broke the conversation or a limit is `broken`, and only good for being closed.
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
from gradient.nix.evaluator.findings import FlakeAddress
from gradient.nix.evaluator.messages import tidy
from gradient.nix.evaluator.once import error_of
from gradient.nix.evaluator.transcript import Continued, Ended, Event, Said, Transcript, TranscriptError

# A request is written without a reader beside the writer: it must fit into the pipe (64 KiB), or child
# and parent could wait for each other to read.
MAX_STATEMENT: Final = 32 * 2**10  # bytes

READ_SIZE: Final = 64 * 2**10  # bytes: a full pipe
# Decoding more than this takes longer than other tasks should wait (about 1 ms).
DECODE_INLINE: Final = 64 * 2**10  # bytes
# From SIGKILL to the end of the process; only a process in an uninterruptible wait takes longer.
REAP_LIMIT: Final = 5.0  # seconds
# From a child's last word to its exit status.
EXIT_GRACE: Final = 1.0  # seconds
END_OF_FILE: Final = "unexpected end of file"
# For an error that a process of its own does not repeat.
UNEXPLAINED: Final = f"error: syntax error, {END_OF_FILE}: a file ends in the middle of an expression"
# Under memory pressure the kernel should rather take a child, which can be replaced, than the worker.
OOM_SCORE: Final = 600

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@attrs.frozen
class Invocation:
    """How to start a child: the program, its arguments and its whole environment."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: Path

    def once(self, expression: str) -> tuple[str, ...]:
        """The command that evaluates one expression under the same options, and ends."""
        program, _, *options = self.argv
        return (program, "eval", *options, "--expr", expression)


@attrs.frozen
class Answer:
    """A value that was asked for, and what Nix said beside it (warnings, traces)."""

    value: object
    remarks: str


@attrs.frozen
class Refused:
    """The end of a request. Nix's reason, if there are answers that it did not give."""

    message: str


@attrs.define(eq=False)
class Child:
    """A running child. Made by `start`; whoever holds it must `aclose` it."""

    # The flake this child evaluates; None for a child that evaluates none.
    flake: FlakeAddress | None
    _invocation: Invocation
    _process: trio.Process
    _stdin: trio.lowlevel.FdStream
    _stdout: trio.lowlevel.FdStream
    _transcript: Transcript
    _heard: deque[Event] = attrs.field(factory=deque, init=False)
    # The number of the last request, and whether it is under way.
    _number: int = attrs.field(default=0, init=False)
    _busy: bool = attrs.field(default=False, init=False)
    # What was sent for it, and the names bound before.
    _statement: str = attrs.field(default="", init=False)
    _definitions: str = attrs.field(default="", init=False)
    # Nix's error, once it waits for more of the request; what it says from then on is of no use.
    _given_up: str | None = attrs.field(default=None, init=False)
    # Why the child was condemned, in words; once set it never answers again.
    _verdict: str | None = attrs.field(default=None, init=False)
    _broken: bool = attrs.field(default=False, init=False)
    # Set a while after the leader was reaped: from then on its group's number may be anyone's.
    _reaped: bool = attrs.field(default=False, init=False)
    # Whether evaluation is pure. Nix 2.8 ignores the option here, and then the host's files are open to it.
    pure: bool = attrs.field(default=False, init=False)
    opened: bool = attrs.field(default=False, init=False)

    @classmethod
    async def start(cls, invocation: Invocation, flake: FlakeAddress | None) -> Child:
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
        child = cls(flake, invocation, process, process.stdin, process.stdout, Transcript(token))
        try:
            child._prefer_for_oom()
            await child._write(expressions.protocol_definitions(token))
            child.pure = (await child.ask("!(builtins ? currentSystem)")).value is True
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
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self._busy

    @property
    def reusable(self) -> bool:
        """Whether the child can be lent again: idle, unbroken and alive."""
        return not self._broken and not self._busy and not self._has_ended()

    async def ask(self, expression: str) -> Answer:
        """The value of one expression. Raises EvaluationFailed (the child lives on) or ChildDied."""
        await self.begin(expressions.say(expression))
        answer = await self.hear()
        if isinstance(answer, Refused):
            raise EvaluationFailed(answer.message or "Nix gave no value and no reason")
        await self.hear()
        return answer

    @staticmethod
    def takes(statement: str) -> bool:
        """Whether `begin` takes a statement of this length."""
        return len(statement) <= MAX_STATEMENT

    async def begin(self, statement: str) -> None:
        """Send a request. Raises EvaluationFailed when it is too long, ChildDied."""
        assert not self._busy
        if not self.takes(statement):
            raise EvaluationFailed(f"the request is longer than {MAX_STATEMENT // 2**10} KiB")
        self._number += 1
        self._busy = True
        self._statement, self._given_up = statement, None
        await self._write(expressions.request(self._number, statement))

    async def hear(self) -> Answer | Refused:
        """The next answer to the request, or its end: Refused if answers are still due. Raises ChildDied."""
        while True:  # noqa: ASYNC913  # waits in _read, or ends
            while not self._heard:
                await self._read()
            match self._heard.popleft():
                case Said() as said if self._given_up is None:
                    return Answer(await self._decode(said), said.remarks)
                case Continued(number) if self._given_up is None and number == self._number:
                    await self._give_up()
                case Ended(number, diagnostics):
                    if number != self._number:
                        raise await self._broke_off("it answered out of turn")
                    self._busy = False
                    return Refused(self._given_up or tidy(diagnostics))

    async def _give_up(self) -> None:
        """End a request that Nix waits for more of, for a reason that it does not tell."""
        await self._write(expressions.reset(self._number))
        argv = self._invocation.once(expressions.alone(self._definitions, self._statement))
        error = await error_of(argv, self._invocation.environment, self._invocation.folder)
        # Where it fails otherwise, such as for want of time, what is known is said.
        self._given_up = error if END_OF_FILE in error else UNEXPLAINED

    async def define(self, lines: str) -> None:
        """Bind names, with nothing under way; errors show when one is used. Raises ChildDied."""
        assert not self._busy
        self._definitions += lines
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

    async def _read(self) -> None:
        data = await self._stdout.receive_some(READ_SIZE)
        if not data:
            raise await self._death()
        try:
            self._heard += self._transcript.feed(bytes(data))
        except TranscriptError as error:
            raise await self._broke_off(f"it gave {error}") from error

    async def _decode(self, said: Said) -> object:
        try:
            if len(said.json) <= DECODE_INLINE:
                return said.value()
            return await trio.to_thread.run_sync(said.value)
        except (ValueError, RecursionError) as error:  # a value nested ten thousand deep is still JSON
            raise await self._broke_off(f"its answer cannot be read: {error}") from error

    async def _broke_off(self, why: str) -> ChildDied:
        self.condemn(f"was ended: {why}")
        return await self._death()

    async def _death(self) -> ChildDied:
        """The error that tells how the child ended, given the time to end in its own way."""
        with trio.move_on_after(EXIT_GRACE):
            await self._process.wait()
        self.kill()  # what is left of it or of its group
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


def _how_it_ended(returncode: int | None) -> str:
    if returncode is None:
        return "does not answer and does not die"
    if returncode < 0:
        return f"was killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    return f"ended with exit status {returncode}"
