"""`nar.large_files`: 160 MB in 16 random files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from bench.harness import Metric
from bench.nar_trees import against_nix_store

_FILES: Final = 16
_SIZE: Final = 10_000_000  # bytes


def make(tree: Path) -> None:
    for number in range(_FILES):
        (tree / f"file-{number}").write_bytes(os.urandom(_SIZE))


METRIC: Final = Metric("nar.large_files", against_nix_store(make))
