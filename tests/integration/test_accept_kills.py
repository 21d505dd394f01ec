"""What is lost when a process is stopped or killed in the middle of things: time, and nothing else.

Builders of these flakes append their names to a file outside the store when they are done, which no
database and no log can get wrong.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import attrs
import psycopg
import pytest

from gradient.model import AttemptOutcome, BuildStatus, EvaluationStatus
from tests.integration.accept_support import Ended, Home, Program, eventually, fetch, free_port
from tests.integration.evaluator_support import ENDLESS
from tests.patience import PATIENCE

pytestmark = pytest.mark.nix

SLEEP = shutil.which("sleep")


@attrs.frozen
class Marks:
    """Files by which builders and tests talk."""

    place: Home

    @property
    def done(self) -> Path:
        """A line for each builder that has got to its end."""
        return self.place.shared / "done"

    @property
    def go(self) -> Path:
        """Made by the test: builders that wait for it go on."""
        return self.place.shared / "go"

    def counts(self) -> Counter[str]:
        return Counter(self.done.read_text().split())

    def runs(self, name: str) -> bool:
        """Whether the builder of that package runs, so that what it needs is finished."""
        return any(f"echo {name} >>" in command for command in self.place.builders().values())

    def builds(self, amount: int, seconds: float = 0.3, *, waiting: str = "") -> str:
        """`amount` packages in a row, each needing the one before, that take `seconds`; `waiting`: the name
        of one that is not done before `go` is there."""

        def package(number: int) -> str:
            name = f"step{number}"
            wait = f"while [ ! -e {self.go} ]; do {SLEEP} 0.05; done;" if name == waiting else ""
            before = f"before = step{number - 1};" if number else ""
            script = f"{SLEEP} {seconds}; {wait} echo {name} >> {self.done}; echo {name} > $out"
            return f"{name} = build \"{name}\" {{ {before} }} ''{script}'';"

        return "\n".join(package(number) for number in range(amount))


@pytest.fixture
def marks(place: Home) -> Marks:
    marks = Marks(place)
    # Each builder is another user.
    marks.done.touch()
    marks.done.chmod(0o666)
    return marks


def built_once(place: Home, marks: Marks, amount: int) -> None:
    """Everything was built, and what was built was built once: by the files and by the attempts."""
    assert marks.counts() == Counter(f"step{number}" for number in range(amount))
    attempts = place.query("SELECT derivation FROM build_attempt WHERE outcome = %s", AttemptOutcome.BUILT)
    assert max(Counter(attempts).values()) == 1
    statuses = {status for (status,) in place.query("SELECT status FROM derivation_build")}
    assert statuses <= {BuildStatus.COMPLETED, BuildStatus.SUBSTITUTED}
    assert place.query("SELECT count(*) FROM derivation_build") == [(amount,)]


def building(place: Home) -> bool:
    """Whether some build runs, as the server sees it."""
    return place.query(
        "SELECT EXISTS (SELECT FROM build_attempt WHERE outcome = %s)", AttemptOutcome.RUNNING
    ) == [(True,)]


@attrs.define(eq=False)
class Server:
    """A server at an address that stays, for clients to find it again."""

    place: Home
    listeners: tuple[str, ...] = attrs.field(
        factory=lambda: ("--http", f"127.0.0.1:{free_port()}", "--proto", f"127.0.0.1:{free_port()}")
    )

    def start(self) -> Program:
        return self.place.serve(*self.listeners)


def hold_back(place: Home, attribute: str, go: Path) -> None:
    """Have workers use a `nix` whose evaluators are not asked for this attribute before `go` is there."""
    folder, nix = place.folder / "bin", place.nix.binary
    folder.mkdir()
    (folder / "nix-daemon").symlink_to(nix.parent / "nix-daemon")
    script = f"""#!/bin/sh
        case " $* " in *" repl "*) ;; *) exec {nix} "$@" ;; esac
        while IFS= read -r line; do
          case "$line" in *'"{attribute}"'*) while [ ! -e {go} ]; do {SLEEP} 0.05; done ;; esac
          printf '%s\\n' "$line"
        done | {nix} "$@"
    """
    (folder / "nix").write_text(script)
    (folder / "nix").chmod(0o755)
    place.nix_option = ("--nix", str(folder / "nix"))


def evaluates(place: Home) -> bool:
    """Whether the one evaluation is not over with its attributes."""
    ((status,),) = place.query("SELECT status FROM evaluation")
    return status in (EvaluationStatus.EVALUATING_FLAKE, EvaluationStatus.EVALUATING_DERIVATION)


# --- builds begin while the evaluation goes on -----------------------------------------------------


def test_builds_begin_before_the_evaluation_has_ended(place: Home, marks: Marks) -> None:
    """One evaluator, two attributes: the first is built while the second is evaluated, without end."""
    place.environment = {"GRADIENT_WORKER__EVAL__FORK_WORKERS": "1"}
    flake = place.flake(
        f"""
        {marks.builds(1)}
        zlast = builtins.seq {ENDLESS} (build "last" {{ }} "echo last > $out");
        """
    )
    run = place.start("up", "--once", "--json", str(flake))
    run.until(lambda: marks.counts()["step0"], "the first build")
    run.until(lambda: not building(place), "its report")
    built_once(place, marks, 1)
    assert evaluates(place)
    assert place.query("SELECT name FROM derivation") == [("step0",)]
    assert run.stop().object["status"] == "Aborted"


# --- stopping --------------------------------------------------------------------------------------


def test_a_stopped_worker_leaves_no_builder_and_uses_no_attempt(place: Home, marks: Marks) -> None:
    """SIGTERM in the middle of `sleep 600` with children in the background."""
    flake = place.flake(
        f"""
        long = build "long" {{ }} ''
          if [ -e {marks.go} ]; then echo long >> {marks.done}; echo done > $out; exit; fi
          {SLEEP} 600 & {SLEEP} 600 & ({SLEEP} 600; :) &
          echo all started
          {SLEEP} 600
        '';
        """
    )
    place.serve()
    worker = place.work()
    client = place.start("build", "--json", str(flake))
    # The shell, its four sleeps, and the shell of the one in parentheses.
    client.until(lambda: len(place.builders()) >= 6, "the builder and its children")
    eventually(lambda: building(place), "the build's report")

    ended = worker.stop()
    assert ended.code == 0, ended
    assert place.builders() == {}
    eventually(lambda: not building(place), "the worker's last report")
    assert place.query("SELECT status, attempt FROM derivation_build") == [(BuildStatus.QUEUED, 0)]

    marks.go.touch()
    place.work()
    assert client.wait().code == 0
    assert marks.counts() == Counter(["long"])
    assert place.query("SELECT status, attempt FROM derivation_build") == [(BuildStatus.COMPLETED, 0)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_and_goes_on_later(
    place: Home, marks: Marks, number: signal.Signals
) -> None:
    flake = str(place.flake(marks.builds(3, waiting="step1")))
    run = place.start("up", "--once", "--json", flake)
    run.until(lambda: marks.runs("step1"), "the second build")
    # To the whole group, as a terminal does it.
    os.killpg(run.pid, number)
    ended = run.wait()
    assert ended.code == 130, ended
    assert ended.object["status"] == "Aborted"
    assert place.processes() == {}
    assert "Traceback" not in ended.stderr

    marks.go.touch()
    again = place.start("up", "--once", "--json", "--keep-serving", flake)
    assert again.object()["status"] == "Completed"
    built_once(place, marks, 3)


def test_a_second_interrupt_stops_at_once(place: Home, marks: Marks) -> None:
    flake = str(place.flake(marks.builds(1, waiting="step0")))
    run = place.start("up", "--once", "--json", flake)
    run.until(lambda: marks.runs("step0"), "the build")
    run.send(signal.SIGINT)
    run.send(signal.SIGINT)
    ended = run.wait()
    assert ended.code == 130, ended
    eventually(lambda: not place.processes(), "the end of everything")
    assert "Traceback" not in ended.stderr


# --- killing ---------------------------------------------------------------------------------------


@attrs.frozen
class Scene:
    """A server, a worker and a client in the middle of a flake of `amount` builds."""

    place: Home
    marks: Marks
    address: Server
    server: Program
    worker: Program
    client: Program
    amount: int

    def completes(self) -> Ended:
        """The client's evaluation completes, and nothing finished was built twice."""
        self.marks.go.touch()
        ended = self.client.wait()
        assert ended.code == 0, ended
        assert ended.object["status"] == "Completed"
        built_once(self.place, self.marks, self.amount)
        return ended


