"""The words of the NAR format and its rules for names. Layer: nar, pure; writer and reader share it.

A NAR is made of strings, each an unsigned 64-bit little-endian length, the bytes, and zeros up to a
multiple of 8. Runs of fixed strings are joined here once: both sides then copy or compare them whole.

Source: NixOS/nix, doc/manual/source/protocols/nix-archive/index.md.
"""

from __future__ import annotations

import re
import struct
from typing import Final

# Levels of nodes, the root's included: what current Nix accepts, and a bound for the stack.
MAX_DEPTH: Final = 64
# NAME_MAX and PATH_MAX - 1 of Linux: nothing longer can be written to a disk.
MAX_NAME: Final = 255  # bytes
MAX_TARGET: Final = 4095  # bytes

_NAME: Final = re.compile(rb"(?!\.\.?\Z)[^/\0]{1,%d}" % MAX_NAME)

U64: Final = struct.Struct("<Q")
PADDING: Final = tuple(bytes(count) for count in (0, 7, 6, 5, 4, 3, 2, 1))  # by length modulo 8


def padding(size: int) -> bytes:
    """The zeros that follow `size` bytes."""
    return PADDING[size & 7]


def string(text: bytes) -> bytes:
    """`text` with its length and padding."""
    return U64.pack(len(text)) + text + padding(len(text))


def _words(*words: bytes) -> bytes:
    return b"".join(map(string, words))


MAGIC: Final = _words(b"nix-archive-1")
NODE: Final = _words(b"(", b"type")
REGULAR: Final = _words(b"regular")
EXECUTABLE: Final = _words(b"executable", b"")
CONTENTS: Final = _words(b"contents")
SYMLINK: Final = _words(b"symlink")
TARGET: Final = _words(b"target")
DIRECTORY: Final = _words(b"directory")
ENTRY: Final = _words(b"entry", b"(", b"name")
ENTRY_NODE: Final = _words(b"node")
CLOSE: Final = _words(b")")


def name_fault(name: bytes, previous: bytes) -> str | None:
    """Why `name` may not follow `previous` in a directory (b"" before the first), or None.

    These rules are also what keeps a hostile NAR from writing outside the folder it is restored to.
    """
    if _NAME.fullmatch(name) is None:
        return f"the name {name[: MAX_NAME + 1]!r}"
    if name <= previous:
        return f"the name {name!r} after {previous!r}; names must be unique and sorted by their bytes"
    return None


def target_fault(target: bytes) -> str | None:
    """Why `target` may not be a symlink's target, or None."""
    if not 0 < len(target) <= MAX_TARGET:
        return f"a symlink target of {len(target)} bytes; 1 to {MAX_TARGET} are possible"
    if b"\0" in target:
        return "a symlink target with a NUL byte"
    return None


def regular_nar_size(size: int, *, executable: bool = False) -> int:
    """How many bytes the NAR of a single file of `size` bytes has."""
    head = len(MAGIC) + len(NODE) + len(REGULAR) + len(CONTENTS) + U64.size + len(CLOSE)
    return head + (len(EXECUTABLE) if executable else 0) + size + len(padding(size))
