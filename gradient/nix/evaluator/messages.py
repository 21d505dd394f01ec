"""Nix's error texts, made fit for people and for decisions. Layer: rank 1, pure.

With `--show-trace` an error is a stack of frames. The outermost are our own requests, whose position
Nix calls «string»: they say nothing about the flake and are taken out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_OURS: Final = "at «string»:"
_FRAME: Final = re.compile(r"\s*… ")
_EXCERPT: Final = re.compile(r"\s*\d*\|")
# Nix says it with the derivation's name inside the first quotes, on every version from 2.8 on.
_IMPORT: Final = re.compile(
    r"cannot build .* during evaluation because the option 'allow-import-from-derivation' is disabled"
)
# Said while others write to the same store, and says nothing about the flake.
_BUSY: Final = re.compile(r"SQLite database '.*' is busy")


def about_the_flake(remarks: str) -> str:
    """The warnings and traces that a flake's author can do something about; the first word "warning" is what
    they are filed under."""
    kept = [line for line in remarks.splitlines() if not _BUSY.search(line)]
    return "\n".join(kept).strip().removeprefix("warning: ")


def tidy(message: str) -> str:
    """`message` without the frames of our own requests and without blank lines at its ends."""
    kept: list[str] = []
    lines = iter(message.splitlines())
    line = next(lines, None)
    while line is not None:
        if line.strip().startswith(_OURS):
            _drop_frame_head(kept)
            line = _after_excerpt(lines)
        else:
            kept.append(line)
            line = next(lines, None)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n")


def headline(message: str) -> str:
    """The one line that says what went wrong: the innermost `error: ...`, else the last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: .", line)]
    return (errors or lines or ["no reason given"])[-1]


def is_import_from_derivation(message: str) -> bool:
    """Whether evaluation stopped because it needs something built that `message` names."""
    return _IMPORT.search(" ".join(message.split())) is not None


def _drop_frame_head(kept: list[str]) -> None:
    """Take back the `… while ...` line above a position of ours, and the blank lines between."""
    end = len(kept)
    while end and not kept[end - 1].strip():
        end -= 1
    if end and _FRAME.match(kept[end - 1]):
        del kept[end - 1 :]


def _after_excerpt(lines: Iterator[str]) -> str | None:
    """The first line below the quoted source."""
    for line in lines:
        if line.strip() and not _EXCERPT.match(line):
            return line
    return None
