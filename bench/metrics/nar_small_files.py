"""`nar.small_files`: 4,000 files of 0.5 to 8 KiB in 200 folders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from bench.harness import Metric
from bench.nar_trees import against_nix_store

_FOLDERS: Final = 200
_FILES: Final = 20  # in each
_SEED: Final = 1  # the same sizes in every run


def make(tree: Path) -> None:
    chance = random.Random(_SEED)
    for number in range(_FOLDERS):
        folder = tree / f"folder-{number}"
        folder.mkdir()
        for file in range(_FILES):
            (folder / f"file-{file}").write_bytes(chance.randbytes(chance.randint(512, 8192)))


METRIC: Final = Metric("nar.small_files", against_nix_store(make))
