"""The Range header of a request. Layer: web, pure. Source: RFC 9110, section 14."""

from __future__ import annotations

import re
from typing import Final

import attrs

# Digits beyond any size: a longer number is no range.
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class Unsatisfiable(Exception):
    """The range lies outside the object."""


@attrs.frozen
class Span:
    """Bytes from `start` to before `stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many bytes."""
        return self.stop - self.start


def requested_span(header: str | None, size: int) -> Span | None:
    """What part of an object of `size` bytes a Range header asks for; None for all of it.

    A header of another form, several ranges included, is ignored, as the RFC allows. Raises Unsatisfiable.
    """
    match = _RANGE.fullmatch(header.replace(" ", "")) if header else None
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        span = Span(max(0, size - int(last)), size)
    else:
        span = Span(int(first), min(size, int(last) + 1) if last else size)
        if last and int(last) < int(first):
            return None
    if span.size <= 0:
        raise Unsatisfiable
    return span