@pytest.fixture
def scene(place: Home, marks: Marks) -> Scene:
    """Two builds of five are finished, the third one runs until it may go on."""
    flake = place.flake(marks.builds(5, waiting="step2"))
    address = Server(place)
    server, worker = address.start(), place.work()
    client = place.start("build", "--json", str(flake))
    client.until(lambda: marks.runs("step2"), "the third build")
    eventually(lambda: building(place), "the third build's report")
    return Scene(place, marks, address, server, worker, client, 5)


def kill_database(place: Home) -> bool:
    """SIGKILL to the embedded PostgreSQL; False when it does not run: on its way back from the last time."""
    try:
        pid = int((place.data.postgres / "cluster" / "postmaster.pid").read_text().split()[0])
    except (FileNotFoundError, IndexError):
        return False
    if pid not in place.processes():
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def database_answers(place: Home) -> bool:
    with suppress(psycopg.OperationalError):
        return place.query("SELECT 1") == [(1,)]
    return False


def test_a_server_killed_in_the_middle_of_builds(scene: Scene) -> None:
    scene.server.kill()
    scene.address.start()
    scene.completes()
    assert scene.worker.runs


def test_a_worker_killed_in_the_middle_of_builds(scene: Scene) -> None:
    scene.worker.kill()
    eventually(lambda: not scene.place.builders(), "the end of the builders")
    scene.place.work()
    scene.completes()
    assert scene.place.query("SELECT DISTINCT attempt FROM derivation_build") in ([(0,)], [(0,), (1,)])


