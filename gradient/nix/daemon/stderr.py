"""What a daemon says while it works: log text, activities, their results, and the end of it.

Layer: rank 1, pure. Every reply begins with these messages, up to `Last` (the result follows) or
`Failed` (nothing follows). The protocol calls the channel "stderr".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import IntEnum
from typing import Final, TypeAlias

import attrs

from gradient.nix.daemon.errors import DaemonProtocolError
from gradient.nix.daemon.options import Verbosity
from gradient.nix.daemon.primitives import (
    Decoder,
    read_bool,
    read_count,
    read_list,
    read_string,
    read_text,
    read_u64,
    string,
    u64,
)

# A real message has at most a handful of fields; an error has one trace line for each evaluation frame.
MAX_FIELDS: Final = 1024
MAX_TRACES: Final = 100_000

_NEXT: Final = 0x6F6C6D67
_LAST: Final = 0x616C7473
ERROR: Final = 0x63787470
_START_ACTIVITY: Final = 0x53545254
_STOP_ACTIVITY: Final = 0x53544F50
_RESULT: Final = 0x52534C54


class ActivityType(IntEnum):
    """Kinds of activity that callers look at; a daemon may send others."""

    UNKNOWN = 0
    COPY_PATH = 100
    FILE_TRANSFER = 101
    REALISE = 102
    COPY_PATHS = 103
    BUILDS = 104
    BUILD = 105
    SUBSTITUTE = 108
    QUERY_PATH_INFO = 109
    POST_BUILD_HOOK = 110
    BUILD_WAITING = 111
    FETCH_TREE = 112


class ResultType(IntEnum):
    """Kinds of activity result that callers look at; a daemon may send others."""

    FILE_LINKED = 100
    BUILD_LOG_LINE = 101
    SET_PHASE = 104
    PROGRESS = 105
    SET_EXPECTED = 106
    POST_BUILD_LOG_LINE = 107


Field: TypeAlias = int | str


@attrs.frozen
class LogText:
    """Plain log text, usually with its newline."""

    text: str


@attrs.frozen
class ActivityStarted:
    """The daemon began something. `type` is an `ActivityType` where known; `parent` 0 is none."""

    id: int
    level: int
    type: int
    text: str
    fields: tuple[Field, ...]
    parent: int


@attrs.frozen
class ActivityStopped:
    """The activity `id` is over."""

    id: int


@attrs.frozen
class ActivityResult:
    """News of the activity `id`: a log line of its build, a phase, progress. `type`: `ResultType`."""

    id: int
    type: int
    fields: tuple[Field, ...]


@attrs.frozen
class Last:
    """The operation succeeded; its result follows on the wire."""


@attrs.frozen
class Failed:
    """The operation failed; nothing follows. `message` as the daemon wrote it."""

    message: str


Message: TypeAlias = LogText | ActivityStarted | ActivityStopped | ActivityResult


def log_line(message: Message) -> str | None:
    """The text of `message` that belongs in a build's log, without newline at its end, or None.

    Activities of builds are left out, as they only repeat which derivation is built, and those for
    debugging, which a daemon sends at every verbosity.
    """
    match message:
        case LogText(text=text):
            return text.rstrip("\n")
        case ActivityResult(
            type=ResultType.BUILD_LOG_LINE | ResultType.POST_BUILD_LOG_LINE, fields=(str(text), *_)
        ):
            return text
        case ActivityStarted(level=level, type=type_, text=text) if (
            text and level <= Verbosity.INFO and type_ not in (ActivityType.BUILD, ActivityType.BUILDS)
        ):
            return text
    return None


def read_message() -> Decoder[Message | Last | Failed]:
    """One message. Raises `DaemonProtocolError` for a code that no daemon of 1.34 and newer sends to us."""
    code = yield from read_u64()
    try:
        decoder = _DECODERS[code]
    except KeyError:
        raise DaemonProtocolError(f"the daemon sent the unknown message code {code:#x}") from None
    return (yield from decoder())


def failure(message: str) -> bytes:
    """An error as a daemon sends it: the reply that our proxy gives for a refused or failed request."""
    level = 0
    trace_count = 0
    position = 0
    error = string("Error") + u64(level) + string("Error") + string(message)
    return u64(ERROR) + error + u64(position) + u64(trace_count)


def last() -> bytes:
    """The end of the messages, before a result."""
    return u64(_LAST)


def _read_text_message() -> Decoder[LogText]:
    return LogText((yield from read_text()))


def _read_last() -> Decoder[Last]:
    yield from ()
    return Last()


def read_failed() -> Decoder[Failed]:
    """The body of an error, after its code."""
    yield from read_string()  # "Error"
    yield from read_u64()  # level
    yield from read_string()  # "Error" again
    message = yield from read_text()
    yield from _refuse_position()
    for _ in range((yield from read_count(MAX_TRACES))):
        yield from _refuse_position()
        yield from read_text()
    return Failed(message)


def _refuse_position() -> Decoder[None]:
    if (yield from read_u64()) != 0:
        raise DaemonProtocolError("the daemon sent an error with a source position, which has no known form")


def _read_started() -> Decoder[ActivityStarted]:
    id_ = yield from read_u64()
    level = yield from read_u64()
    type_ = yield from read_u64()
    text = yield from read_text()
    fields = yield from _read_fields()
    parent = yield from read_u64()
    return ActivityStarted(id_, level, type_, text, fields, parent)


def _read_stopped() -> Decoder[ActivityStopped]:
    return ActivityStopped((yield from read_u64()))


def _read_result() -> Decoder[ActivityResult]:
    id_ = yield from read_u64()
    type_ = yield from read_u64()
    return ActivityResult(id_, type_, (yield from _read_fields()))


def _read_fields() -> Decoder[tuple[Field, ...]]:
    return (yield from read_list(_read_field, MAX_FIELDS))


def _read_field() -> Decoder[Field]:
    if (yield from read_bool()):
        return (yield from read_text())
    return (yield from read_u64())


_DECODERS: Final[dict[int, Callable[[], Generator[int, bytes, Message | Last | Failed]]]] = {
    _NEXT: _read_text_message,
    _LAST: _read_last,
    ERROR: read_failed,
    _START_ACTIVITY: _read_started,
    _STOP_ACTIVITY: _read_stopped,
    _RESULT: _read_result,
}
