"""A tree on disk as tree values. Layer: nar, blocking IO: call from a worker thread.

Every name is opened relative to its parent's descriptor and never through a symlink, so a tree that is
changed while it is read can yield an error but not somebody else's files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from gradient.nar.errors import UnsupportedTree
from gradient.nar.tree import Directory, Node, Regular, Symlink

# One read. Smaller files are read whole and closed at once; only one larger file is open at a time.
# 1 MiB keeps the number of system calls irrelevant and still fits the L2 cache for hashing.
READ_SIZE: Final = 2**20  # bytes

# O_NONBLOCK: a FIFO put in the place of a file must not block the open (it is refused after it).
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DIRECTORY: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY


def read_tree(path: Path) -> Node:
    """The tree at `path`, which may itself be a file or a symlink.

    Raises UnsupportedTree for what a NAR cannot hold, here or while the tree is iterated, and OSError
    when something cannot be read."""
    mode = os.lstat(path).st_mode
    text = os.fspath(path)
    if stat.S_ISLNK(mode):
        return Symlink(os.fsencode(os.readlink(text)))
    if stat.S_ISDIR(mode):
        return Directory(_entries(text, None))
    if stat.S_ISREG(mode):
        return _regular(text, None)
    raise _unsupported(text)


def _entries(name: str, parent: int | None) -> Iterator[tuple[bytes, Node]]:
    directory = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        with os.scandir(directory) as found:
            # By bytes, not by code points: the two differ where surrogates stand for foreign bytes.
            entries = sorted((os.fsencode(entry.name), entry) for entry in found)
        for raw_name, entry in entries:
            yield raw_name, _node(entry, directory)
    finally:
        os.close(directory)


def _node(entry: os.DirEntry[str], directory: int) -> Node:
    if entry.is_file(follow_symlinks=False):
        return _regular(entry.name, directory)
    if entry.is_dir(follow_symlinks=False):
        return Directory(_entries(entry.name, directory))
    if entry.is_symlink():
        return Symlink(os.fsencode(os.readlink(entry.name, dir_fd=directory)))
    raise _unsupported(entry.name)


def _regular(name: str, directory: int | None) -> Regular:
    file = os.open(name, _FILE, dir_fd=directory)
    try:
        status = _status(file, name)
        size = status.st_size
        chunks: Iterable[bytes]
        if size < READ_SIZE:
            # One byte more shows a file that grew, without another call.
            chunks = (os.read(file, size + 1),)
            if len(chunks[0]) != size:
                raise _changed(name)
        else:
            chunks = _large_chunks(name, directory, size)
    finally:
        os.close(file)
    return Regular(size, bool(status.st_mode & stat.S_IXUSR), chunks)


def _status(file: int, name: str) -> os.stat_result:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise _unsupported(name)
    return status


def _large_chunks(name: str, directory: int | None, size: int) -> Iterator[bytes]:
    # Opened again rather than kept open: a generator that is never started would leak the descriptor.
    file = os.open(name, _FILE, dir_fd=directory)
    try:
        _status(file, name)
        left = size
        while chunk := os.read(file, READ_SIZE):
            left -= len(chunk)
            if left < 0:
                break
            yield chunk
        if left:
            raise _changed(name)
    finally:
        os.close(file)


def _changed(name: str) -> UnsupportedTree:
    return UnsupportedTree(f"the file {name!r} changed its size while it was read")


def _unsupported(name: str) -> UnsupportedTree:
    return UnsupportedTree(f"{name!r} is no file, directory or symlink: a NAR holds nothing else")
