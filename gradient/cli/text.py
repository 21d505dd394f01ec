"""Text from builders and servers, made fit for a terminal: no escape sequence of theirs reaches it. Pure."""

from __future__ import annotations

import re
from collections import deque
from typing import Final

import attrs

from gradient.nix.build_failure import failure_reason

# Lines of a failing log that are shown; `gradient log` has the rest.
TAIL_LINES: Final = 10
# A longer line is cut: a minified file in a log must not fill the screen.
MAX_LINE: Final = 500  # characters

# CSI (colours, cursor), OSC (titles, links), other two-character escapes. Source: ECMA-48.
_ESCAPES: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-Z\\^-~])|\x9b[0-?]*[ -/]*[@-~]"
)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """`text` without escape sequences and control characters; tabs and line feeds stay."""
    return _CONTROL.sub("", _ESCAPES.sub("", text))


def clean_line(line: str) -> str:
    """One line of a log as it stands on a terminal in the end: what a `\\r` overwrote is gone."""
    shown = clean(line.rstrip("\r").rpartition("\r")[2]).expandtabs()
    return shown if len(shown) <= MAX_LINE else f"{shown[: MAX_LINE - 1]}…"


@attrs.define(eq=False)
class Tail:
    """The last lines of a log that comes in pieces."""

    _lines: deque[str] = attrs.field(factory=lambda: deque(maxlen=TAIL_LINES), init=False)
    # The line that has no end yet. Bounded: what is beyond MAX_LINE would be cut anyway.
    _open: str = attrs.field(default="", init=False)

    def add(self, text: str) -> None:
        """The next piece; lines may be cut anywhere."""
        *complete, rest = (self._open + text).split("\n")
        self._lines.extend(map(clean_line, complete[-TAIL_LINES:]))
        self._open = rest[-4 * MAX_LINE :]

    @property
    def lines(self) -> tuple[str, ...]:
        """At most TAIL_LINES, without blank ones at the end."""
        lines = [*self._lines, *([clean_line(self._open)] if self._open else [])]
        while lines and not lines[-1].strip():
            lines.pop()
        return tuple(lines[-TAIL_LINES:])


def why_failed(error: str | None) -> str:
    """The reason out of a failed build's message, on one line; "" without one."""
    return failure_reason(clean(error or ""))


def seconds(span: float) -> str:
    """`0.3s`, `12s`, `2m05s`, `1h02m`."""
    if span < 10:
        return f"{max(0.0, span):.1f}s"
    minutes, rest = divmod(round(span), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 build`, `2 builds`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
