"""What can be wrong, each with its exit code, and what the errors of other packages mean for a user.

An error that is not listed here is a programming error: it keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import IntEnum
from typing import ClassVar

from gradient.nursery.health import leaves


class Exit(IntEnum):
    """The exit codes of every command; scripts rely on them."""

    BUILT = 0
    FAILED = 1  # failed, aborted, no such attribute
    USAGE = 2  # of the command line, or a bad flake reference
    ENVIRONMENT = 3  # no Nix, daemon, database, port, data version, server out of reach
    UNAUTHORISED = 4
    BUG = 70  # EX_SOFTWARE of sysexits.h
    INTERRUPTED = 130  # 128 + SIGINT


class Fault(Exception):
    """Ends a command with one line. The line says what to do."""

    exit: ClassVar[Exit] = Exit.FAILED


class NotFound(Fault):
    """There is no such build, evaluation or log."""


class BadUsage(Fault):
    """The command line is not in order."""

    exit = Exit.USAGE


class BadFlake(BadUsage):
    """FLAKE is no flake that can be evaluated."""


class BadEnvironment(Fault):
    """Something that has to be there is not."""

    exit = Exit.ENVIRONMENT


class ServerUnreachable(BadEnvironment):
    """The server does not answer, or not any more."""


class NotAuthorised(Fault):
    """The server wants a token, or another one."""

    exit = Exit.UNAUTHORISED


class Interrupted(Fault):
    """A signal ended the command before its work was done."""

    exit = Exit.INTERRUPTED


def one_line(text: object) -> str:
    """A message on one line."""
    return " ".join(str(text).split())


def as_fault(error: BaseException) -> Fault | None:
    """The fault behind an error; None for a programming error, also when it is one of several."""
    faults = [_translated(leaf) for leaf in leaves(error)]
    known = [fault for fault in faults if fault is not None]
    return known[0] if known and len(known) == len(faults) else None


def _translated(error: BaseException) -> Fault | None:
    if isinstance(error, Fault):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    for kind, errors in _meanings():
        if isinstance(error, errors):
            return kind(one_line(error) or type(error).__name__)
    if isinstance(error, OSError):  # a full disk, a file that is not ours: nothing that code could know
        return BadEnvironment(one_line(f"{error.filename}: {error.strerror}" if error.filename else error))
    return None


def _meanings() -> Iterator[tuple[type[Fault], tuple[type[BaseException], ...]]]:
    """Which errors of the packages below are whose fault. Imported here: only a failure needs them."""
    from gradient.http.errors import BadUrl, HttpError
    from gradient.nix.daemon.errors import DaemonFailure
    from gradient.nix.errors import NixError
    from gradient.settings import SettingsError

    yield BadUsage, (SettingsError, NixError, BadUrl)
    yield ServerUnreachable, (HttpError,)
    yield BadEnvironment, (DaemonFailure,)
    yield BadEnvironment, _server_errors()
    yield NotAuthorised, _worker_errors()


def _server_errors() -> tuple[type[BaseException], ...]:
    """Why a server cannot start. A process without a server has not even loaded their modules."""
    if "gradient.serve" not in sys.modules:
        return ()
    from gradient.graph.pg_errors import PostgresError
    from gradient.serve import CannotListen
    from gradient.server_files import DataDirUnusable
    from gradient.web.errors import PortInUse

    return (PostgresError, DataDirUnusable, PortInUse, CannotListen)


def _worker_errors() -> tuple[type[BaseException], ...]:
    """Why a worker that has started gives up; only its own process has loaded the module."""
    if "gradient.work" not in sys.modules:
        return ()
    from gradient.worker.connection import TokenRefused

    return (TokenRefused,)
