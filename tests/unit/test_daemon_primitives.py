"""The words of the protocol: what is written can be read, whatever the split, and never without bounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from gradient.nix.daemon import path_info, primitives, stderr
from gradient.nix.daemon.errors import DaemonError, DaemonFailure, DaemonGone, DaemonProtocolError, strip_ansi
from gradient.nix.daemon.nar_extent import walk_nar
from gradient.nix.daemon.path_info import PathInfo
from gradient.nix.daemon.primitives import Decoder, string, strings, u64
from gradient.nix.daemon.stream import DaemonStream
from gradient.nix.daemon.transport import Transport
from tests.unit.daemon_support import Replay, error

words = st.text(max_size=40)
numbers = st.integers(0, 2**64 - 1)
infos = st.builds(
    PathInfo,
    path=words,
    nar_hash=words,
    nar_size=numbers,
    references=st.lists(words, max_size=4).map(tuple),
    deriver=words.map(lambda word: word or None),
    signatures=st.lists(words, max_size=3).map(tuple),
    ca=words.map(lambda word: word or None),
    registered=numbers,
    ultimate=st.booleans(),
)


def decode(data: bytes, decoder: Decoder[Any], cuts: tuple[int, ...] = (), *, whole: bool = True) -> Any:
    """Run `decoder` over `data`, arriving cut at `cuts`; every byte must be consumed when `whole`."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})

    async def run() -> Any:
        stream = DaemonStream(Transport(Replay((0, data[a:b]) for a, b in pairwise(edges))))
        value = await stream.read(decoder)
        if whole:
            with pytest.raises(DaemonGone):
                await stream.take(1)
        return value

    return trio.run(run)


@given(infos, st.lists(st.integers(0, 10_000), max_size=8).map(tuple))
def test_a_path_info_survives_any_split(info: PathInfo, cuts: tuple[int, ...]) -> None:
    assert decode(path_info.encode(info), path_info.read_keyed(), cuts) == info


@given(st.dictionaries(words, words, max_size=5), st.lists(st.integers(0, 10_000), max_size=8).map(tuple))
def test_a_map_survives_any_split(items: dict[str, str], cuts: tuple[int, ...]) -> None:
    pairs = tuple(items.items())
    assert decode(primitives.pairs(pairs), primitives.read_pairs(), cuts) == pairs


def test_words_are_padded_to_eight_bytes() -> None:
    assert string("abc") == b"\x03\0\0\0\0\0\0\0abc\0\0\0\0\0"
    assert string("12345678") == b"\x08\0\0\0\0\0\0\x0012345678"
    assert strings(["a", ""]) == u64(2) + string("a") + u64(0)


@pytest.mark.parametrize(
    ("data", "decoder"),
    [
        (u64(2**63), primitives.read_string),
        (u64(primitives.MAX_STRING + 1), primitives.read_string),
        (u64(2**63), primitives.read_strings),
        (u64(2), primitives.read_bool),
        (u64(1) + b"a\0\0\0\0\0\0\1", primitives.read_string),
        (u64(1) + b"\xff\0\0\0\0\0\0\0", primitives.read_string),
        (u64(0x12345678), stderr.read_message),
        (u64(0x52534C54) + u64(1) + u64(101) + u64(2**40), stderr.read_message),
        (
            u64(0x63787470) + string("Error") + u64(0) + string("Error") + string("m") + u64(1),
            stderr.read_message,
        ),
    ],
)
def test_what_is_not_the_protocol_is_refused_before_it_is_read(
    data: bytes, decoder: Callable[[], Decoder[object]]
) -> None:
    # Nothing follows `data`: a decoder that first asked for more would raise DaemonGone.
    with pytest.raises(DaemonProtocolError):
        decode(data, decoder())


@given(st.binary(max_size=200), st.sampled_from(list(stderr._DECODERS)))
def test_garbage_ends_in_our_own_errors(garbage: bytes, code: int) -> None:
    with suppress(DaemonFailure):
        decode(u64(code) + garbage, stderr.read_message(), whole=False)


