"""nix32, the base 32 of store paths and `sha256:` hashes. Layer: rank 0, pure.

The bytes are one little-endian number, written with its most significant digit first. As an `int` it takes
2 µs either way: a closure walk reads and writes ten thousands.

Source: NixOS/nix, doc/manual/source/protocols/nix32.md.
"""

from __future__ import annotations

import re
from typing import Final

from gradient.nix.errors import NixError, excerpt

# No e, o, t, u: so that hashes do not spell words.
ALPHABET: Final = "0123456789abcdfghijklmnpqrsvwxyz"
# The same set for regular expressions, in square brackets.
CHARACTER_CLASS: Final = "[0-9a-df-np-sv-z]"

# Digits as `int` reads them in base 32, and the characters of two digits at once.
_DIGITS: Final = str.maketrans(ALPHABET, "0123456789abcdefghijklmnopqrstuv")
_PAIRS: Final = [high + low for high in ALPHABET for low in ALPHABET]
_VALID: Final = re.compile(f"{CHARACTER_CLASS}*")


class InvalidNix32(NixError):
    """The text is not nix32 of a whole number of bytes."""


def encoded_length(size: int) -> int:
    """How many characters `size` bytes take."""
    return (size * 8 + 4) // 5


def encode(data: bytes) -> str:
    """nix32 of `data`: 32 characters for 20 bytes, 52 for 32 bytes."""
    number, length = int.from_bytes(data, "little"), encoded_length(len(data))
    pairs = [_PAIRS[(number >> shift) & 1023] for shift in range(5 * (length - length % 2), -1, -10)]
    return "".join(pairs)[-length:] if length else ""


def decode(text: str) -> bytes:
    """The bytes of nix32 `text`; raises InvalidNix32 for a foreign character, a length that no number
    of bytes has, or bits beyond the last byte."""
    size = len(text) * 5 // 8
    if encoded_length(size) != len(text):
        raise InvalidNix32(
            f"{excerpt(text)} is not nix32: {len(text)} characters are no whole number of bytes"
        )
    if _VALID.fullmatch(text) is None:
        raise InvalidNix32(f"{excerpt(text)} is not nix32: only the characters {ALPHABET} are")
    number = int(text.translate(_DIGITS), 32) if text else 0
    try:
        return number.to_bytes(size, "little")
    except OverflowError:
        raise InvalidNix32(f"{excerpt(text)} is not nix32: it has bits beyond its last byte") from None
