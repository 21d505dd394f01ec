"""Reading what a `nix repl` child says. Layer: rank 1, pure: bytes in, replies out.

A child has one output pipe for its stdout and stderr, so that what it says arrives in the order it was
said. It is a conversation for people: a prompt, an echo of the line, colours (Nix 2.8 colours a pipe
too), traces, warnings. Two kinds of line are ours, known by a token that the evaluated code cannot know:

    "<token> val <JSON>"    the value of the request being answered; absent when it failed
    "<token> end <number>"  the request is answered; everything before it belongs to it

The echo never holds the token, because the child is given it in two halves to join.
"""

from __future__ import annotations

import json
import re
from typing import Final

import attrs

# A set of 100,000 attribute names is 3 MB. More than this is not an answer but a runaway.
MAX_VALUE: Final = 16 * 2**20  # bytes
# What is kept of the diagnostics of one request: a trace's beginning and its end.
MAX_DIAGNOSTICS: Final = 32 * 2**10  # bytes

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PROMPT = (b"nix-repl> ", b"\r<")


class TranscriptError(Exception):
    """The child broke the conversation: it can no longer be understood."""


@attrs.frozen
class Reply:
    """The answer to one request. `value` is JSON text as the child printed it, None when Nix refused."""

    number: int
    printed: bytes | None
    diagnostics: str

    @property
    def value(self) -> object:
        """The decoded value; ValueError when the text is not what `builtins.toJSON` makes."""
        if self.printed is None:
            raise ValueError("a refused request has no value")
        return json.loads(unprint(self.printed))


def unprint(printed: bytes) -> str:
    r"""The string of which this is the inside of Nix's print. Raises ValueError.

    Nix escapes as JSON does, and `$` as well (2.34). NUL never occurs in a Nix string, so it can
    stand for an escaped backslash while `\$` is undone.
    """
    text = printed.decode("utf-8", "replace")
    text = text.replace("\\\\", "\0").replace("\\$", "$").replace("\0", "\\\\")
    string = json.loads(f'"{text}"', strict=False)
    assert isinstance(string, str)
    return string


class Transcript:
    """Feed it what the pipe gives; it returns the replies that are complete."""

    def __init__(self, token: str) -> None:
        self._value_mark = f'"{token} val '.encode()
        self._end_mark = f'"{token} end '.encode()
        self._rest = bytearray()  # an unfinished line
        self._searched = 0  # how much of _rest is known to hold no newline
        self._printed: bytes | None = None
        self._head = bytearray()  # diagnostics, the first half of the limit
        self._tail = bytearray()  # and the last half
        self._omitted = False

    def feed(self, data: bytes) -> list[Reply]:
        """Take in bytes. Raises TranscriptError on a value over MAX_VALUE or a marker that is no number."""
        self._rest += data
        replies = []
        while (end := self._rest.find(b"\n", self._searched)) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            self._searched = 0
            if (reply := self._take(line)) is not None:
                replies.append(reply)
        self._searched = len(self._rest)
        self._bound_rest()
        return replies

    def last_words(self) -> str:
        """What the child said since its last complete reply, unfinished line included."""
        self._note(bytes(self._rest))
        self._rest.clear()
        self._searched = 0
        return self._take_diagnostics()

    def _take(self, line: bytes) -> Reply | None:
        if (at := line.find(self._value_mark)) >= 0:
            self._printed = line[at + len(self._value_mark) : line.rindex(b'"')]
            self._check_value(len(self._printed))
            return None
        if (at := line.find(self._end_mark)) >= 0:
            return self._finish(line[at + len(self._end_mark) : line.rindex(b'"')])
        self._note(line + b"\n")
        return None

    def _finish(self, number: bytes) -> Reply:
        if not number.isdigit():
            raise TranscriptError("the end of an answer without its number")
        reply = Reply(int(number), self._printed, self._take_diagnostics())
        self._printed = None
        return reply

    def _note(self, line: bytes) -> None:
        line = _ANSI.sub(b"", line)
        if line.startswith(_PROMPT):
            return
        room = MAX_DIAGNOSTICS // 2 - len(self._head)
        self._head += line[:room]
        self._tail += line[room:]
        if (excess := len(self._tail) - MAX_DIAGNOSTICS // 2) > 0:
            del self._tail[:excess]
            self._omitted = True

    def _take_diagnostics(self) -> str:
        gap = b"\n[...]\n" if self._omitted else b""
        text = bytes(self._head + gap + self._tail).decode("utf-8", "replace")
        self._head.clear()
        self._tail.clear()
        self._omitted = False
        return text.strip("\n")

    def _check_value(self, size: int) -> None:
        if size > MAX_VALUE:
            raise TranscriptError(f"an answer over {MAX_VALUE // 2**20} MiB")

    def _bound_rest(self) -> None:
        if len(self._rest) <= MAX_DIAGNOSTICS:
            return
        if self._value_mark in self._rest[:MAX_DIAGNOSTICS]:
            self._check_value(len(self._rest))
            return
        # A line without end of the evaluated code: only its last part can still hold a mark of ours.
        keep = len(self._value_mark)
        self._note(bytes(self._rest[:-keep]))
        del self._rest[:-keep]
        self._searched = len(self._rest)
