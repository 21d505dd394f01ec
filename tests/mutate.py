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
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs

ROOT: Final = Path(__file__).parents[1]
LIST: Final = Path(__file__).with_name("mutations.toml")
# What the tests need of the project.
COPIED: Final = ("gradient", "tests", "pyproject.toml")
# Seconds for the tests of one fault: a test that hangs has noticed it too.
LIMIT: Final = 120
# pytest's exit codes.
PASSED: Final = 0
FAILED: Final = 1


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


def run_tests(root: Path, tests: Iterable[str], limit: float = LIMIT) -> tuple[int | None, str]:
    """pytest's exit code in `root` (None: it took longer than `limit` seconds), and what it said."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return None, "the tests hung"
    return done.returncode, done.stdout + done.stderr


def verdict(mutation: Mutation) -> tuple[bool, str]:
    """Whether the tests named for a fault notice it, and in what words."""
    with copy_of_the_project() as root:
        try:
            mutation.apply(root)
        except LookupError as error:
            return False, str(error)
        code, said = run_tests(root, mutation.tests)
    if code is None:
        return True, "caught: hung"
    if code == FAILED:
        return True, "caught"
    return False, "SURVIVED" if code == PASSED else f"the tests did not run:\n{said[-2000:]}"


def healthy(mutations: Sequence[Mutation]) -> str | None:
    """Nothing when every named test passes without a fault; otherwise what pytest said."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    with copy_of_the_project() as root:
        code, said = run_tests(root, tests, LIMIT * 5)
    return None if code == PASSED else said[-4000:]


def run(mutations: Sequence[Mutation], jobs: int) -> int:
    """Try every fault, `jobs` at a time; how many were caught."""
    due: queue.SimpleQueue[Mutation] = queue.SimpleQueue()
    for mutation in mutations:
        due.put(mutation)
    caught: list[Mutation] = []

    def work() -> None:
        while True:
            try:
                mutation = due.get_nowait()
            except queue.Empty:
                return
            started = time.monotonic()
            noticed, words = verdict(mutation)
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
    """0 when every fault was caught, 2 when none could be tried."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only the faults with one of these in their name")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (2)")
    options = parser.parse_args(arguments)
    mutations = [m for m in read_mutations() if not options.words or any(w in m.what for w in options.words)]
    if not mutations:  # pytest without a name would run everything
        print(f"no fault has {' or '.join(options.words)} in its name: {LIST.relative_to(ROOT)} has them all")
        return 2
    if failure := healthy(mutations):
        print(f"the tests fail without a fault:\n{failure}")
        return 2
    caught = run(mutations, options.jobs)
    print(f"{caught} of {len(mutations)} caught")
    return 0 if caught == len(mutations) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
