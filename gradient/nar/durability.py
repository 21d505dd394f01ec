"""Making written files survive a power cut. Layer: nar, blocking IO.

One `syncfs` commits a whole batch at once: on ext4 50 small files take 1 ms against 10 ms of one fsync
each, 500 take 7 ms against 70. It also waits for what others wrote to the same file system, so a few
files are synced by themselves (5 ms against 0.6 ms for one file beside 200 MB of somebody's dirty pages).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

# Up to here, one fsync each is as cheap as syncfs on a quiet disk and much cheaper on a busy one.
_FEW: Final = 4  # files

_LIBC: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def make_durable(root: Path, files: Collection[Path]) -> None:
    """Return when `files`, which are somewhere below `root`, and their names are on the disk.

    Raises OSError when they are not: then treat them as lost."""
    if len(files) > _FEW and _LIBC is not None:
        _sync_file_system(root)
        return
    for path in files:
        _sync(path)
    for directory in _directories(root, files):
        _sync(directory)


def _sync_file_system(root: Path) -> None:
    assert _LIBC is not None
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _LIBC.syncfs(descriptor) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), os.fspath(root))
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _directories(root: Path, files: Iterable[Path]) -> set[Path]:
    """Every directory from those of `files` up to `root`: any of them may be new."""
    return {
        parent for path in files for parent in path.parents if parent == root or parent.is_relative_to(root)
    }
