"""How the daemon answers a build. Layer: rank 1, pure."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Final

import attrs

from gradient.nix.daemon.errors import DaemonProtocolError, strip_ansi
from gradient.nix.daemon.primitives import (
    Decoder,
    read_bool,
    read_list,
    read_pairs,
    read_string,
    read_text,
    read_u64,
)

# More outputs than any derivation has, and more derivations than we ever ask for in one request.
_MAX_OUTPUTS: Final = 4096
_MAX_RESULTS: Final = 65536


class ResultStatus(IntEnum):
    """The daemon's word for how a build ended."""

    BUILT = 0
    SUBSTITUTED = 1
    ALREADY_VALID = 2
    PERMANENT_FAILURE = 3
    INPUT_REJECTED = 4
    OUTPUT_REJECTED = 5
    TRANSIENT_FAILURE = 6
    CACHED_FAILURE = 7
    TIMED_OUT = 8
    MISC_FAILURE = 9
    DEPENDENCY_FAILED = 10
    LOG_LIMIT_EXCEEDED = 11
    NOT_DETERMINISTIC = 12
    RESOLVES_TO_ALREADY_VALID = 13
    NO_SUBSTITUTERS = 14

    @classmethod
    def _missing_(cls, value: object) -> ResultStatus:
        # A status of a newer daemon: every success is among those above.
        return cls.MISC_FAILURE


_SUCCESS: Final = frozenset(
    {
        ResultStatus.BUILT,
        ResultStatus.SUBSTITUTED,
        ResultStatus.ALREADY_VALID,
        ResultStatus.RESOLVES_TO_ALREADY_VALID,
    }
)


@attrs.frozen
class BuildResult:
    """The result for one derived path (`/nix/store/...-x.drv!*`, or a plain store path).

    `outputs` maps output names to full store paths; empty for failures and plain paths. `started` and
    `stopped` are seconds since the epoch, 0 when nothing ran and where the daemon does not say (2.34).
    CPU times are microseconds, None below protocol 1.37 and where the daemon could not measure.
    `error` has no escape sequences.
    """

    derived_path: str
    status: ResultStatus
    error: str = ""
    times_built: int = 0
    is_non_deterministic: bool = False
    started: int = 0
    stopped: int = 0
    cpu_user_us: int | None = None
    cpu_system_us: int | None = None
    outputs: dict[str, str] = attrs.field(factory=dict)

    @property
    def success(self) -> bool:
        """Whether every wanted output is valid now."""
        return self.status in _SUCCESS


def read_results(minor: int) -> Decoder[tuple[BuildResult, ...]]:
    """The reply to BuildPathsWithResults in protocol 1.`minor`."""
    return (yield from read_list(lambda: _read_keyed(minor), _MAX_RESULTS))


def _read_keyed(minor: int) -> Decoder[BuildResult]:
    derived_path = yield from read_string()
    status = ResultStatus((yield from read_u64()))
    error = yield from read_text()
    times_built = yield from read_u64()
    is_non_deterministic = yield from read_bool()
    started = yield from read_u64()
    stopped = yield from read_u64()
    cpu_user = (yield from _read_microseconds()) if minor >= 37 else None
    cpu_system = (yield from _read_microseconds()) if minor >= 37 else None
    realisations = yield from read_pairs(_MAX_OUTPUTS)
    store_dir = derived_path.rpartition("/")[0]
    return BuildResult(
        derived_path=derived_path,
        status=status,
        error=strip_ansi(error).strip(),
        times_built=times_built,
        is_non_deterministic=is_non_deterministic,
        started=started,
        stopped=stopped,
        cpu_user_us=cpu_user,
        cpu_system_us=cpu_system,
        outputs=dict(_output(store_dir, key, value) for key, value in realisations),
    )


def _read_microseconds() -> Decoder[int | None]:
    if not (yield from read_bool()):
        return None
    value = yield from read_u64()
    return value - (value >> 63 << 64)  # signed on the wire


def _output(store_dir: str, key: str, realisation: str) -> tuple[str, str]:
    """One built output: the key is `sha256:...!name` (the hash may be a dummy), the value JSON."""
    try:
        base_name = json.loads(realisation)["outPath"]
    except (ValueError, RecursionError, KeyError, TypeError):
        base_name = None
    name = key.partition("!")[2]
    if not name or not isinstance(base_name, str) or not base_name:
        raise DaemonProtocolError(f"the daemon sent an output that is no realisation: {key[:200]!r}")
    return name, f"{store_dir}/{base_name.rpartition('/')[2]}"
