"""How long this process has been running: `seconds` of --json."""

from __future__ import annotations

import os
import time
from pathlib import Path

_IMPORTED_AT = time.monotonic()


def seconds_since_start() -> float:
    """Seconds since the process began, interpreter and imports included.

    Linux says when that was, in ticks of 10 ms since boot; a program that replaced another one (`exec`)
    inherits its start, so with `scripts/run` the preparations count. Elsewhere: since this module was
    imported.
    """
    try:
        # The command name (field 2) may hold blanks and parentheses; field 22 is counted behind it.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED_AT
