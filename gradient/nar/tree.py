"""A file tree as values, whatever it is read from: what the NAR writer takes. Layer: nar, pure.

A tree is read once, in order, and lazily: a directory's entries and a file's chunks may be generators
that hold a file descriptor or a pipe while they run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import attrs


@attrs.frozen
class Regular:
    """A file. `chunks` together have exactly `size` bytes; the writer checks it."""

    size: int
    executable: bool
    chunks: Iterable[bytes]


@attrs.frozen
class Symlink:
    """A symbolic link, its target as it stands."""

    target: bytes


@attrs.frozen
class Directory:
    """A directory. `entries` are names and nodes, names unique and sorted by their bytes; the writer
    checks it."""

    entries: Iterable[tuple[bytes, Node]]


Node: TypeAlias = Regular | Symlink | Directory


def regular_file(data: bytes, *, executable: bool = False) -> Regular:
    """A file with its content in memory."""
    return Regular(len(data), executable, (data,))
