"""A real Nix for tests: its programs, offline, with the experimental features that we use."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import attrs

# Not ca-derivations: it adds a table to the store's database, for which Nix 2.8 waits until it is alone with
# the store, that is for ever beside a daemon.
FEATURES = "nix-command flakes"


@attrs.frozen
class Nix:
    """A `nix` and its neighbours."""

    binary: Path

    def run(self, program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        options = ["--option", "substitute", "false", "--option", "experimental-features", FEATURES]
        argv = [str(self.binary.parent / program), *options, *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        assert done.returncode == 0 or not check, f"{' '.join(argv)}\n{done.stderr}"
        return done

    def out(self, program: str, *arguments: str) -> str:
        return self.run(program, *arguments).stdout.strip()

    def eval(self, *arguments: str) -> Any:
        return json.loads(self.out("nix", "eval", "--json", *arguments))
