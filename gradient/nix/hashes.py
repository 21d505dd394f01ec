"""A hash with its algorithm, and every way Nix spells it. Layer: rank 0, pure.

Spellings: SRI `sha256-<base64>`, typed `sha256:<base16 | nix32 | base64>`, and the bare digits of a
hash whose algorithm is known. The length tells the base apart, as it does for Nix.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Final, Literal, Self

import attrs

from gradient.nix import base32
from gradient.nix.errors import NixError, excerpt

Algorithm = Literal["md5", "sha1", "sha256", "sha512"]

# Digest sizes in bytes.
DIGEST_SIZES: Final[dict[Algorithm, int]] = {"md5": 16, "sha1": 20, "sha256": 32, "sha512": 64}


class InvalidHash(NixError):
    """The text is no hash in a spelling of Nix."""


@attrs.frozen
class Hash:
    """`digest` made by `algo`; its length always fits."""

    algo: Algorithm
    digest: bytes

    def __attrs_post_init__(self) -> None:
        if len(self.digest) != DIGEST_SIZES[_algorithm(self.algo)]:
            raise InvalidHash(
                f"a {self.algo} digest has {DIGEST_SIZES[self.algo]} bytes, not {len(self.digest)}"
            )

    @classmethod
    def of(cls, data: bytes, algo: Algorithm = "sha256") -> Self:
        """The hash of `data` itself."""
        return cls(algo, hashlib.new(algo, data, usedforsecurity=False).digest())

    @classmethod
    def parse(cls, text: str, algo: Algorithm | None = None) -> Self:
        """Read any spelling; `algo` says what bare digits are, and must agree with a typed spelling.

        Raises InvalidHash."""
        for separator in ":-":
            name, found, digits = text.partition(separator)
            if found and name in DIGEST_SIZES:
                named = _algorithm(name)
                if algo not in (None, named):
                    raise InvalidHash(f"{excerpt(text)} is a {named} hash where {algo} is needed")
                return cls(named, _digest(digits, named, text, sri=separator == "-"))
        if algo is None:
            raise InvalidHash(f"{excerpt(text)} names no hash algorithm: write sha256-… or sha256:…")
        return cls(algo, _digest(text, _algorithm(algo), text, sri=False))

    def sri(self) -> str:
        """`sha256-<base64>`, as lock files have it."""
        return f"{self.algo}-{base64.b64encode(self.digest).decode()}"

    def nix32(self) -> str:
        """`sha256:<nix32>`, as narinfo files have it."""
        return f"{self.algo}:{base32.encode(self.digest)}"

    def base16(self) -> str:
        """The bare hexadecimal digits, as the daemon protocol and `.drv` files have them."""
        return self.digest.hex()


def _algorithm(name: str) -> Algorithm:
    if name not in DIGEST_SIZES:
        raise InvalidHash(f"{excerpt(name)} is no hash algorithm: {', '.join(DIGEST_SIZES)} are")
    return name


def _digest(digits: str, algo: Algorithm, text: str, *, sri: bool) -> bytes:
    size = DIGEST_SIZES[algo]
    try:
        if not sri and len(digits) == size * 2:
            return _base16(digits)
        if not sri and len(digits) == base32.encoded_length(size):
            return base32.decode(digits)
        if len(digits) == (size + 2) // 3 * 4:
            return base64.b64decode(digits, validate=True)
    except (base32.InvalidNix32, binascii.Error, ValueError) as error:
        raise InvalidHash(f"{excerpt(text)} is no {algo} hash: {error}") from error
    raise InvalidHash(
        f"{excerpt(text)} is no {algo} hash: {len(digits)} characters fit none of its spellings"
    )


def _base16(digits: str) -> bytes:
    data = bytes.fromhex(digits)  # skips blanks between the bytes, which leaves too few of them
    if len(data) * 2 != len(digits):
        raise ValueError("blanks between hexadecimal digits")
    return data
