"""A tree on disk as tree values. Layer: nar, blocking IO: call from a worker thread.

Every name is opened relative to its parent's descriptor and never through a symlink, so a tree that is
changed while it is read can yield an error but not somebody else's files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
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
    if entry.is_symlink():
        return Symlink(os.fsencode(os.readlink(entry.name, dir_fd=directory)))
    if entry.is_dir(follow_symlinks=False):
        return Directory(_entries(entry.name, directory))
    if entry.is_file(follow_symlinks=False):
        return _regular(entry.name, directory)
    raise _unsupported(entry.name)


def _regular(name: str, directory: int | None) -> Regular:
    file, status = _open(name, directory)
    try:
        small = _read_small(file, name, status.st_size) if status.st_size < READ_SIZE else None
    finally:
        os.close(file)
    chunks = _large_chunks(name, directory, status.st_size) if small is None else (small,)
    return Regular(status.st_size, bool(status.st_mode & stat.S_IXUSR), chunks)


def _open(name: str, directory: int | None) -> tuple[int, os.stat_result]:
    file = os.open(name, _FILE, dir_fd=directory)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise _unsupported(name)
    return file, status


def _read_small(file: int, name: str, size: int) -> bytes:
    data = os.read(file, size + 1)  # one byte more shows a file that grew, without a second call
    if len(data) != size:
        raise _changed(name)
    return data


def _large_chunks(name: str, directory: int | None, size: int) -> Iterator[bytes]:
    # Opened again rather than kept open: a generator that is never started would leak the descriptor.
    file, _ = _open(name, directory)
    try:
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
