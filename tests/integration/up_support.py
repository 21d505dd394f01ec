"""`gradient` as a user runs it: processes of our own, ended by their id, that must leave nothing behind."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
KEYS = ["evaluation", "status", "entry_points", "errors", "cache_url", "public_key", "seconds"]
BUILT = {"Completed", "Substituted"}


def system() -> str:
    return f"{os.uname().machine}-{sys.platform}"


@attrs.frozen
class Ran:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The object on the last line of stdout."""
        return json.loads(self.stdout.splitlines()[-1])

    def statuses(self) -> dict[str, str]:
        """Status by the last name of each attribute."""
        return {point["attr"].rpartition(".")[2]: point["status"] for point in self.json["entry_points"]}


@attrs.frozen
class Home:
    """A data directory and the options that every server and worker of a test gets."""

    data: Path
    options: tuple[str, ...]

    def command(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "gradient", *map(str, arguments), "--data-dir", str(self.data)]

    def run(self, *arguments: str | Path, limit: float = PATIENCE) -> Ran:
        """Run a command to its end; afterwards nothing of it may be left."""
        with self.running(*arguments) as running:
            return running.end(limit)

    def up(self, *arguments: str | Path, limit: float = PATIENCE) -> Ran:
        """`gradient up --once --json`, which must have cleaned up when it is over."""
        ran = self.run("up", "--once", "--json", *self.options, *arguments, limit=limit)
        self.check_clean()
        return ran

    def check_clean(self) -> None:
        """No process of ours and no address is left."""
        assert left_over(self.data) == []
        assert not (self.data / "http-url").exists()

    @contextmanager
    def running(self, *arguments: str | Path) -> Iterator[Running]:
        """A command in the background; ended at the end of the block if it still runs."""
        process = subprocess.Popen(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        running = Running(process, self.data)
        try:
            yield running
        finally:
            if process.poll() is None:
                process.terminate()
            running.end()


@attrs.define(eq=False)
class Running:
    """A command that runs in the background."""

    process: subprocess.Popen[str]
    data: Path
    _ran: Ran | None = None

    def line(self, wanted: str) -> str:
        """The first line of stdout or stderr with `wanted` in it; looked for on stderr only."""
        assert self.process.stderr is not None
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if wanted in line:
                return line
        raise AssertionError(f"{wanted!r} was never said, but: {''.join(seen)}")

    def result(self) -> Any:
        """The object that comes on stdout while the process goes on."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, limit: float = PATIENCE) -> Ran:
        """Wait for the end; a hang fails."""
        if self._ran is None:
            try:
                out, err = self.process.communicate(timeout=limit)
            except subprocess.TimeoutExpired as hang:
                self.process.kill()
                said = b"".join([hang.stdout or b"", hang.stderr or b""]).decode()
                raise AssertionError(f"it did not end, and said: {said}") from None
            assert "Traceback" not in err, err
            self._ran = Ran(self.process.returncode, out, err)
        return self._ran


def environment() -> dict[str, str]:
    """Ours, without settings of whoever runs the tests, and with the project on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADIENT_")}
    return {**kept, "PYTHONPATH": str(ROOT)}


def processes(having: str) -> list[int]:
    """The ids of processes with `having` in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if having in command:
                found.append(int(folder.name))
    return found


def parent(pid: int) -> int | None:
    """The process that started `pid`; None when that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(status.partition("PPid:")[2].split()[0])


def left_over(data: Path) -> list[int]:
    """Processes that name the data directory or work in it, as PostgreSQL's do."""
    found = set(processes(str(data)))
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "cwd").readlink().is_relative_to(data):
                    found.add(int(folder.name))
            except OSError:
                continue
    return sorted(found)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def salted_flake(folder: Path, script: str, name: str = "salted") -> Path:
    """A flake with one package that nobody has built before, made by `script` in /bin/sh."""
    folder.mkdir()
    (folder / "flake.nix").write_text(
        f"""{{
  outputs = _: {{
    packages.{system()}.{name} = derivation {{
      name = "{name}";
      system = "{system()}";
      builder = "/bin/sh";
      args = [ "-c" {json.dumps(script)} ];
      salt = "{secrets.token_hex(8)}";
    }};
  }};
}}
"""
    )
    return folder
