"""Reading a child's conversation: whatever is said between the marks, in whatever pieces it arrives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.nix.evaluator.transcript import (
    MAX_DIAGNOSTICS,
    MAX_VALUE,
    Reply,
    Transcript,
    TranscriptError,
    unprint,
)

TOKEN = "0123456789abcdef"


def nix_print(text: str) -> str:
    """How `nix repl` prints a string, without its quotes (2.34 also escapes `${`)."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("${", "\\${")
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def value_line(value: object, *, colour: bool = True) -> bytes:
    text = f'"{TOKEN} val {nix_print(json.dumps(value, ensure_ascii=False))}"'
    return (f"\x1b[35;1m{text}\x1b[0m\n\n" if colour else f"{text}\n\n").encode()


def end_line(number: int) -> bytes:
    return f'nix-repl> gradientEnd {number}\n\x1b[35;1m"{TOKEN} end {number}"\x1b[0m\n\n'.encode()


def read(data: bytes, size: int = 10**9) -> list[Reply]:
    transcript = Transcript(TOKEN)
    return [reply for at in range(0, len(data), size) for reply in transcript.feed(data[at : at + size])]


CONVERSATION = (
    b"Welcome to Nix 2.8.0. Type :? for help.\n\nnix-repl> x\n"
    b"trace: one\nwarning: two\n"
    + value_line({"a": 'say "${b}" \\ \n é \x1b'})
    + end_line(1)
    + b"nix-repl> y\n\x1b[31;1merror:\x1b[0m boo\n\n       at here\n\n"
    + end_line(2)
)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10**6])
def test_replies_in_any_pieces(size: int) -> None:
    first, second = read(CONVERSATION, size)
    assert first.value == {"a": 'say "${b}" \\ \n é \x1b'}
    assert first.diagnostics.endswith("trace: one\nwarning: two")
    assert (second.number, second.printed, second.diagnostics) == (2, None, "error: boo\n\n       at here")


def test_a_value_without_colours_and_after_an_unfinished_line() -> None:
    data = b"cloning...\r 50%\r" + value_line([1], colour=False) + end_line(1)
    assert read(data)[0].value == [1]


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_string_comes_back(text: str) -> None:
    assert unprint(nix_print(text).encode()) == text


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    assert unprint(b"a\xffb") == "a\ufffdb"


def test_long_diagnostics_keep_their_beginning_and_their_end() -> None:
    noise = b"trace: first\n" + b"trace: filler\n" * MAX_DIAGNOSTICS + b"error: last\n"
    (reply,) = read(noise + end_line(1), 4096)
    assert reply.diagnostics.startswith("trace: first")
    assert reply.diagnostics.endswith("error: last")
    assert "[...]" in reply.diagnostics
    assert len(reply.diagnostics) < MAX_DIAGNOSTICS + 100


def test_an_endless_line_is_not_kept() -> None:
    transcript = Transcript(TOKEN)
    for _ in range(100):
        assert transcript.feed(b"x" * MAX_DIAGNOSTICS) == []
    assert len(transcript.last_words()) < 2 * MAX_DIAGNOSTICS


def test_a_value_right_after_an_endless_line() -> None:
    assert read(b"x" * 5 * MAX_DIAGNOSTICS + value_line("v") + end_line(1), 1000)[0].value == "v"


def test_a_large_value_is_read_and_a_larger_one_refused() -> None:
    large = ["x" * 1000] * 2000
    assert read(value_line(large) + end_line(1), 65536)[0].value == large
    with pytest.raises(TranscriptError, match="over 16 MiB"):
        read(value_line("x" * MAX_VALUE), 2**20)


def test_a_mark_with_another_token_is_only_noise() -> None:
    forged = b'trace: "ffffffffffffffff val 1"\n"ffffffffffffffff end 1"\n'
    (reply,) = read(forged + end_line(7))
    assert (reply.number, reply.printed) == (7, None)


def test_an_end_without_a_number_breaks_the_conversation() -> None:
    with pytest.raises(TranscriptError, match="number"):
        read(f'"{TOKEN} end x"\n'.encode())


def test_last_words_are_what_follows_the_last_reply() -> None:
    transcript = Transcript(TOKEN)
    transcript.feed(end_line(1) + b"error: stack overflow\nhalf a li")
    assert transcript.last_words() == "error: stack overflow\nhalf a li"