def test_a_database_killed_in_the_middle_of_builds(scene: Scene) -> None:
    """The server starts it again and goes on; no client notices more than a delay."""
    assert kill_database(scene.place)
    scene.marks.go.touch()
    scene.completes()
    assert scene.server.runs


def test_connections_to_the_database_that_are_cut(scene: Scene) -> None:
    """As by an administrator, or by a restart of a PostgreSQL that is not ours."""
    scene.place.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    scene.completes()
    assert scene.server.runs


def test_a_server_killed_in_the_middle_of_an_evaluation(place: Home, marks: Marks) -> None:
    """Some builds are finished and some attributes are not evaluated yet."""
    hold_back(place, "zlast", marks.go)
    flake = place.flake(f"{marks.builds(3, waiting='step1')} zlast = step2;")
    address = Server(place)
    server = address.start()
    place.work()
    client = place.start("build", "--json", str(flake))
    client.until(lambda: marks.runs("step1"), "the second build")
    assert evaluates(place)
    server.kill()
    marks.go.touch()
    address.start()
    ended = client.wait()
    assert ended.code == 0, ended
    assert len(ended.object["entry_points"]) == 4
    built_once(place, marks, 3)


def test_a_killed_run_leaves_nothing_and_goes_on_later(place: Home, marks: Marks) -> None:
    """SIGKILL of `gradient up`: its worker and its database go by themselves."""
    flake = str(place.flake(marks.builds(3, waiting="step1")))
    run = place.start("up", "--once", "--json", flake)
    run.until(lambda: marks.runs("step1"), "the second build")
    run.kill()
    eventually(lambda: not place.processes(), "the end of everything")
    marks.go.touch()
    again = place.start("up", "--once", "--json", "--keep-serving", flake)
    assert again.object()["status"] == "Completed"
    built_once(place, marks, 3)


