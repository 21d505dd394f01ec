"""Flakes and expressions for the evaluator's tests, and the Nix they run on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

from gradient.nix.evaluator.findings import FlakeAddress

NIX = os.environ.get("GRADIENT_TEST_NIX") or shutil.which("nix") or "nix"

# Takes hours and next to no memory.
ENDLESS = (
    "(let l = builtins.genList (x: x) 10000; f = builtins.foldl';"
    " in f (a: x: f (a: y: f (b: z: b) a l) a l) 0 l)"
)
# Allocates and keeps gigabytes in a few seconds.
GREEDY = (
    "(builtins.length (builtins.foldl' (a: x: [ a (toString x) ]) [ ] (builtins.genList (x: x) 100000000)))"
)

# `d NAME` is a derivation that nobody builds.
PRELUDE = """
  d = name: derivation { inherit name; system = "x86_64-linux"; builder = "/bin/sh"; args = [ "-c" "" ]; };
"""


def run_nix(*arguments: str) -> str:
    """What a nix command prints."""
    command = [NIX, "--extra-experimental-features", "nix-command flakes", *arguments]
    command += ["--option", "substitute", "false"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def store_flake(folder: Path, text: str, files: dict[str, str] | None = None, more: str = "") -> FlakeAddress:
    """The locked address of a flake in the store; `text` is its `flake.nix`, `more` the rest of its URL."""
    folder.mkdir(parents=True)
    for name, content in {"flake.nix": text, **(files or {})}.items():
        (folder / name).write_text(content)
    path = run_nix("store", "add-path", "--name", "source", str(folder))
    return FlakeAddress(f"path:{path}?narHash={quote(run_nix('hash', 'path', path), safe='')}{more}")


def outputs_flake(
    folder: Path, outputs: str, files: dict[str, str] | None = None, more: str = ""
) -> FlakeAddress:
    """A flake whose outputs are this Nix expression, with `d` in scope."""
    return store_flake(folder, f"{{ outputs = {{ self }}: let {PRELUDE} in {outputs}; }}", files, more)


def commit(folder: Path) -> str:
    """Make `folder` a git repository with everything in one commit; its revision."""
    git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "test"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    return subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
