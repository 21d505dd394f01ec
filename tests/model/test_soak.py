"""A soak that fails tells at once what led to it, in steps that can be made again, then in fewer; and
whatever ends it, nothing of it stays behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradient.graph.pg import Connection
from tests.conftest import memory_folder
from tests.model import soak
from tests.model.machine import GraphMachine
from tests.model.model import Model
from tests.model.pair import Diverged, Tally
from tests.model.run import make_smaller, run_machine, run_steps
from tests.model.script import steps_in
from tests.model.test_model import ForgetfulMachine
from tests.model.watch import Failure, Watch


class Deaf(Model):
    """Does not hear where a worker has its outputs from."""

    def build_output(self, assignment: int, *, substituted: bool) -> None:
        pass


class DeafMachine(GraphMachine):
    make_model = Deaf


async def test_what_fails_is_told_at_once_and_can_be_run_again(connection: Connection) -> None:
    told: list[Failure] = []
    tally, watch = Tally(), Watch(told.append)
    with pytest.raises(Diverged) as caught:
        await run_machine(connection, examples=50, seed_number=0, base=DeafMachine, tally=tally, watch=watch)
    (first,), examples = told, tally.examples
    assert caught.value is first.error
    smaller = await make_smaller(connection, first, DeafMachine, seconds=math.inf)
    assert tally.examples == examples  # nothing more of the run itself
    assert len(steps_in(smaller.script)) < len(steps_in(first.script))
    for failure in (first, smaller):
        steps = steps_in(failure.script)
        again = await run_steps(connection, steps, base=DeafMachine)
        assert again is not None
        assert str(again.error) == str(failure.error)
        # Nothing is wrong with the graph itself.
        assert await run_steps(connection, steps) is None


async def test_time_ends_the_search_for_fewer_steps(connection: Connection) -> None:
    watch = Watch()
    with pytest.raises(Diverged):
        await run_machine(connection, examples=50, seed_number=0, base=ForgetfulMachine, watch=watch)
    assert watch.failure is not None
    assert await make_smaller(connection, watch.failure, ForgetfulMachine, seconds=0) is watch.failure


class StoppedMachine(GraphMachine):
    """Somebody stops the soak at its first step."""

    def _begin(self, *given: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        super()._begin(*given)


# As `scripts/bench soak` runs it, with another machine.
PROGRAM = """
import sys
from tests.model import soak, test_soak
soak.memory_folder = lambda: sys.argv[1]
sys.exit(soak.main(sys.argv[3:], getattr(test_soak, sys.argv[2]), shrink=2))
"""


@pytest.fixture
def folder() -> Iterator[str]:
    """Where the soak has its database: short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="gradient-soak-", dir=memory_folder()) as folder:
        yield folder


def run_soak(folder: str, machine: type[GraphMachine], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A soak to its end; nothing of it stays."""
    command = [sys.executable, "-c", PROGRAM, folder, machine.__name__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert list(Path(folder).iterdir()) == [], done.stderr
    assert processes_about(folder) == []
    return done


def processes_about(folder: str) -> list[str]:
    """Commands that run now and name the folder."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:  # gone meanwhile
            continue
        if folder in words:
            found.append(words)
    return found


def test_a_soak_that_fails_prints_its_steps(folder: str, tmp_path: Path) -> None:
    done = run_soak(folder, ForgetfulMachine, "--minutes", "1", "--seed", "0")
    assert done.returncode == soak.VIOLATED, done.stderr
    assert json.loads(done.stdout)["violations"] == 1
    first, _, fewer = done.stderr.partition("# the same with fewer steps, for 2 s at most:\n")
    for part in (first, fewer):
        assert "the model says" in part
        assert steps_in(part.splitlines())
    told = tmp_path / "told"
    told.write_text(done.stderr)
    again = run_soak(folder, ForgetfulMachine, "--steps", str(told))
    assert again.returncode == soak.VIOLATED, again.stderr
    assert steps_in(again.stderr.splitlines()) == steps_in(done.stderr.splitlines())
    assert run_soak(folder, GraphMachine, "--steps", str(told)).returncode == 0


def test_a_soak_that_is_stopped_says_how_far_it_came(folder: str) -> None:
    done = run_soak(folder, StoppedMachine, "--minutes", "10")
    assert done.returncode == soak.STOPPED, done.stderr
    result = json.loads(done.stdout)
    assert result["examples"] == 1
    assert result["violations"] == 0


def test_a_script_begins_at_its_beginning() -> None:
    with pytest.raises(ValueError, match="begins with 'begin'"):
        steps_in(["# nothing", 'heal {"pick": 1}'])