def test_a_daemon_killed_in_the_middle_of_a_build(place: Home, marks: Marks) -> None:
    """The build is tried again after a while, by a daemon that lives."""
    place.environment = {"GRADIENT_BUILD__RETRY_BACKOFF_SECS": "0"}
    flake = str(place.flake(marks.builds(2, waiting="step1")))
    run = place.start("up", "--once", "--json", "--keep-serving", flake)
    run.until(lambda: marks.runs("step1"), "the second build")
    eventually(lambda: building(place), "its report")
    for pid in daemons_that_build(place):
        os.kill(pid, signal.SIGKILL)
    marks.go.touch()
    assert run.object()["status"] == "Completed"
    outcomes = place.query("SELECT outcome, reason FROM build_attempt ORDER BY id")
    assert [outcome for outcome, _ in outcomes] == [1, 3, 1]
    assert marks.counts()["step0"] == 1
    assert place.query("SELECT max(attempt) FROM derivation_build") == [(1,)]


def daemons_that_build(place: Home) -> set[int]:
    """The daemons that have builders for children."""
    daemons = {pid for pid, command in place.processes().items() if "nix-daemon" in command}
    return {parent for pid in place.builders() if (parent := parent_of(pid)) in daemons}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_any_moment(place: Home, marks: Marks, seed: int) -> None:
    """Server, worker and database are killed again and again while 72 derivations are evaluated and built."""
    place.environment = {"GRADIENT_BUILD__RETRY_BACKOFF_SECS": "0", "GRADIENT_BUILD__MAX_ATTEMPTS": "50"}
    chance = random.Random(seed)
    layers, width = 6, 12

    def package(layer: int, index: int) -> str:
        name = f"l{layer}-{index}"
        below = f"below = [ l{layer - 1}-{index} l{layer - 1}-{(index + 1) % width} ];" if layer else ""
        return (
            f"{name} = build \"{name}\" {{ {below} }} ''{SLEEP} 0.1; echo {name} >> {marks.done}; : > $out'';"
        )

    flake = place.flake("\n".join(package(layer, index) for layer in range(layers) for index in range(width)))
    address = Server(place)
    server, worker = address.start(), place.work()
    client = place.start("build", "--json", str(flake))
    client.said("evaluation 1: ")
    for _ in range(8):
        time.sleep(chance.uniform(0.1, 2.5))
        match chance.choice(("server", "worker", "database")):
            case "server":
                server.kill()
                server = address.start()
            case "worker":
                worker.kill()
                worker = place.work()
            case "database":
                kill_database(place)
    ended = client.wait(2 * PATIENCE)
    assert ended.code == 0, (ended, place.said())
    assert worker.runs
    # The last one to be killed may still be on its way back, and the server not know yet that it is gone.
    eventually(lambda: database_answers(place), "a database")
    health = f"{place.data.http_url.read_text().strip()}/health"
    server.until(lambda: fetch(health).status == 200, "a server in good health")

    attempts = Counter(
        place.query("SELECT d.name FROM build_attempt a JOIN derivation d ON d.id = a.derivation")
    )
    assert len(attempts) == layers * width
    # Killed between its last words and its end, a builder is not finished: each of these is an attempt.
    assert set(marks.counts()) == {name for (name,) in attempts}
    assert all(marks.counts()[name] <= amount for (name,), amount in attempts.items())
    built = Counter(
        place.query("SELECT derivation FROM build_attempt WHERE outcome = %s", AttemptOutcome.BUILT)
    )
    assert max(built.values()) == 1
    assert place.query("SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL") == [(0,)]
