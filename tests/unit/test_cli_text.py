"""Text from strangers on a terminal."""

from __future__ import annotations

import pytest

from gradient.cli.text import MAX_LINE, TAIL_LINES, Tail, clean, clean_line, count, seconds, why_failed


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("\x9b2Jgone", "gone"),
        ("a\x00b\x07c\x7f", "abc"),
        ("\x1bcreset", "reset"),
        ("tab\tand\nline", "tab\tand\nline"),
        ("\x1b]0;never closed", ""),
    ],
)
def test_no_escape_sequence_reaches_the_terminal(raw: str, shown: str) -> None:
    assert clean(raw) == shown


def test_what_a_carriage_return_overwrote_is_gone() -> None:
    assert clean_line("10%\r50%\r100%\r") == "100%"


def test_a_tail_is_the_last_lines_wherever_the_pieces_are_cut() -> None:
    text = "".join(f"line {number}\n" for number in range(40)) + "no end"
    whole, pieces = Tail(), Tail()
    whole.add(text)
    for at in range(0, len(text), 7):
        pieces.add(text[at : at + 7])
    expected = (*(f"line {number}" for number in range(31, 40)), "no end")
    assert len(expected) == TAIL_LINES
    assert whole.lines == pieces.lines == expected


def test_a_tail_stays_small() -> None:
    tail = Tail()
    for _ in range(100):
        tail.add("x" * 10_000)
    assert len(tail._open) <= 4 * MAX_LINE
    assert tail.lines == ("x" * (MAX_LINE - 1) + "…",)


def test_blank_lines_at_the_end_of_a_log_tell_nothing() -> None:
    tail = Tail()
    tail.add("error: it broke\n\n  \n\n")
    assert tail.lines == ("error: it broke",)


@pytest.mark.parametrize(
    ("span", "text"),
    [(-1, "0.0s"), (0.34, "0.3s"), (12.4, "12s"), (59.7, "1m00s"), (125, "2m05s"), (3720, "1h02m")],
)
def test_seconds(span: float, text: str) -> None:
    assert seconds(span) == text


def test_count() -> None:
    assert (count(1, "build"), count(2, "build")) == ("1 build", "2 builds")


DRV = "/nix/store/gdki7rlmhg64qffqqvyhy8qlmz2skcfa-broken.drv"


NIX_2_8 = f"""builder for '{DRV}' failed with exit code 1;
last 4 log lines:
> compiling
For full logs, run 'nix log {DRV}'."""
NIX_2_34 = f"""Cannot build '{DRV}'.
Reason: builder failed with exit code 1.
Output paths:
  /nix/store/z14vkkqr7flwjl0wzwdn8hvyiifzxna2-broken
Last 4 log lines:
> compiling
For full logs, run:
  nix-store -l {DRV}"""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (NIX_2_8, "exit code 1"),
        (NIX_2_34, "exit code 1"),
        (f"error: builder for '{DRV}' failed with exit code 2", "exit code 2"),
        (f"builder for '{DRV}' has no output", f"builder for '{DRV}' has no output"),
        ("it took\ntoo long", "it took too long"),
        ("", ""),
        (None, ""),
    ],
)
def test_why_a_build_failed_is_one_line_without_its_log(message: str | None, reason: str) -> None:
    assert why_failed(message) == reason
