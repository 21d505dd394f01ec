"""What ends a job other than by success, and how the server is told. Layer: worker, pure.

Code of a job raises `JobFault` where it knows what a failure means for the server. Everything else that
can come out of the tools it uses is classified here, in one place: the words of an error are for
people, the kind decides whether the job is tried again.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from gradient.http.errors import HttpError
from gradient.model import FailureKind
from gradient.nar.errors import NarError
from gradient.nix.daemon.errors import DaemonError, DaemonFailure, strip_ansi
from gradient.nix.errors import NixError
from gradient.nix.evaluator.errors import EvaluatorError, EvaluatorUnusable
from gradient.nix.evaluator.flake import FlakeUnusable
from gradient.nursery.health import describe, leaves
from gradient.worker.git_process import GitError
from gradient.worker.source_tree import NoFlake

# A stack trace of an evaluation can be long; its beginning and a frame of 8 MiB are both bounded by this.
MAX_TEXT: Final = 32 * 2**10  # characters

# The machine's trouble, not the derivation's: another try, or another machine, may do better.
_MACHINE_TROUBLE: Final = re.compile(
    r"is not valid|no space left on device|cannot connect to daemon|unexpected end-of-file"
    r"|connection reset|broken pipe|out of memory|cannot allocate memory|too many open files",
    re.IGNORECASE,
)
_NETWORK_TROUBLE: Final = re.compile(
    r"could not resolve host|timed out|connection (?:refused|reset|closed)|early eof|hung up unexpectedly"
    r"|failed to connect|couldn't connect|network is unreachable|no route to host|returned error: 5\d\d"
    r"|unexpected disconnect|temporary failure",
    re.IGNORECASE,
)


class WorkerError(Exception):
    """Base of the worker's own errors."""


class JobFault(WorkerError):
    """The job cannot go on: `kind` is what the server decides by, the text is for people.

    `missing_paths` belong to InputsUnavailable: inputs that the cache lists but cannot give."""

    def __init__(self, kind: FailureKind, text: str, missing_paths: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.kind = kind
        self.missing_paths = missing_paths


@attrs.frozen
class Failure:
    """How a job failed, as JobFailed says it. `is_bug` marks an error that nobody expected."""

    kind: FailureKind
    text: str
    missing_paths: tuple[str, ...] = ()
    is_bug: bool = False


def failure_of(error: BaseException) -> Failure:
    """What an exception, or a group of them, means. The first `JobFault` decides, else the first leaf."""
    causes = leaves(error)
    cause = next((leaf for leaf in causes if isinstance(leaf, JobFault)), causes[0])
    if isinstance(cause, JobFault):
        return Failure(cause.kind, _bounded(str(cause)), cause.missing_paths)
    kind = _kind(cause)
    if kind is None:
        return Failure(FailureKind.PERMANENT, _bounded(describe(cause)), is_bug=True)
    return Failure(kind, _bounded(str(cause)))


def build_failure_kind(text: str) -> FailureKind:
    """Permanent, unless the daemon's words blame the machine. The end of the log, which it quotes, is the
    builder's: that may say anything."""
    words = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(">"))
    return FailureKind.TRANSIENT if _MACHINE_TROUBLE.search(words) else FailureKind.PERMANENT


def _kind(cause: BaseException) -> FailureKind | None:
    """None for an exception that is nobody's expected failure."""
    match cause:
        case DaemonError():
            return build_failure_kind(str(cause))
        case DaemonFailure() | HttpError() | EvaluatorUnusable():
            return FailureKind.TRANSIENT
        case GitError():
            trouble = _NETWORK_TROUBLE.search(str(cause))
            return FailureKind.TRANSIENT if trouble else FailureKind.PERMANENT
        case FlakeUnusable() | EvaluatorError() | NixError() | NarError() | NoFlake():
            return FailureKind.PERMANENT
        case OSError():
            return FailureKind.TRANSIENT
    return None


def _bounded(text: str) -> str:
    clean = strip_ansi(text).strip()
    return clean if len(clean) <= MAX_TEXT else f"{clean[:MAX_TEXT]}…"
