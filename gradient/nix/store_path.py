"""Store paths and how Nix computes them. Layer: rank 0, pure.

A `StorePath` is valid by construction. Only the store directory `/nix/store` is known: a cache serves
one store directory, and every hash part depends on it.

Source: NixOS/nix, doc/manual/source/protocols/store-path.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final, Self

import attrs

from gradient.nix import base32
from gradient.nix.errors import NixError, excerpt
from gradient.nix.hashes import Hash

STORE_DIR: Final = "/nix/store"
HASH_PART_LENGTH: Final = 32
# 255 bytes of a file name, without the hash part, its dash, and room for `.lock` and `.drv`.
MAX_NAME_LENGTH: Final = 211

# A name's first dash-separated part is not `.` or `..`: such paths would not survive being joined.
_NAME: Final = rf"(?!\.\.?(?:[^0-9a-zA-Z+._?=]|\Z))[0-9a-zA-Z+._?=-]{{1,{MAX_NAME_LENGTH}}}+"
# For formats that hold many paths: matches exactly the full store paths (`/nix/store/<hash>-<name>`).
PATH_PATTERN: Final = rf"{STORE_DIR}/{base32.CHARACTER_CLASS}{{{HASH_PART_LENGTH}}}-{_NAME}"

_BASE_NAME: Final = re.compile(rf"({base32.CHARACTER_CLASS}{{{HASH_PART_LENGTH}}})-({_NAME})")
_VALID_NAME: Final = re.compile(_NAME)
_TRUNCATED: Final = 20  # bytes of a hash part


class InvalidStorePath(NixError):
    """The text is no store path."""


@attrs.frozen
class StorePath:
    """`/nix/store/<hash_part>-<name>`: 32 nix32 characters and a legal name."""

    hash_part: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a full path; raises InvalidStorePath, also for a path below a store path."""
        directory, _, base = text.rpartition("/")
        if directory != STORE_DIR:
            raise InvalidStorePath(f"{excerpt(text)} is no store path: it is not directly in {STORE_DIR}")
        return cls.from_base(base)

    @classmethod
    def from_base(cls, base: str) -> Self:
        """Read a base name, `<hash_part>-<name>`; raises InvalidStorePath."""
        match = _BASE_NAME.fullmatch(base)
        if match is None:
            raise InvalidStorePath(f"{excerpt(base)} is no store path: {_fault(base)}")
        return cls(match[1], match[2])

    @property
    def base_name(self) -> str:
        """The path without the store directory."""
        return f"{self.hash_part}-{self.name}"

    def path(self) -> str:
        """The full path."""
        return f"{STORE_DIR}/{self.hash_part}-{self.name}"

    def __str__(self) -> str:
        return self.path()


def check_name(name: str) -> str:
    """`name` itself when it may be the name of a store path; raises InvalidStorePath."""
    if _VALID_NAME.fullmatch(name) is None:
        raise InvalidStorePath(f"{excerpt(name)} is no name of a store path: {_name_fault(name)}")
    return name


def make_text_path(name: str, content: Hash, references: Iterable[StorePath] = ()) -> StorePath:
    """The path of a text file (`.drv`, `builtins.toFile`); `content` is the SHA-256 of its bytes."""
    return _make(_with_references("text", references), _sha256(content), name)


def make_source_path(
    nar: Hash, name: str = "source", references: Iterable[StorePath] = (), *, self_reference: bool = False
) -> StorePath:
    """The path of a tree added by its NAR hash (r:sha256), as fetched flakes and `src = ./.` are."""
    kind = _with_references("source", references) + (":self" if self_reference else "")
    return _make(kind, _sha256(nar), name)


def make_fixed_output_path(name: str, content: Hash, *, recursive: bool) -> StorePath:
    """The output path of a fixed-output derivation; `content` is of the NAR when `recursive`, else of the
    file."""
    if recursive and content.algo == "sha256":
        return make_source_path(content, name)
    method = "r:" if recursive else ""
    inner = Hash.of(f"fixed:out:{method}{content.algo}:{content.base16()}:".encode())
    return _make("output:out", inner, name)


def make_output_path(derivation_name: str, output: str, modulo: Hash) -> StorePath:
    """The path of an input-addressed output; `modulo` is the derivation's hash modulo its inputs, and
    `derivation_name` has no `.drv`."""
    return _make(f"output:{output}", modulo, output_name(derivation_name, output))


def output_name(derivation_name: str, output: str) -> str:
    """The name of an output's path: `hello`, `hello-dev`."""
    return derivation_name if output == "out" else f"{derivation_name}-{output}"


def _make(kind: str, inner: Hash, name: str) -> StorePath:
    check_name(name)
    fingerprint = f"{kind}:{inner.algo}:{inner.base16()}:{STORE_DIR}:{name}"
    digest = hashlib.sha256(fingerprint.encode()).digest()
    return StorePath(base32.encode(_fold(digest)), name)


def _fold(digest: bytes) -> bytes:
    """`digest` shortened to a hash part: the bytes beyond it are XORed onto its start."""
    folded = bytearray(digest[:_TRUNCATED])
    for index, byte in enumerate(digest[_TRUNCATED:]):
        folded[index] ^= byte
    return bytes(folded)


def _with_references(kind: str, references: Iterable[StorePath]) -> str:
    return ":".join([kind, *sorted(path.path() for path in references)])


def _sha256(value: Hash) -> Hash:
    if value.algo != "sha256":
        raise InvalidStorePath(f"a store path of this kind is made from a sha256 hash, not {value.algo}")
    return value


def _fault(base: str) -> str:
    hash_part, dash, name = base[:HASH_PART_LENGTH], base[HASH_PART_LENGTH : HASH_PART_LENGTH + 1], base[33:]
    if re.fullmatch(f"{base32.CHARACTER_CLASS}{{{HASH_PART_LENGTH}}}", hash_part) is None or dash != "-":
        return f"it does not begin with {HASH_PART_LENGTH} nix32 characters and a dash"
    return _name_fault(name)


def _name_fault(name: str) -> str:
    if not name:
        return "the name is empty"
    if len(name) > MAX_NAME_LENGTH:
        return f"the name is longer than {MAX_NAME_LENGTH} characters"
    if re.match(r"\.\.?(-|\Z)", name):
        return "the name begins with the part '.' or '..'"
    return "names have only letters, digits and + - . _ ? ="
