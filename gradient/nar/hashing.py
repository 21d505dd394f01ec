"""SHA-256 and size of a stream, counted while it passes. Layer: nar, pure; blocking for the hash's time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from gradient.nar.tree import Node
from gradient.nar.writer import dump_path, dump_tree
from gradient.nix.hashes import Hash


class HashingSink:
    """Takes bytes and knows their hash and number."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.size = 0

    def update(self, data: bytes) -> None:
        """Count `data`. Releases the interpreter lock for all but small pieces."""
        self._hash.update(data)
        self.size += len(data)

    def through(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The same chunks, counted as they pass."""
        for chunk in chunks:
            self.update(chunk)
            yield chunk

    def hash(self) -> Hash:
        """The SHA-256 of what came so far."""
        return Hash("sha256", self._hash.digest())


@attrs.frozen
class NarHash:
    """What identifies a tree: the SHA-256 of its NAR, and the NAR's size in bytes."""

    hash: Hash
    size: int


def hash_nar(source: Path | Node) -> NarHash:
    """Hash the NAR of a tree without keeping it. Blocking; raises UnsupportedTree and OSError."""
    sink = HashingSink()
    for chunk in dump(source):
        sink.update(chunk)
    return NarHash(sink.hash(), sink.size)


def dump(source: Path | Node) -> Iterator[bytes]:
    """The NAR of a tree on disk or of tree values."""
    return dump_path(source) if isinstance(source, Path) else dump_tree(source)
