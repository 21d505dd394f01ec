"""Range headers."""

from __future__ import annotations

import pytest

from gradient.web.ranges import Span, Unsatisfiable, requested_span


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("", None),
        ("bytes=0-", Span(0, 10)),
        ("bytes=0-0", Span(0, 1)),
        ("bytes=3-5", Span(3, 6)),
        ("bytes= 3-5", Span(3, 6)),
        ("bytes=3-500", Span(3, 10)),
        ("bytes=-4", Span(6, 10)),
        ("bytes=-400", Span(0, 10)),
        # Not ours to answer in part: all of it then.
        ("bytes=-", None),
        ("bytes=5-3", None),
        ("bytes=0-1,4-5", None),
        ("lines=0-1", None),
        ("bytes=a-b", None),
        ("bytes=٣-٤", None),
        ("bytes=0-" + "9" * 30, None),
    ],
)
def test_a_range_of_ten_bytes(header: str | None, expected: Span | None) -> None:
    assert requested_span(header, 10) == expected


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=11-20", "bytes=-0"])
def test_a_range_outside_is_told_so(header: str) -> None:
    with pytest.raises(Unsatisfiable):
        requested_span(header, 10)
