"""What this process holds open in a folder: descriptors of others come and go meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_below(folder: Path) -> list[Path]:
    """The files and folders in `folder`, itself included, that are open here."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # such as that of this listing
            found.append(Path(os.readlink(descriptor)))
    return [path for path in found if path.is_relative_to(folder)]
