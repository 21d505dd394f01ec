"""Reading a child's conversation: whatever is said between the marks, in whatever pieces it arrives."""

from __future__ import annotations

import json

import pytest

from gradient.nix.evaluator.transcript import (
    MAX_DIAGNOSTICS,
    MAX_VALUE,
    Continued,
    Ended,
    Event,
    Said,
    Transcript,
    TranscriptError,
)

TOKEN = "0123456789abcdef"


def answer(value: object) -> bytes:
    return f"trace: {TOKEN} val {json.dumps(value, ensure_ascii=False)}\n".encode()


def end(number: int, *, colour: bool = True) -> bytes:
    text = f'"{TOKEN} end {number}"'
    printed = f"\x1b[35;1m{text}\x1b[0m" if colour else text
    return f"nix-repl> e {number}\n{printed}\n\n".encode()


def read(data: bytes, size: int = 10**9) -> list[Event]:
    transcript = Transcript(TOKEN)
    return [heard for at in range(0, len(data), size) for heard in transcript.feed(data[at : at + size])]


VALUE = {"a": 'say "${b}" \\ \n é \x1b'}
CONVERSATION = (
    b"nix-repl> x\ntrace: one\nwarning: two\n"
    + answer(VALUE)
    + answer(2)
    + b"null\n\n"
    + end(1)
    + b"nix-repl> y\n\x1b[31;1merror:\x1b[0m boo\n\n       at here\n\n"
    + end(2, colour=False)
)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10**6])
def test_a_conversation_in_any_pieces(size: int) -> None:
    one, two, first_end, second_end = read(CONVERSATION, size)
    assert isinstance(one, Said)
    assert (one.value(), one.remarks) == (VALUE, "trace: one\nwarning: two")
    assert two == Said(b"2", "")
    assert isinstance(first_end, Ended)
    assert first_end.number == 1
    assert second_end == Ended(2, "error: boo\n\n       at here")


def test_a_request_that_nix_waits_for_more_of() -> None:
    said = b"nix-repl> s (x)\n" + answer(1) + b"          e 3\n"
    assert read(said, 7) == [Said(b"1", ""), Continued(3)]
    assert read(b"nix-repl> e 3\n          e three\n          e 3 and more\n") == []


def test_an_answer_after_a_line_that_was_not_ended() -> None:
    assert Said(b"[1]", "") in read(b"cloning...\r 50%\r" + answer([1]))


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    assert Said(b'"a\xffb"', "").value() == "a\ufffdb"


def test_long_diagnostics_keep_their_beginning_and_their_end() -> None:
    noise = b"trace: first\n" + b"trace: filler\n" * MAX_DIAGNOSTICS + b"error: last\n"
    (reply,) = read(noise + end(1), 4096)
    assert isinstance(reply, Ended)
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
    (said,) = read(b"x" * 5 * MAX_DIAGNOSTICS + answer("v"), 1000)
    assert isinstance(said, Said)
    assert said.value() == "v"


def test_a_large_value_is_read_and_a_larger_one_refused() -> None:
    large = ["x" * 1000] * 2000
    (said,) = read(answer(large), 65536)
    assert isinstance(said, Said)
    assert said.value() == large
    with pytest.raises(TranscriptError, match="over 16 MiB"):
        read(answer("x" * MAX_VALUE), 2**20)


def test_a_mark_with_another_token_is_only_noise() -> None:
    forged = b'trace: ffffffffffffffff val 1\n"ffffffffffffffff end 1"\n'
    (ended,) = read(forged + end(7))
    assert isinstance(ended, Ended)
    assert ended.number == 7


def test_an_end_without_a_number_breaks_the_conversation() -> None:
    with pytest.raises(TranscriptError, match="number"):
        read(f'"{TOKEN} end x"\n'.encode())


def test_last_words_are_what_follows_the_last_reply() -> None:
    transcript = Transcript(TOKEN)
    transcript.feed(end(1) + b"error: stack overflow\nhalf a li")
    assert transcript.last_words() == "error: stack overflow\nhalf a li"
