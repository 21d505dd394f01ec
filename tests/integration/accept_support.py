"""Gradient as its users run it: real processes, in a folder of the test's own, for tests of acceptance.

A `Home` is one installation: a data directory, flakes, and every process started for it. What a process
of it starts in its turn (PostgreSQL, daemons, evaluators, builders) can be told from everything else on
the machine: its environment, its command line or its working folder names the home.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from email.message import Message
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

import attrs
import psycopg

from gradient.graph.embedded import EmbeddedPostgres
from gradient.nursery.stop_window import STOP_WINDOW
from gradient.settings import DataDir
from tests.integration.nix_support import Nix
from tests.patience import PATIENCE

T = TypeVar("T")

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"

# The commands are told of a Nix that is not the machine's own; builds then go through its daemon.
NAMED: Final = "GRADIENT_TEST_NIX" in os.environ

# Between two looks at something that will come.
POLL: Final = 0.02  # seconds


def eventually(look: Callable[[], T | None], what: str, limit: float = PATIENCE) -> T:
    """What `look` returns, once that is something."""
    deadline = time.monotonic() + limit
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        time.sleep(POLL)
    return found


# Below those that the system gives to whoever does not care: a port from here stays free until somebody
# wants just that one. Runs beside each other begin at different ones.
_PORTS: Final = itertools.islice(itertools.cycle(range(15_000, 32_000)), os.getpid() % 17_000, None)


def free_port() -> int:
    """A port of localhost that nobody listens on, another one each time."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := next(_PORTS)))
            return port


# --- processes ------------------------------------------------------------------------------------


@attrs.frozen(repr=False)
class Ended:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def object(self) -> dict[str, Any]:
        """The object of --json: the last line of stdout."""
        found: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return found

    def __repr__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.stdout}--- stderr\n{self.stderr}"


@attrs.define(eq=False)
class Program:
    """A running `gradient`; its output is in files, so that nobody has to read along."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    began: float

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def wait(self, limit: float = PATIENCE) -> Ended:
        """Its end, within `limit`."""
        eventually(lambda: not self.runs, f"the end of {self.process.args!r}\n{self._said()}", limit)
        seconds = time.monotonic() - self.began
        return Ended(self.process.returncode, self.out.read_text(), self.err.read_text(), seconds)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> Ended:
        """SIGTERM, and its end."""
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL, to this process alone."""
        self.process.kill()
        self.process.wait()

    def said(self, text: str, limit: float = PATIENCE) -> str:
        """Wait until it has said `text` on stderr; everything it said."""
        return self.until(lambda: said if text in (said := self.err.read_text()) else None, repr(text), limit)

    def object(self, limit: float = PATIENCE) -> dict[str, Any]:
        """The object of --json of a program that goes on running."""
        line = self.until(lambda: self.out.read_text().strip(), "a line on stdout", limit)
        found: dict[str, Any] = json.loads(line.splitlines()[-1])
        return found

    def until(self, look: Callable[[], T | None], what: str, limit: float = PATIENCE) -> T:
        """What `look` returns, once that is something, while this program runs."""

        def look_while_it_runs() -> T | None:
            runs = self.runs
            found = look()
            assert found or runs, f"it ended before {what}\n{self._said()}"
            return found

        return eventually(look_while_it_runs, what, limit)

    def _said(self) -> str:
        return f"--- stdout\n{self.out.read_text()}--- stderr\n{self.err.read_text()}"


