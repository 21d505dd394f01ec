"""The NAR writer: a tree in, its bytes out. Layer: nar; blocking where the tree is.

Small pieces are joined into large ones, so that hashing, compressing and sending are paid per chunk and
not per name; large file chunks pass through uncopied.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gradient.nar.chunks import Pieces
from gradient.nar.errors import UnsupportedTree
from gradient.nar.files import read_tree
from gradient.nar.format import (
    CLOSE,
    CONTENTS,
    DIRECTORY,
    ENTRY,
    ENTRY_NODE,
    EXECUTABLE,
    MAGIC,
    MAX_DEPTH,
    NODE,
    REGULAR,
    SYMLINK,
    TARGET,
    U64,
    name_fault,
    padding,
    string,
    target_fault,
)
from gradient.nar.tree import Directory, Node, Regular

# From this size on, copying a piece costs more than a chunk of its own.
_UNCOPIED: Final = 2**16  # bytes

_REGULAR: Final = NODE + REGULAR + CONTENTS
_EXECUTABLE: Final = NODE + REGULAR + EXECUTABLE + CONTENTS
_SYMLINK: Final = NODE + SYMLINK + TARGET
_DIRECTORY: Final = NODE + DIRECTORY
# What ends a file, by its length modulo 8: its padding and the closing parenthesis.
_FILE_END: Final = tuple(padding(size) + CLOSE for size in range(8))


def dump_path(path: Path) -> Iterator[bytes]:
    """The NAR of the tree at `path`, in chunks; the same bytes as `nix-store --dump`.

    Blocking: iterate in a worker thread. Closing the iterator closes its descriptors. Raises
    UnsupportedTree and OSError, also in the middle."""
    return dump_tree(read_tree(path))


def dump_tree(root: Node) -> Iterator[bytes]:
    """The NAR of `root`, in chunks of about 256 KiB, or of what larger pieces the tree has; never empty.

    Raises UnsupportedTree for a tree that no NAR can hold, also in the middle."""
    pieces = Pieces()
    yield from _node(root, MAGIC, b"", pieces, 0)
    yield pieces.take()


def _node(node: Node, before: bytes, after: bytes, pieces: Pieces, depth: int) -> Iterator[bytes]:
    """`node` between the bytes `before` and `after`, which share a piece with its own head and end."""
    if depth == MAX_DEPTH:
        raise UnsupportedTree(f"a NAR holds only {MAX_DEPTH} levels, the root included; the tree is deeper")
    if isinstance(node, Regular):
        head = _EXECUTABLE if node.executable else _REGULAR
        pieces.put(before + head + U64.pack(node.size))
        yield from _contents(node, pieces)
        pieces.put(_FILE_END[node.size & 7] + after)
    elif isinstance(node, Directory):
        pieces.put(before + _DIRECTORY)
        yield from _entries(node, pieces, depth + 1)
        pieces.put(CLOSE + after)
    else:
        if fault := target_fault(node.target):
            raise UnsupportedTree(f"a NAR cannot hold {fault}")
        pieces.put(before + _SYMLINK + string(node.target) + CLOSE + after)


def _contents(node: Regular, pieces: Pieces) -> Iterator[bytes]:
    left = node.size
    for chunk in node.chunks:
        left -= len(chunk)
        if left < 0:
            break
        if len(chunk) >= _UNCOPIED:
            if held := pieces.take():
                yield held
            yield chunk
        elif pieces.put(chunk):
            yield pieces.take()
    if left:
        raise UnsupportedTree(f"a file of {node.size} bytes has a content of another size")


def _entries(node: Directory, pieces: Pieces, depth: int) -> Iterator[bytes]:
    previous = b""
    for name, child in node.entries:
        if fault := name_fault(name, previous):
            raise UnsupportedTree(f"a NAR cannot hold {fault}")
        yield from _node(child, ENTRY + string(name) + ENTRY_NODE, CLOSE, pieces, depth)
        previous = name
