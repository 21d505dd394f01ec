"""The list of deliberate faults fits the code: `scripts/mutate` itself takes minutes, this does not."""

from __future__ import annotations

import inspect
from collections import Counter

from gradient.graph import predicates
from tests.mutate import ROOT, read_mutations

MUTATIONS = read_mutations()
# Whatever moves a counter, a flag, the need, the queue or a lock by the seed's rules.
SPREADING = {
    "became_fetchable",
    "lost_fetchability",
    "ripple_down",
    "ripple_up",
    "add_blocking_deps",
    "seed_blocking_deps",
    "seed_missing_runtime_deps",
    "seed_unwalked_inputs",
    "ripple_missing_runtime_deps",
    "ripple_unwalked_inputs",
    "update_need",
    "settle_need",
    "thaw_wanted",
    "skip_unwanted",
    "promote",
    "unpromote_ungated",
    "lock_shared_builds",
    "graph_transaction",
    "fold_shared_build_deltas",
    "evaluation_shared_build_counts",
    "evaluation_shared_build_moved",
    "evaluation_shared_build_named",
    "cascade_dependency_failed",
    "repair_dependency_failed",
    "claim_assignment",
}


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


def test_every_fault_has_a_name_and_tests_of_its_own() -> None:
    assert [what for what, count in Counter(m.what for m in MUTATIONS).items() if count > 1] == []
    for mutation in MUTATIONS:
        assert mutation.tests, mutation.what
        for test in mutation.tests:
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text()
            assert not function or f"def {function.partition('[')[0]}(" in text, f"{mutation.what}: no {test}"
