"""Deliberate faults, one line each, and whether the tests named for them notice. Run by `scripts/mutate`.

The faults stand in `mutations.toml`. Each is put into a copy of the project, the tests named for it run
there, and the copy is healed again; the project itself is only read. A fault is caught when a test fails: not
when it cannot be imported, and not when no test has run. Before anything else all named tests pass without a
fault.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import attrs

ROOT: Final = Path(__file__).parents[1]
LIST: Final = Path(__file__).with_name("mutations.toml")
# What the tests need of the project.
COPIED: Final = ("gradient", "tests", "pyproject.toml")
# Seconds for all tests without a fault.
HEALTHY_LIMIT: Final = 3600
# Seconds for the tests of one fault, or as long as all have taken without one, where that is longer: a test
# that hangs has noticed it too, a slow machine has not.
LIMIT: Final = 120
# Seconds in which a run that is ended cleans up.
GRACE: Final = 10
# pytest's exit codes.
PASSED: Final = 0
FAILED: Final = 1
# Our own, when a signal has ended it.
STOPPED: Final = 130


@attrs.frozen
class Mutation:
    """A fault: `find`, which is there exactly once, becomes `put`. `covers` is what it is a fault of."""

    what: str
    covers: str
    file: str
    find: str
    put: str
    tests: list[str]

    def apply(self, root: Path) -> None:
        """Put it in. Raises LookupError when the text has moved on."""
        path = root / self.file
        text = path.read_text()
        if (found := text.count(self.find)) != 1:
            raise LookupError(f"{self.what}: {self.file} holds {self.find!r} {found} times, not once")
        path.write_text(text.replace(self.find, self.put))


def read_mutations(path: Path = LIST) -> list[Mutation]:
    """The faults of the list."""
    return [Mutation(**entry) for entry in tomllib.loads(path.read_text())["mutation"]]


@contextmanager
def copy_of_the_project() -> Iterator[Path]:
    """A folder with what the tests need, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="gradient-mutate-") as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, root / name)
        yield root


@attrs.define(eq=False)
class Runs:
    """pytest, in as many threads as call it, until a signal stops all of it.

    Invariant: what stops a run takes it out of `_under_way` first, so that nobody stops it twice: a second
    interrupt would keep pytest from cleaning up.
    """

    stopped: bool = False
    # Seconds for one.
    limit: float = HEALTHY_LIMIT
    _under_way: set[subprocess.Popen[str]] = attrs.field(factory=set)

    def stop(self, *_: object) -> None:
        """A signal handler: no run begins any more, and those under way end, and clean up."""
        self.stopped = True
        for run in tuple(self._under_way):
            self._interrupt(run)

    def _interrupt(self, run: subprocess.Popen[str]) -> None:
        with suppress(KeyError):
            self._under_way.remove(run)
            run.send_signal(signal.SIGINT)

    def tests(self, root: Path, tests: Iterable[str]) -> tuple[int | None, str]:
        """pytest's exit code in `root` (None: it took longer than the limit), and what it said."""
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
        # In a session of its own: an interrupt from the terminal reaches it through us alone.
        with subprocess.Popen(
            [*command, *tests],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as run:
            self._under_way.add(run)
            if self.stopped:
                self._interrupt(run)
            try:
                said, _ = run.communicate(timeout=self.limit)
                return run.returncode, said
            except subprocess.TimeoutExpired:
                self._end(run)
                return None, "the tests hung"
            finally:
                self._under_way.discard(run)

    def _end(self, run: subprocess.Popen[str]) -> None:
        self._interrupt(run)
        try:
            run.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            run.kill()


def verdict(mutation: Mutation, runs: Runs) -> tuple[bool, str]:
    """Whether the tests named for a fault notice it, and in what words."""
    with copy_of_the_project() as root:
        try:
            mutation.apply(root)
        except LookupError as error:
            return False, str(error)
        code, said = runs.tests(root, mutation.tests)
    if code is None:
        return True, "caught: hung"
    if code == FAILED:
        return True, "caught"
    return False, "SURVIVED" if code == PASSED else f"the tests did not run:\n{said[-2000:]}"


def healthy(mutations: Sequence[Mutation], runs: Runs) -> str | None:
    """Nothing when every named test passes without a fault; otherwise what pytest said."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    with copy_of_the_project() as root:
        code, said = runs.tests(root, tests)
    return None if code == PASSED else said[-4000:]


def run(mutations: Sequence[Mutation], jobs: int, runs: Runs) -> int:
    """Try every fault, `jobs` at a time, until stopped; how many were caught."""
    due: queue.SimpleQueue[Mutation] = queue.SimpleQueue()
    for mutation in mutations:
        due.put(mutation)
    caught: list[Mutation] = []

    def work() -> None:
        while not runs.stopped:
            try:
                mutation = due.get_nowait()
            except queue.Empty:
                return
            started = time.monotonic()
            noticed, words = verdict(mutation, runs)
            if runs.stopped:
                return
            if noticed:
                caught.append(mutation)
            print(f"{time.monotonic() - started:5.1f} s  {mutation.what}: {words}", flush=True)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(caught)


def main(arguments: Sequence[str]) -> int:
    """0 when every fault was caught, 2 when none could be tried, 130 when a signal ended it."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only the faults with one of these in their name")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (2)")
    options = parser.parse_args(arguments)
    mutations = [m for m in read_mutations() if not options.words or any(w in m.what for w in options.words)]
    if not mutations:  # pytest without a name would run everything
        print(f"no fault has {' or '.join(options.words)} in its name: {LIST.relative_to(ROOT)} has them all")
        return 2
    runs = Runs()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, runs.stop)
    started = time.monotonic()
    failure = healthy(mutations, runs)
    runs.limit = max(LIMIT, time.monotonic() - started)
    if failure and not runs.stopped:
        print(f"the tests fail without a fault:\n{failure}")
        return 2
    caught = run(mutations, options.jobs, runs)
    print(f"{caught} of {len(mutations)} caught{', then stopped' if runs.stopped else ''}")
    if runs.stopped:
        return STOPPED
    return 0 if caught == len(mutations) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
