"""What errors mean for the user, and the process's own clock."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from gradient.cli.faults import (
    BadEnvironment,
    BadFlake,
    BadUsage,
    Exit,
    Fault,
    Interrupted,
    ServerUnreachable,
    as_fault,
)
from gradient.cli.started import seconds_since_start
from gradient.http.errors import ConnectFailed
from gradient.nix.daemon.errors import NixMissing
from gradient.nix.flake_ref import BadFlakeRef
from gradient.settings import SettingsError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadFlake("x"), BadFlake),
        (SettingsError("x"), BadUsage),
        (BadFlakeRef("x"), BadUsage),
        (ConnectFailed("x"), ServerUnreachable),
        (NixMissing("x"), BadEnvironment),
        (KeyboardInterrupt(), Interrupted),
        (PermissionError(13, "Permission denied", "/x"), BadEnvironment),
        (ExceptionGroup("g", [ExceptionGroup("h", [NixMissing("x")])]), BadEnvironment),
    ],
)
def test_errors_that_are_expected(error: BaseException, kind: type[Fault]) -> None:
    assert type(as_fault(error)) is kind


def test_why_a_server_cannot_start() -> None:
    from gradient import serve  # noqa: F401  # what a process with a server has loaded
    from gradient.graph.pg_errors import DatabaseDown, DatabaseInUse
    from gradient.server_files import DataTooNew
    from gradient.web.errors import PortInUse

    for error in (DatabaseDown("x"), DatabaseInUse("x"), DataTooNew("x"), PortInUse("x")):
        fault = as_fault(ExceptionGroup("server", [error]))
        assert fault is not None
        assert fault.exit is Exit.ENVIRONMENT


@pytest.mark.parametrize(
    "error", [TypeError("x"), AssertionError(), ExceptionGroup("g", [NixMissing("x"), KeyError("bug")])]
)
def test_a_programming_error_is_not_explained_away(error: BaseException) -> None:
    assert as_fault(error) is None


def test_seconds_count_from_the_start_of_the_process() -> None:
    script = "import time; time.sleep(0.2); from gradient.cli.started import *; print(seconds_since_start())"
    before = time.monotonic()
    said = float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    assert 0.2 <= said <= time.monotonic() - before + 0.02  # the kernel's ticks
    assert seconds_since_start() > said


def test_without_proc_they_count_from_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradient.cli.started.Path", lambda _: (_ for _ in ()).throw(OSError()))
    assert 0 < seconds_since_start() < time.monotonic()
