"""The list of deliberate faults fits the code: `scripts/mutate` itself takes minutes, this does not."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gradient.graph import predicates
from gradient.graph.statements import all_statements
from tests.graph.test_structure import demanding_the_lock
from tests.mutate import ROOT, STOPPED, main, read_mutations

MUTATIONS = read_mutations()
# What moves the need, the queue, names, verdicts and locks by the seed's rules; what writes a counter or a
# flag is found below.
SPREADING = {
    "seed_unwalked_inputs",
    "update_need",
    "settle_need",
    "thaw_wanted",
    "skip_unwanted",
    "promote",
    "promote_closure",
    "unpromote_ungated",
    "repair_can_start",
    "settle_skipped",
    "recount_wanted",
    "adopt_pending_closure",
    "lock_shared_builds",
    "graph_transaction",
    "fold_shared_build_deltas",
    "recount_evaluations",
    "eval_blocked",
    "unwalk_derivations",
    "thaw_failed",
    "cascade_dependency_failed",
    "repair_dependency_failed",
    "claim_assignment",
}
MAINTAINED = "unwalked_inputs|missing_runtime_deps|fetchable|blocking_deps|wanted"
WRITES = re.compile(rf"UPDATE derivation\w* \w+\s+SET ([^;]*?,\s+)?({MAINTAINED}) = ", re.DOTALL)


def test_a_word_that_no_fault_has_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no such fault"]) == 2
    assert "no fault has no such fault in its name" in capsys.readouterr().out


def test_every_fault_can_be_made() -> None:
    texts = {file: (ROOT / file).read_text() for file in {m.file for m in MUTATIONS}}
    stale = [m.what for m in MUTATIONS if texts[m.file].count(m.find) != 1 or m.find == m.put]
    assert stale == [], "the code has moved on: move the fault with it"


def test_every_predicate_and_every_spread_has_a_fault() -> None:
    functions = {name for name, _ in inspect.getmembers(predicates, inspect.isfunction)}
    ours = {name for name in functions if getattr(predicates, name).__module__ == predicates.__name__}
    covered = {m.covers for m in MUTATIONS}
    assert ours - {"any_of"} - covered == set()
    assert SPREADING - covered == set()
    assert len(MUTATIONS) >= 25


def test_whatever_writes_a_maintained_column_has_a_fault() -> None:
    covered = {m.covers for m in MUTATIONS}
    writers = {statement.name for statement in all_statements() if WRITES.search(statement.text)}
    assert {"ripple_down", "ripple_up", "write_need", "walk_stubs"} <= writers  # the search finds them
    assert writers - covered == set()
    locking = {name.rpartition(".")[2] for name in demanding_the_lock()}
    assert {name for name in locking if not name.startswith("_")} - covered == set()


def test_every_function_of_the_schema_has_a_fault() -> None:
    schema = "".join(path.read_text() for path in sorted((ROOT / "gradient/graph/schema").glob("*.sql")))
    functions = set(re.findall(r"FUNCTION (\w+)", schema))
    assert {"ripple_missing_runtime_deps", "ripple_unwalked_inputs"} <= functions
    assert functions - {m.covers for m in MUTATIONS} == set()


def test_every_fault_has_a_name_and_tests_of_its_own() -> None:
    assert [what for what, count in Counter(m.what for m in MUTATIONS).items() if count > 1] == []
    for mutation in MUTATIONS:
        assert mutation.tests, mutation.what
        for test in mutation.tests:
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text()
            assert not function or f"def {function.partition('[')[0]}(" in text, f"{mutation.what}: no {test}"


# As `scripts/mutate` runs it, with one fault: what is told of it is not read.
PROGRAM = """
import sys
from tests import mutate
fault = mutate.Mutation("a fault", "nothing", "tests/mutate.py", "Deliberate faults", "Faults", sys.argv[1:])
mutate.read_mutations = lambda: [fault]
sys.exit(mutate.main([]))
"""
# Its runs count themselves; the last stops everything, and is not over before it is interrupted itself.
TEST = """
import os, pathlib, pytest, signal
folder = pathlib.Path(__file__).parent

@pytest.fixture
def cleaned():
    yield
    folder.joinpath("cleaned").touch()

def test(cleaned):
    left = int(folder.joinpath("runs").read_text())
    folder.joinpath("runs").write_text(str(left - 1))
    folder.joinpath("cleaned").unlink(missing_ok=True)
    while left == 1:
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()
"""


@pytest.mark.parametrize("runs", [1, 2], ids=["before the faults", "in the middle of them"])
def test_what_is_stopped_leaves_nothing_behind(tmp_path: Path, runs: int) -> None:
    temporary, test = tmp_path / "temporary", tmp_path / "test_stops.py"
    temporary.mkdir()
    test.write_text(TEST)
    (tmp_path / "runs").write_text(str(runs))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(test)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == STOPPED, done.stderr
    assert done.stdout == "0 of 1 caught, then stopped\n"
    assert list(temporary.iterdir()) == []
    assert (tmp_path / "cleaned").exists()
