"""Running a command: signals come in as a wish to stop, an exit code and at most one line go out."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from signal import Signals
from typing import Final, NoReturn

import structlog
import trio

from gradient.cli.faults import Exit, Fault, Interrupted, as_fault, one_line
from gradient.cli.output import Output
from gradient.nursery.health import leaves
from gradient.nursery.signals import Stop, listen

# How long a thread computes before another that waits may go on. Our worker threads do many short file
# operations, after each of which they wait for their turn again: with Python's 5 ms, an upload of 50 small
# NARs took three times as long beside a busy event loop. Ten times as many turns cost nothing measurable.
SWITCH_INTERVAL: Final = 0.0005  # seconds

# A command: told of a wish to stop, it drains and returns its exit code.
Command = Callable[[Stop], Awaitable[int]]


def run(out: Output, command: Command) -> NoReturn:
    """Run `command` and exit with its code, or with that of the fault which ended it."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        code = trio.run(_with_signals, command)
    except BaseException as error:  # trio has ended: nothing is swallowed  # noqa: ASYNC103
        code = _failed(out, error)
    sys.exit(int(code))


def _failed(out: Output, error: BaseException) -> Exit:
    """Say what ended the command; its exit code."""
    if any(isinstance(leaf, BrokenPipeError) for leaf in leaves(error)):
        # Whoever read our output has had enough: so have we, and Python's own last flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    fault = as_fault(error)
    if fault is None:
        traceback.print_exception(error)
        fault = _Bug(f"{one_line(leaves(error)[0]) or type(error).__name__} (this is a bug in Gradient)")
    out.fail(fault)
    return fault.exit


class _Bug(Fault):
    """A programming error; its traceback was printed."""

    exit = Exit.BUG


def interruptible(
    command: Callable[[], Awaitable[int]], words: Callable[[], str] = lambda: "interrupted"
) -> Command:
    """A command with nothing to drain: the first signal cancels it, and `words` are said."""

    async def until_stopped(stop: Stop) -> int:
        code: int | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_when, stop.gently, nursery.cancel_scope)
            code = await command()
            nursery.cancel_scope.cancel()
        if code is None:
            raise Interrupted(words())
        return code

    return until_stopped


async def cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    """Cancel `scope` once `event` is set."""
    await event.wait()
    scope.cancel()


def signal_exit(stop: Stop) -> Exit:
    """The code of a service that stopped as it was told: Ctrl-C is an interruption, SIGTERM is not."""
    return Exit.INTERRUPTED if stop.signal is Signals.SIGINT else Exit.BUILT


def log_to_stderr(level: str) -> None:
    """Structured log lines from `level` on to stderr, wherever that points when they are written."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=False,
    )


class _Stderr:
    """A logger that looks for stderr each time: a live display stands in for it while it runs."""

    def msg(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    debug = info = warning = warn = error = critical = exception = fatal = log = msg


async def _with_signals(command: Command) -> int:
    stop = Stop()
    code: int = Exit.BUG
    async with trio.open_nursery() as nursery:
        await nursery.start(listen, stop)
        code = await command(stop)
        nursery.cancel_scope.cancel()
    return code
