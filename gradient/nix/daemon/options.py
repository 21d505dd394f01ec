"""The settings a client gives its connection. Layer: rank 1, pure."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import attrs

from gradient.nix.daemon.primitives import pairs, u64

# The daemon's own numbers for "show builder output" and "do not".
_VERBOSE_BUILD: Final = 0
_QUIET_BUILD: Final = 7


class Verbosity(IntEnum):
    """How much the daemon tells. Build logs arrive at every level."""

    ERROR = 0
    WARN = 1
    NOTICE = 2
    INFO = 3
    TALKATIVE = 4
    CHATTY = 5
    DEBUG = 6
    VOMIT = 7


@attrs.frozen
class DaemonOptions:
    """Settings of one connection. Times in seconds, 0 = no limit; `build_cores` 0 = all.

    `extra` are further `nix.conf` settings by name. A daemon that does not trust us ignores all of
    them but a few (`timeout`, `max-silent-time`, `connect-timeout`, empty `builders`), with a warning.
    """

    verbosity: Verbosity = Verbosity.NOTICE
    max_build_jobs: int = 1
    build_cores: int = 0
    max_silent: int = 0
    timeout: int = 0
    use_substitutes: bool = False
    keep_failed: bool = False
    keep_going: bool = False
    try_fallback: bool = False
    verbose_build: bool = True
    extra: tuple[tuple[str, str], ...] = ()


def encode(options: DaemonOptions) -> bytes:
    """The arguments of SetOptions."""
    use_build_hook, log_type, print_build_trace = 1, 0, 0  # obsolete, their usual values
    numbers = (
        options.keep_failed,
        options.keep_going,
        options.try_fallback,
        options.verbosity,
        options.max_build_jobs,
        options.max_silent,
        use_build_hook,
        _VERBOSE_BUILD if options.verbose_build else _QUIET_BUILD,
        log_type,
        print_build_trace,
        options.build_cores,
        options.use_substitutes,
    )
    timeout = (("timeout", str(options.timeout)),) if options.timeout else ()
    return b"".join(map(u64, numbers)) + pairs(timeout + options.extra)
