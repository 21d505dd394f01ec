"""What the NAR metrics share: hashing a tree as a worker does, against `nix-store --dump | sha256sum`.

Ours runs in this process, as it does in the long-running worker. The trees are warm in the page cache
after the pair that does not count.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bench.harness import Sides, timed
from gradient.nar.hashing import hash_nar


def against_nix_store(make: Callable[[Path], None]) -> Callable[[Path], AbstractContextManager[Sides]]:
    """The `prepare` of a metric whose tree `make` writes into an empty folder."""

    @contextmanager
    def prepare(folder: Path) -> Iterator[Sides]:
        tree = folder / "tree"
        tree.mkdir()
        make(tree)
        command = f"nix-store --dump {shlex.quote(str(tree))} | sha256sum"
        assert hash_nar(tree).hash.base16() == _run(command).split()[0], "the NARs differ"
        yield Sides(
            ours=lambda: timed(lambda: hash_nar(tree)),
            theirs=lambda: timed(lambda: _run(command)),
            baseline=command,
        )

    return prepare


def _run(command: str) -> str:
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
