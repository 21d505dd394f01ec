"""`scripts/run`: what it installs and when, with stand-ins for apt-get and the virtual environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[2]
# What the script itself needs; there is no `nix` among it.
TOOLS = ("bash", "env", "dirname", "cksum", "cat", "id", "python3", "sh", "touch", "chmod")


@attrs.frozen
class Machine:
    """A PATH of our own."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "bin"

    def install(self, name: str, script: str) -> None:
        program = self.path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        given = {"PATH": str(self.path), "GRADIENT_VENV": str(self.folder / "venv"), "PYTHON": sys.executable}
        return subprocess.run(
            [ROOT / "scripts" / "run", *arguments],
            env={**given, **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def log(self) -> list[str]:
        """What the stand-ins were called with."""
        file = self.folder / "log"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without Nix, its virtual environment installed; the Python in it tells how it was called."""
    machine = Machine(tmp_path)
    machine.path.mkdir()
    for name in TOOLS:
        if name != "python3":
            (machine.path / name).symlink_to(str(shutil.which(name)))
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "python $* flake=$GRADIENT_FLAKE" >>{tmp_path}/log\n')
    python.chmod(0o755)
    lock = (ROOT / "requirements.txt").read_bytes()
    stamp = subprocess.run(["cksum"], input=lock, capture_output=True, check=True).stdout
    (tmp_path / "venv" / ".installed-requirements.txt").write_bytes(stamp)
    return machine


def apt(machine: Machine) -> None:
    """An apt-get that talks on stdout, and installs a `nix`."""
    script = f'echo noise; echo "apt-get $*" >>{machine.folder}/log'
    machine.install("apt-get", f"{script}\ntouch {machine.path}/nix\nchmod +x {machine.path}/nix")
    if os.geteuid() != 0:
        machine.install("sudo", 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"')


def test_nix_is_installed_once_and_quietly(machine: Machine) -> None:
    apt(machine)
    ran = machine.run("--once", "--json")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1
    hello = f"python -m gradient up --once --json flake={ROOT}/examples/hello"
    assert machine.log == [
        "apt-get update -qq",
        "apt-get install -qq -y --no-install-recommends nix-bin nix-setup-systemd",
        hello,
    ]
    machine.run("--once", "--json")
    assert machine.log[3:] == [hello]


@pytest.mark.parametrize("arguments", [("--nix", "/x/nix"), ("--nix=/x/nix",)])
def test_a_nix_that_is_named_is_enough(machine: Machine, arguments: tuple[str, ...]) -> None:
    apt(machine)
    assert machine.run(*arguments).returncode == 0
    assert [line.partition(" ")[0] for line in machine.log] == ["python"]
    machine.run(GRADIENT_WORKER__NIX="/x/nix")
    assert [line.partition(" ")[0] for line in machine.log] == ["python", "python"]


def test_without_apt_it_is_for_the_command_to_say_what_is_missing(machine: Machine) -> None:
    assert machine.run("./flake").returncode == 0
    assert len(machine.log) == 1


def test_what_the_command_says_then(tmp_path: Path) -> None:
    """The real command, on a PATH without Nix."""
    machine = Machine(tmp_path)
    machine.path.mkdir()
    environment = {**os.environ, "PATH": str(machine.path), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "gradient", "up", "--once", "--data-dir", str(tmp_path / "data")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 3
    assert ran.stderr.startswith("gradient up: there is no `nix` on PATH: install Nix 2.8 or newer")
    assert len(ran.stderr.splitlines()) == 1


def test_a_python_that_is_too_old_is_exit_3(machine: Machine) -> None:
    machine.install("old", "exit 1")
    ran = machine.run(PYTHON="old")
    assert ran.returncode == 3
    assert "Python 3.11" in ran.stderr


def test_packages_that_cannot_be_installed_are_exit_3(machine: Machine) -> None:
    (machine.folder / "venv" / ".installed-requirements.txt").unlink()
    python = machine.folder / "venv" / "bin" / "python"
    python.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    ran = machine.run()
    assert ran.returncode == 3
    said = ran.stderr.splitlines()
    assert said[0].startswith("installing the Python packages of requirements.txt")
    assert said[1:] == ["no network"]
