"""Reading what a `nix repl` child says. Layer: rank 1, pure: bytes in, what they mean out.

A child has one output pipe for its stdout and stderr, so that what it says arrives in the order it was
said. It is a conversation for people: a prompt, an echo of the line, colours (Nix 2.8 colours a pipe
too), traces, warnings. Two kinds of line are ours, known by a token that the evaluated code cannot know:

    trace: <token> val <JSON>   an answer; a request can have several, and then they come one by one
    "<token> end <number>"      the request is over; without its answers, because Nix refused

A third line is Nix's, up to version 2.18 or so: an error that is about the end of some file looks to it as if
our line went on, so it says nothing, prompts with blanks and takes the end of the request for more of it.

The echo never holds the token, because the child is given it in two halves to join. Answers are traced,
not printed: a trace is written as it is, a printed string is escaped, and not alike by all versions.
"""

from __future__ import annotations

import json
import re
from typing import Final, TypeAlias

import attrs

# A set of 100,000 attribute names is 3 MB. More than this is not an answer but a runaway.
MAX_VALUE: Final = 16 * 2**20  # bytes
# What is kept of the diagnostics of one answer: a trace's beginning and its end.
MAX_DIAGNOSTICS: Final = 32 * 2**10  # bytes

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PROMPT = b"nix-repl> "
_CONTINUED = re.compile(rb" {10}e (\d+)$")


class TranscriptError(Exception):
    """The child broke the conversation: it can no longer be understood."""


@attrs.frozen
class Said:
    """An answer: JSON text, and what Nix said since the last one (warnings, traces)."""

    json: bytes
    remarks: str

    def value(self) -> object:
        """The decoded answer; ValueError when it is not JSON. Bytes that are no UTF-8 are replaced."""
        return json.loads(self.json.decode("utf-8", "replace"))


@attrs.frozen
class Ended:
    """A request is over. `diagnostics` is what Nix said since the last answer: its error, if it refused."""

    number: int
    diagnostics: str


@attrs.frozen
class Continued:
    """Nix waits for more of the request: a file that it read ends in the middle."""

    number: int


Event: TypeAlias = Said | Ended | Continued


def without_colour(text: bytes) -> bytes:
    """`text` without the escape sequences of terminals."""
    return _ANSI.sub(b"", text)


class Transcript:
    """Feed it what the pipe gives; it returns what is complete."""

    def __init__(self, token: str) -> None:
        self._value_mark = f"{token} val ".encode()
        self._end_mark = f'"{token} end '.encode()
        self._rest = bytearray()  # an unfinished line
        self._searched = 0  # how much of _rest is known to hold no newline
        self._head = bytearray()  # diagnostics, the first half of the limit
        self._tail = bytearray()  # and the last half
        self._omitted = False

    def feed(self, data: bytes) -> list[Event]:
        """Take in bytes. Raises TranscriptError on an answer over MAX_VALUE or an end without a number."""
        self._rest += data
        heard = []
        while (end := self._rest.find(b"\n", self._searched)) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            self._searched = 0
            if (event := self._take(line)) is not None:
                heard.append(event)
        self._searched = len(self._rest)
        self._bound_rest()
        return heard

    def last_words(self) -> str:
        """What the child said since its last answer or end, unfinished line included."""
        self._note(bytes(self._rest))
        self._rest.clear()
        self._searched = 0
        return self._take_diagnostics()

    def _take(self, line: bytes) -> Event | None:
        # Not only at its beginning: what was said before may not have ended its line.
        if (at := line.find(self._value_mark)) >= 0:
            text = line[at + len(self._value_mark) :]
            self._check_size(text)
            return Said(text, self._take_diagnostics())
        if (at := line.find(self._end_mark)) >= 0:
            number, _, _ = line[at + len(self._end_mark) :].partition(b'"')
            if not number.isdigit():
                raise TranscriptError("the end of an answer without its number")
            return Ended(int(number), self._take_diagnostics())
        if continued := _CONTINUED.search(without_colour(line)):
            return Continued(int(continued[1]))
        self._note(line + b"\n")
        return None

    def _note(self, line: bytes) -> None:
        line = without_colour(line)
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

    def _bound_rest(self) -> None:
        if len(self._rest) <= MAX_DIAGNOSTICS:
            return
        if self._value_mark in self._rest[:MAX_DIAGNOSTICS]:
            self._check_size(self._rest)
            return
        # A line without end of the evaluated code: only its last part can still hold a mark of ours.
        keep = len(self._value_mark)
        self._note(bytes(self._rest[:-keep]))
        del self._rest[:-keep]
        self._searched = len(self._rest)

    def _check_size(self, answer: bytes | bytearray) -> None:
        if len(answer) > MAX_VALUE:
            raise TranscriptError(f"an answer over {MAX_VALUE // 2**20} MiB")
