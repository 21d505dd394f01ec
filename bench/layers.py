"""The flake of the product's figures: fresh copies of examples/layers, and Nix asked for the same."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Final
from uuid import uuid4

from bench.product import RUN_LIMIT, BenchFailed

EXAMPLE: Final = Path(__file__).parent.parent / "examples" / "layers"
LAYERS: Final = 10
WIDTH: Final = 50
SYSTEM: Final = f"{platform.machine()}-{platform.system().lower()}"

# The Nix that both sides use; None for the one on PATH, and its daemon's socket if there is one.
GIVEN_NIX: Final = os.environ.get("GRADIENT_BENCH_NIX")
NIX: Final = GIVEN_NIX or "nix"
NIX_OPTIONS: Final = (
    "--extra-experimental-features 'nix-command flakes' --option substitute false --option eval-cache false"
)


def fresh_copy(folder: Path) -> Path:
    """The example below `folder` with a salt that nobody has used: 500 derivations that no store knows."""
    salt = uuid4().hex
    copy = folder / salt
    shutil.copytree(EXAMPLE, copy)
    (copy / "salt").write_text(f"{salt}\n")
    return copy


def in_shell(command: str, **variables: object) -> None:
    """Run a command of the baseline with some variables in its environment. Raises BenchFailed."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    done = subprocess.run(
        ("bash", "-c", command),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=RUN_LIMIT,
        check=False,
    )
    if done.returncode:
        raise BenchFailed(f"{command}\n{done.stderr[-2000:]}")