def test_long_text_is_cut_and_the_next_message_found() -> None:
    long = "x" * (primitives.MAX_TEXT + 100_001)
    data = u64(0x6F6C6D67) + string(long) + u64(0x616C7473)

    def both() -> Decoder[tuple[object, object]]:
        first = yield from stderr.read_message()
        return first, (yield from stderr.read_message())

    text, end = decode(data, both())
    assert isinstance(text, stderr.LogText)
    assert text.text == "x" * primitives.MAX_TEXT + "… (100001 bytes cut)"
    assert end == stderr.Last()


def test_text_that_is_not_utf8_is_shown_all_the_same() -> None:
    assert decode(u64(0x6F6C6D67) + string(b"caf\xe9\n"), stderr.read_message()) == stderr.LogText(
        "caf\ufffd\n"
    )


def test_messages_are_values() -> None:
    started = u64(0x53545254) + u64(7) + u64(3) + u64(105) + string("building x")
    fields = u64(2) + u64(1) + string("/nix/store/x.drv") + u64(0) + u64(1)
    assert decode(started + fields + u64(0), stderr.read_message()) == stderr.ActivityStarted(
        7, 3, 105, "building x", ("/nix/store/x.drv", 1), 0
    )
    assert decode(error("it broke", ["while doing"]), stderr.read_message()) == stderr.Failed("it broke")
    assert decode(stderr.failure("our own"), stderr.read_message()) == stderr.Failed("our own")


def test_the_log_is_text_results_and_activities_that_say_something() -> None:
    line = stderr.log_line
    assert line(stderr.LogText("warning: x\n")) == "warning: x"
    assert line(stderr.ActivityResult(1, 101, ("hello",))) == "hello"
    assert line(stderr.ActivityResult(1, 107, ("hook",))) == "hook"
    assert line(stderr.ActivityResult(1, 101, ())) is None
    assert line(stderr.ActivityResult(1, 105, (1, 2, 3, 4))) is None
    assert line(stderr.ActivityStarted(1, 3, 101, "downloading x", (), 0)) == "downloading x"
    assert line(stderr.ActivityStarted(1, 3, 105, "building x", (), 0)) is None
    assert line(stderr.ActivityStarted(1, 6, 0, "querying info", (), 0)) is None
    assert line(stderr.ActivityStopped(1)) is None


def test_escape_sequences_are_stripped() -> None:
    assert strip_ansi("\x1b[31;1merror:\x1b[0m no\x1b]8;;http://x\x07 link\x1b]8;;\x1b\\") == "error: no link"
    assert str(DaemonError("\x1b[31;1merror:\x1b[0m no \n")) == "error: no"


def nar_word(*texts: str) -> bytes:
    return b"".join(map(string, texts))


def nested(depth: int) -> bytes:
    node = nar_word("(", "type", "regular", ")")
    for _ in range(depth):
        node = (
            nar_word("(", "type", "directory", "entry", "(", "name", "a", "node") + node + nar_word(")", ")")
        )
    return nar_word("nix-archive-1") + node


def test_the_end_of_a_nar_is_found() -> None:
    content = bytes(200_001)
    file = nar_word("(", "type", "regular", "executable", "", "contents") + string(content) + nar_word(")")
    link = nar_word("(", "type", "symlink", "target", "../x", ")")
    entries = [
        nar_word("entry", "(", "name", name, "node") + node + nar_word(")")
        for name, node in (("a", file), ("b", link))
    ]
    tree = nar_word("nix-archive-1", "(", "type", "directory") + b"".join(entries) + nar_word(")")
    decode(tree, walk_nar())
    decode(nested(64), walk_nar())


@pytest.mark.parametrize(
    "nar",
    [
        nested(65),
        nar_word("nix-archive-2"),
        nar_word("nix-archive-1", "(", "type", "device"),
        nar_word("nix-archive-1", "(", "type", "regular", "extra"),
        nar_word("nix-archive-1", "(", "type", "directory", "file"),
        nar_word("nix-archive-1", "(", "type", "symlink", "target") + u64(4097),
    ],
)
def test_what_is_no_nar_is_refused(nar: bytes) -> None:
    with pytest.raises(DaemonProtocolError):
        decode(nar, walk_nar())


def test_an_error_in_place_of_a_nar_is_the_daemons_error() -> None:
    with pytest.raises(DaemonError, match="no such path"):
        decode(nar_word("nix-archive-1") + error("no such path"), walk_nar())
