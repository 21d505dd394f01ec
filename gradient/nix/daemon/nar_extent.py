"""Where a NAR ends in a stream that does not say it. Layer: rank 1, pure.

NarFromPath answers with a bare NAR, so its grammar has to be followed to know where the next reply
begins. Nothing is interpreted or kept here: names are checked by whoever unpacks the NAR.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import attrs

from gradient.nix.daemon import stderr
from gradient.nix.daemon.errors import DaemonError, DaemonProtocolError
from gradient.nix.daemon.primitives import Decoder, read_sized_string, read_u64, skip

# Deeper trees are refused by the NAR reader too.
MAX_DEPTH: Final = 64
# A file name has at most 255 bytes, a symlink's target at most PATH_MAX.
_MAX_WORD: Final = 4096  # bytes
# Pieces are joined to about this size before they are handed over.
_CHUNK: Final = 64 << 10  # bytes


def walk_nar() -> Decoder[None]:
    """Ask for exactly the bytes of one NAR, at most 64 KiB at a time. Raises `DaemonError` for an error
    that the daemon sends in its place."""
    yield from _expect("nix-archive-1")
    yield from _walk_node(0)


@attrs.define(eq=False)
class NarChunks(AsyncIterator[bytes]):
    """The bytes of one NAR in chunks of at most 128 KiB, taken from a stream by `take` when asked for."""

    _take: Callable[[int], Awaitable[bytes]]
    _walker: Decoder[None] = attrs.field(factory=walk_nar, init=False)
    # What the walker waits for, None at the end.
    _need: int | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._need = next(self._walker)

    @property
    def is_complete(self) -> bool:
        """Whether the NAR has been read to its end."""
        return self._need is None

    async def __anext__(self) -> bytes:
        chunk = bytearray()
        while self._need is not None and len(chunk) < _CHUNK:
            piece = await self._take(self._need)
            chunk += piece
            try:
                self._need = self._walker.send(piece)
            except StopIteration:
                self._need = None
        if not chunk:
            raise StopAsyncIteration
        return bytes(chunk)


def _walk_node(depth: int) -> Decoder[None]:
    if depth > MAX_DEPTH:
        raise DaemonProtocolError(f"the daemon sent a NAR deeper than {MAX_DEPTH} folders")
    yield from _expect("(")
    yield from _expect("type")
    match (yield from _word()):
        case "regular":
            yield from _walk_file()
        case "symlink":
            yield from _expect("target")
            yield from _word()
            yield from _expect(")")
        case "directory":
            while (yield from _choice("entry", ")")) == "entry":
                yield from _walk_entry(depth)
        case other:
            raise DaemonProtocolError(f"the daemon sent a NAR with the unknown node type {other!r}")


def _walk_file() -> Decoder[None]:
    word = yield from _word()
    if word == "executable":
        yield from _expect("")
        word = yield from _word()
    if word == "contents":
        size = yield from read_u64()
        yield from skip(size + -size % 8)
        word = yield from _word()
    if word != ")":
        raise DaemonProtocolError(f"the daemon sent a NAR with {word!r} inside a file")


def _walk_entry(depth: int) -> Decoder[None]:
    yield from _expect("(")
    yield from _expect("name")
    yield from _word()
    yield from _expect("node")
    yield from _walk_node(depth + 1)
    yield from _expect(")")


def _choice(*words: str) -> Decoder[str]:
    word = yield from _word()
    if word not in words:
        raise DaemonProtocolError(f"the daemon sent a NAR with {word!r} where {' or '.join(words)} belongs")
    return word


def _expect(word: str) -> Decoder[None]:
    yield from _choice(word)


def _word() -> Decoder[str]:
    size = yield from read_u64()
    if size == stderr.ERROR:
        # The daemon found only now that it cannot read the path. No word is that long.
        raise DaemonError((yield from stderr.read_failed()).message)
    return (yield from read_sized_string(size, _MAX_WORD))
