"""NARs written back to disk. Layer: nar, blocking IO: call from a worker thread.

Every name is created relative to its parent's descriptor and must not exist before, so neither the NAR
nor somebody who writes to the same folder can lead a write elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gradient.nar.reader import (
    DirectoryBegins,
    DirectoryEnds,
    Event,
    FileBegins,
    FileData,
    SymlinkFound,
    parse,
)

_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The umask takes its part away, as for every program.
_MODES: Final = {False: 0o666, True: 0o777}


def restore(path: Path, chunks: Iterable[bytes], nar_size: int | None = None) -> None:
    """Write the tree of the NAR `chunks` to `path`, which must not exist.

    Raises InvalidNar, FileExistsError and other OSErrors; what was written until then stays, for the
    caller to remove with the folder it was made in."""
    with _Restorer(path) as restorer:
        for event in parse(chunks, nar_size):
            restorer.handle(event)


class _Restorer:
    """Applies events; holds the descriptors of the open directories, and of the open file."""

    def __init__(self, root: Path) -> None:
        self._root = os.fsencode(root)
        # Invariant: from the root directory down to the innermost open one.
        self._directories: list[int] = []
        self._file: int | None = None
        self._left = 0  # bytes that the open file lacks

    def __enter__(self) -> _Restorer:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._directories:
            os.close(descriptor)
        if self._file is not None:
            os.close(self._file)

    def handle(self, event: Event) -> None:
        if isinstance(event, FileData):
            self._write(event.data)
        elif isinstance(event, FileBegins):
            self._create(event)
        elif isinstance(event, SymlinkFound):
            os.symlink(event.target, event.name or self._root, dir_fd=self._parent)
        elif isinstance(event, DirectoryBegins):
            name = event.name or self._root
            os.mkdir(name, 0o777, dir_fd=self._parent)
            self._directories.append(os.open(name, _DIRECTORY, dir_fd=self._parent))
        elif isinstance(event, DirectoryEnds):
            os.close(self._directories.pop())

    @property
    def _parent(self) -> int | None:
        return self._directories[-1] if self._directories else None

    def _create(self, event: FileBegins) -> None:
        mode = _MODES[event.executable]
        self._file = os.open(event.name or self._root, _CREATE, mode, dir_fd=self._parent)
        self._left = event.size
        self._write(b"")

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._left -= len(data)
        if not self._left:
            os.close(self._file)
            self._file = None
