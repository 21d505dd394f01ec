"""One child and the pool that lends it, with a real Nix: errors, limits, deaths, isolation."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
import trio

from gradient.nix.evaluator.child import MAX_REQUEST, Child
from gradient.nix.evaluator.errors import ChildDied, EvaluationFailed, EvaluatorUnusable
from gradient.nix.evaluator.flake import FlakeUnusable, fetch_tree, open_flake
from gradient.nix.evaluator.messages import headline
from gradient.nix.evaluator.pool import EvaluatorPool
from gradient.nix.evaluator.settings import EvaluatorSettings, Role

pytestmark = pytest.mark.nix

NIX = os.environ.get("GRADIENT_TEST_NIX") or shutil.which("nix") or "nix"
# Evaluates for ever without using memory.
ENDLESS = "builtins.foldl' (a: b: a) 0 (builtins.genList (x: builtins.foldl' (a: b: a) 0 big) 100000000)"
SPIN = "(let big = builtins.genList (x: x) 10000; in builtins.foldl' (a: x: builtins.foldl' (b: y: b) a big) 0 (builtins.genList (x: x) 10000000))"


def nix(*arguments: str) -> str:
    command = [NIX, "--extra-experimental-features", "nix-command flakes", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def store_flake(folder: Path, text: str, **files: str) -> str:
    """The locked URL of a flake in the store."""
    folder.mkdir(parents=True)
    for name, content in ({"flake.nix": text} | files).items():
        (folder / name).write_text(content)
    path = nix("store", "add-path", "--name", "source", "--option", "substitute", "false", str(folder))
    return f"path:{path}?narHash={quote(nix('hash', 'path', path), safe='')}"


@pytest.fixture
async def pool(tmp_path: Path, nursery: trio.Nursery) -> EvaluatorPool:
    pool = EvaluatorPool(EvaluatorSettings(Path(NIX), tmp_path / "home"), size=2)
    await nursery.start(pool.run)
    return pool