def processes_naming(text: str) -> dict[int, str]:
    """The command lines of the living processes whose environment, command line or folder names `text`."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):
                facts = Path("/proc", entry)
                command = (facts / "cmdline").read_bytes()
                words = command + (facts / "environ").read_bytes() + os.readlink(facts / "cwd").encode()
                if text.encode() in words and not _is_dead(facts):
                    found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def _is_dead(facts: Path) -> bool:
    """Whether it is a zombie: ended, and not collected by its parent yet."""
    return (facts / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


# --- an installation ------------------------------------------------------------------------------


@attrs.define(eq=False)
class Home:
    """One installation in `folder`. `nix` is the `nix` to test with; named to the commands by `nix_option`
    only when it is not the machine's own."""

    folder: Path
    nix: Nix
    nix_option: tuple[str, ...] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict)
    # Differs between homes and between runs: in every derivation made here, so that nobody has built it.
    salt: str = attrs.field(factory=lambda: uuid4().hex, init=False)
    _programs: list[Program] = attrs.field(factory=list, init=False)

    @property
    def data(self) -> DataDir:
        return DataDir(self.folder / "data")

    @property
    def database_url(self) -> str:
        return EmbeddedPostgres(self.data.postgres).url

    @property
    def shared(self) -> Path:
        """A folder that builders, which run as other users, may write to."""
        return self.folder / "shared"

    def open(self) -> None:
        """Make the folders."""
        self.folder.chmod(0o755)
        self.shared.mkdir()
        self.shared.chmod(0o777)

    # --- commands

    def start(self, command: str, *arguments: str) -> Program:
        """A command of gradient on this installation."""
        options = ["--data-dir", str(self.data.root)]
        options += self.nix_option if command in ("up", "work") else ()
        return self.start_bare(command, *options, *arguments)

    def start_bare(self, *arguments: str) -> Program:
        """Any command line of gradient."""
        number = len(self._programs)
        out, err = self.folder / f"{number}.out", self.folder / f"{number}.err"
        began = time.monotonic()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "gradient", *arguments],
                cwd=self.folder,
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self._programs.append(program := Program(process, out, err, began))
        return program

    def run(self, command: str, *arguments: str, limit: float = PATIENCE) -> Ended:
        """A command of gradient, to its end."""
        return self.start(command, *arguments).wait(limit)

    def run_bare(self, *arguments: str) -> Ended:
        return self.start_bare(*arguments).wait()

    def serve(self, *arguments: str) -> Program:
        """A server that listens."""
        program = self.start("serve", "--json", *(arguments or any_ports()))
        program.object()
        return program

    def work(self, *arguments: str) -> Program:
        """A worker that is connected."""
        program = self.start("work", *arguments)
        program.said("connected")
        return program

    def _environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADIENT_")}
        ours = {
            "PYTHONPATH": str(ROOT),
            # Marks what is started from here; see the module.
            "GRADIENT_TEST_HOME": str(self.folder),
            # The builders are /bin/sh of this machine, and some write to a file of the test.
            "NIX_CONFIG": "sandbox = false\nsubstitute = false",
            "XDG_CONFIG_HOME": str(self.folder / "config"),
        }
        return kept | ours | dict(self.environment)

    # --- its flakes

    def example(self, name: str, *, fresh: bool = True) -> Path:
        """A copy of an example; `fresh`: with derivations that nobody has built."""
        flake = Path(shutil.copytree(EXAMPLES / name, self.folder / "flakes" / name))
        if fresh:
            text = (flake / "flake.nix").read_text()
            builder = 'builder = "/bin/sh";'
            assert builder in text
            (flake / "flake.nix").write_text(text.replace(builder, f'{builder} salt = "{self.salt}";'))
        return flake

    def flake(self, packages: str, name: str = "flake") -> Path:
        """A flake whose packages are `packages`, Nix text in which `build NAME ATTRS SCRIPT` makes one."""
        folder = self.folder / "flakes" / name
        folder.mkdir(parents=True)
        (folder / "flake.nix").write_text(_FLAKE % (self.salt, self.folder, packages))
        return folder

    def git(self, folder: str | Path, *arguments: str) -> str:
        """Run git in a folder below this one."""
        identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        command = ["git", "-C", str(self.folder / folder), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    # --- what it does

    def processes(self) -> dict[int, str]:
        """What runs on behalf of this installation."""
        return processes_naming(str(self.folder))

    def builders(self) -> dict[int, str]:
        """The builders of its flakes that run, and their children."""
        return processes_naming(self.salt)

    def query(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Rows of the database of the server that runs."""
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            return connection.execute(sql.encode(), parameters).fetchall()

    def get(self, path: str) -> Any:
        """An answer of the API of the server that runs."""
        return json.loads(fetch(self.data.http_url.read_text().strip() + path).body)

    def said(self) -> str:
        """What every program said on stderr, for a test that does not know whose fault it is."""
        return "\n".join(
            f"--- {program.process.args!r}\n{program.err.read_text()}" for program in self._programs
        )

    def close(self) -> None:
        """End what runs."""
        for program in self._programs:
            if program.runs:
                program.send(signal.SIGTERM)
        deadline = time.monotonic() + STOP_WINDOW + 5
        while any(program.runs for program in self._programs) and time.monotonic() < deadline:
            time.sleep(POLL)
        for program in self._programs:
            program.kill()
        for pid in self.processes() | self.builders():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


_FLAKE: Final = """
{
  outputs =
    { self }:
    let
      build =
        name: attributes: script:
        derivation (
          {
            inherit name;
            system = "x86_64-linux";
            builder = "/bin/sh";
            salt = "%s";
            home = "%s";
            args = [ "-c" script ];
          }
          // attributes
        );
    in
    {
      packages.x86_64-linux = rec {
        %s
      };
    };
}
"""


def any_ports() -> Sequence[str]:
    """Listener options that let the system choose."""
    return ("--http", "127.0.0.1:0", "--proto", "127.0.0.1:0")


@contextmanager
def home(nix: str, *, named: bool = NAMED) -> Iterator[Home]:
    """An installation that is gone afterwards. `named`: the commands are told which Nix it is."""
    # Not pytest's temporary folder: that is kept, with a database in it.
    with tempfile.TemporaryDirectory(prefix="gradient-accept-", ignore_cleanup_errors=True) as folder:
        option = ("--nix", nix) if named else ()
        found = Home(Path(folder), Nix(Path(nix)), option)
        found.open()
        try:
            yield found
        finally:
            found.close()


# --- HTTP -----------------------------------------------------------------------------------------


@attrs.frozen
class Answer:
    """An answer, whatever its status; names of headers in any case."""

    status: int
    headers: Message
    body: bytes


def fetch(url: str, method: str = "GET", **headers: str) -> Answer:
    """Ask; underscores in the names of `headers` stand for dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, method=method, headers=named)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return Answer(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers, error.read())
