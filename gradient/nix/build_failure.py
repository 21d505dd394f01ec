"""The reason out of Nix's message about a failed build, without what is shown elsewhere. Pure."""

from __future__ import annotations

import re
from typing import Final

# Where the message turns to what is shown elsewhere: its log, its output paths.
_ASIDE: Final = re.compile(r";?\s*(?:last \d+ log lines?:|output paths?:|for full logs).*", re.I | re.S)
_PREFIX: Final = re.compile(
    r"(?:error: )?(?:builder for '[^']*'|cannot build '[^']*'\.\s*reason: builder) failed with ", re.I
)


def failure_reason(message: str) -> str:
    """It on one line, such as `exit code 1`; "" for nothing.

    Nix 2.8 says `builder for '...' failed with exit code 1; last 10 log lines: ...`, a newer one `Cannot
    build '...'. Reason: builder failed with exit code 1. Output paths: ...`.
    """
    return " ".join(_PREFIX.sub("", _ASIDE.sub("", message)).split()).removesuffix(".")
