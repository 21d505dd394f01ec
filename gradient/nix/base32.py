"""nix32, the base 32 of store paths and `sha256:` hashes. Layer: rank 0, pure.

The bytes are one little-endian number, written with its most significant digit first. Both ways go
through the standard library's C code on the reversed bytes: a closure walk decodes ten thousands.

Source: NixOS/nix, doc/manual/source/protocols/nix32.md.
"""

from __future__ import annotations

import base64
import re
from typing import Final

from gradient.nix.errors import NixError, excerpt

# No e, o, t, u: so that hashes do not spell words.
ALPHABET: Final = "0123456789abcdfghijklmnpqrsvwxyz"
# The same set for regular expressions, in square brackets.
CHARACTER_CLASS: Final = "[0-9a-df-np-sv-z]"

_RFC4648: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_TO_NIX: Final = bytes.maketrans(_RFC4648, ALPHABET.encode())
_FROM_NIX: Final = bytes.maketrans(ALPHABET.encode(), _RFC4648)
_VALID: Final = re.compile(f"{CHARACTER_CLASS}*")
# RFC 4648 works on groups of 5 bytes and 8 characters; we fill up with leading zeros.
_GROUP_BYTES: Final = 5
_GROUP_CHARACTERS: Final = 8


class InvalidNix32(NixError):
    """The text is not nix32 of a whole number of bytes."""


def encoded_length(size: int) -> int:
    """How many characters `size` bytes take."""
    return (size * 8 + 4) // 5


def encode(data: bytes) -> str:
    """nix32 of `data`: 32 characters for 20 bytes, 52 for 32 bytes."""
    padding = -len(data) % _GROUP_BYTES
    text = base64.b32encode(bytes(padding) + data[::-1]).translate(_TO_NIX)
    return text[len(text) - encoded_length(len(data)) :].decode()


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
    padded = "0" * (-len(text) % _GROUP_CHARACTERS) + text
    data = base64.b32decode(padded.encode().translate(_FROM_NIX))[::-1]
    if any(data[size:]):
        raise InvalidNix32(f"{excerpt(text)} is not nix32: it has bits beyond its last byte")
    return data[:size]
