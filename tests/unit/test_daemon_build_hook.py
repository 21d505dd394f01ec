"""The declining build hook as a program; that Nix takes it is tested with real daemons."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gradient.nix.daemon.build_hook import declining_hook
from tests.patience import PATIENCE


def test_it_declines_for_good(tmp_path: Path) -> None:
    file = tmp_path / "hook"
    for _ in range(2):  # a restart writes it again
        assert declining_hook(file) == (("build-hook", str(file)),)
    with subprocess.Popen([file, "3"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as hook:
        assert hook.stderr is not None
        assert hook.stderr.readline() == b"# decline-permanently\n"
        # It is there until Nix hangs up: a question to a hook that is gone is an error in a build's log.
        with pytest.raises(subprocess.TimeoutExpired):
            hook.wait(0.1)
        assert hook.communicate(timeout=PATIENCE) == (None, b"")
    assert hook.returncode == 0


def test_no_setting_for_a_hook_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert declining_hook(tmp_path / "a hook") == ()
    monkeypatch.setattr(os, "access", lambda file, mode: False)  # as on a file system without programs
    assert declining_hook(tmp_path / "hook") == ()
