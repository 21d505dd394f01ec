"""The plan gate: no statement of the program reads a large table whole, or costs more in a larger graph.

Each named statement runs on two graphs (`big_graph`), planned for its values and planned for all, and is
undone: in graphs that differ in their history alone and in graphs that differ in what is alive. What it reads
whole, and how many more pages it looks at in the larger graph, is the finding. The bounded set compares
25,000 derivations with 100,000; `scripts/test --full` goes on to 200,000 derivations and 1.2 million edges,
for a few rows and for a batch of hundreds.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

import attrs
import psycopg
import pytest
import trio

import gradient
from gradient.graph.pg import Connection, execute, fetch_all, fetch_value
from gradient.graph.statements import Statement, all_statements
from tests.conftest import Databases
from tests.graph.big_graph import Size, fill
from tests.graph.plans import Catalog, Planned, explain
from tests.graph.statement_inputs import BATCH, FEW, READ, NoValue, fixed, inputs_of, read_inputs

PACKAGE: Final = Path(gradient.__file__).parent
# Four times the history may cost so much more: a level of an index here and there, and tables joined in
# another order. What grows with the table is four times as dear.
GROWTH: Final = 2.5
SLACK: Final = 60  # pages

# Statements that may read a large table whole. Those of the first kind still cost no more than their input.
_NAMES = (
    "its input is the names of an evaluation, thousands: reading the table can be cheaper than as many looks"
)
_CHECK = "the consistency check, on a connection of its own: its input is the table (docs/adr/0019)"
_GARBAGE = "the keep set of the garbage collection: its input is the table"
_BATCH = "its input is a batch: reading the table can be cheaper than hundreds of looks"
_ALIVE = "its input is all that is alive"
WHOLE_FOR_LARGE_INPUT: Final[Mapping[str, str]] = {
    "aborted_builds_of_evaluation": _NAMES,
    "adopt_pending_closure": _NAMES,
    "blocking_kinds": _NAMES,
    "failed_edges": _BATCH,
    "fetchable_flips": _BATCH,
    "page_builds_of_evaluation": _NAMES,
    "page_named_builds": _NAMES,
    "recount_blocking_deps": _BATCH,
    "recount_evaluations": _NAMES,
    "recount_missing_runtime_deps": _BATCH,
    "reset_producers": _BATCH,
    "ripple_down": _BATCH,
    "ripple_up": _BATCH,
    "seed_blocking_deps": _BATCH,
    "unfetchable_closure": _NAMES,
}
TABLE_IS_THE_INPUT: Final[Mapping[str, str]] = {
    "can_start_drift": _CHECK,
    "fetchable_drift": _CHECK,
    "missing_runtime_deps_drift": _CHECK,
    "skipped_drift": _CHECK,
    "unwalked_inputs_drift": _CHECK,
    "wanted_drift": _CHECK,
    "wanted_in_doubt": _CHECK,
    "orphan_derivations": _GARBAGE,
}
# What costs more where more is alive, and reads no more of the history.
ALIVE_IS_THE_INPUT: Final[Mapping[str, str]] = {
    "evaluation_drift": _CHECK,
    "evaluations_to_finish": "its input is what has ended: it looks at that only where an evaluation may end",
    "fold_shared_build_deltas": _ALIVE,
    "lose_walks": _ALIVE,
    "page_active_evaluations": _ALIVE,
    "page_queue_sizes": _ALIVE,
    "pending_orphan_frontier": _CHECK,
    "retry_transient": _ALIVE,
    "unnamed_closures": _CHECK,
}


@attrs.frozen
class Graphs:
    """Databases: `large` has four times the history of `small`; in `busy` four times as much is alive."""

    small: str
    large: str
    busy: str


def graphs(databases: Databases, template: str, revisions: int) -> Iterator[Graphs]:
    with (
        databases.fresh(template) as (_, small),
        databases.fresh(template) as (_, large),
        databases.fresh(template) as (_, busy),
    ):
        trio.run(fill, small, Size(revisions))
        trio.run(fill, large, Size(4 * revisions))
        trio.run(fill, busy, Size(4 * revisions, alive=4))
        yield Graphs(small, large, busy)


@pytest.fixture(scope="module")
def bounded(databases: Databases, template: str) -> Iterator[Graphs]:
    yield from graphs(databases, template, 2)


@pytest.fixture(scope="module")
def full(databases: Databases, template: str) -> Iterator[Graphs]:
    yield from graphs(databases, template, 4)


@attrs.frozen
class Findings:
    """What is wrong with statements, and which ones read a large table whole."""

    wrong: dict[str, str] = attrs.field(factory=dict)
    whole: dict[str, str] = attrs.field(factory=dict)


async def findings(less: str, more: str, statements: tuple[Statement, ...], many: int) -> Findings:
    """Run each statement on both graphs, with sets of so many elements."""
    found = Findings()
    async with await Connection.connect(less) as small, await Connection.connect(more) as large:
        catalog = await Catalog.read(large)
        assert {"derivation", "derivation_dependency", "derivation_build"} <= catalog.large
        inputs = await read_inputs(small, many)
        assert inputs == await read_inputs(large, many)
        for statement in statements:
            try:
                values = inputs_of(statement, inputs)
                for planned in Planned:
                    input_costs = await explain(small, statement, values, planned, by_index=True)
                    plan = await explain(large, statement, values, planned)
                    if whole := plan.whole_tables(catalog):
                        found.whole[statement.name] = f"{planned.name}: {', '.join(sorted(whole))}"
                    if plan.pages > input_costs.pages * GROWTH + SLACK:
                        found.wrong[statement.name] = f"{planned.name}: {input_costs.pages} -> {plan.pages}"
            except (NoValue, psycopg.Error) as error:
                found.wrong[statement.name] = str(error)
    return found


async def faults(graphs: Graphs, statements: tuple[Statement, ...], many: int) -> dict[str, str]:
    """What no exception covers."""
    history = await findings(graphs.small, graphs.large, statements, many)
    alive = await findings(graphs.large, graphs.busy, statements, many)
    excused = {**WHOLE_FOR_LARGE_INPUT, **TABLE_IS_THE_INPUT}
    whole = {name: f"reads whole {what}" for name, what in history.whole.items() if name not in excused}
    grows = {name: what for name, what in history.wrong.items() if name not in TABLE_IS_THE_INPUT}
    excused = {**ALIVE_IS_THE_INPUT, **TABLE_IS_THE_INPUT}
    busy = {name: f"alive: {what}" for name, what in alive.wrong.items() if name not in excused}
    return busy | whole | grows


async def test_no_statement_costs_more_in_a_larger_graph(bounded: Graphs) -> None:
    assert await faults(bounded, all_statements(), FEW) == {}


@pytest.mark.full
@pytest.mark.parametrize("many", [FEW, BATCH])
async def test_no_statement_costs_more_with_200_000_derivations(full: Graphs, many: int) -> None:
    async with await Connection.connect(full.large) as connection:
        assert await fetch_value(connection, "SELECT count(*) FROM derivation") == 200_000
        assert await fetch_value(connection, "SELECT count(*) FROM derivation_dependency") >= 1_200_000
    assert await faults(full, all_statements(), many) == {}


# A set that is looked through for each row, because PostgreSQL believes that it does not fit into memory.
LOOKED_THROUGH: Final = re.compile(r"ANY \([^()]* = \(SubPlan \d+\)")
SETS: Final = ("area", "became", "closure", "derivations", "failed", "flipped", "fresh", "frontier", "ids",
               "lost", "recorded", "roots")  # fmt: skip


async def looked_through(graphs: Graphs, statements: tuple[Statement, ...]) -> list[str]:
    """Statements that go through a set for each row, when they are given 20,000 derivations."""
    found = []
    async with await Connection.connect(graphs.small) as connection:
        inputs = dict(await read_inputs(connection, FEW))
        for name in SETS:
            inputs[name] = list(range(1, 20_001))
        for statement in statements:
            plan = await fetch_all(connection, f"EXPLAIN {statement.text}", inputs_of(statement, inputs))
            if any(LOOKED_THROUGH.search(line) for (line,) in plan):
                found.append(statement.name)
    return found


async def test_no_statement_goes_through_a_set_for_each_row(
    bounded: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Connection.connect(bounded.small) as connection:
        if await fetch_value(connection, "SELECT current_setting('server_version_num')::integer") < 170_000:
            pytest.skip("EXPLAIN does not tell a set from a look before PostgreSQL 17")
    assert await looked_through(bounded, all_statements()) == []
    monkeypatch.setattr("gradient.graph.statements._REGISTRY", {})
    bad = Statement(
        "through_each",
        """
        WITH RECURSIVE up (id) AS (
            SELECT unnest(%(ids)s::bigint[])
          UNION SELECT e.derivation FROM up JOIN derivation_dependency e ON e.dependency = up.id
        )
        SELECT count(*) FROM derivation d WHERE CASE WHEN d.walked THEN d.id IN (SELECT id FROM up) END
        """,
    )
    assert await looked_through(bounded, (bad,)) == ["through_each"]


async def test_the_gate_finds_what_it_is_there_for(bounded: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradient.graph.statements._REGISTRY", {})
    idle = "NOT EXISTS (SELECT FROM dispatched_job q WHERE q.derivation = b.derivation OFFSET 0)"
    bad = (
        Statement("whole", "SELECT count(*) FROM derivation WHERE name = %(name)s"),
        Statement("whole_index", "SELECT count(*) FROM derivation_dependency"),
        Statement("whole_join", "SELECT d.id FROM derivation d, build_job j WHERE d.id + 0 = j.derivation"),
        Statement("grows", "SELECT count(*) FROM derivation_dependency WHERE dependency > %(build)s"),
        Statement("alive", f"SELECT count(*) FROM derivation_build b WHERE status = 1 AND {idle}"),
        Statement("by_foreign_key", "DELETE FROM derivation WHERE id = %(build)s"),
        Statement("unknown", "SELECT %(nobody_knows_this)s::text"),
    )
    good = Statement("fine", "SELECT count(*) FROM derivation WHERE id = ANY(%(ids)s)")
    async with await Connection.connect(bounded.large) as connection:
        await execute(connection, "DROP INDEX entry_point_derivation")  # as if a reference had none
    found = await faults(bounded, (*bad, good), FEW)
    assert set(found) == {statement.name for statement in bad}
    assert "nobody_knows_this" in found["unknown"]


def test_every_exception_is_of_a_statement_there_is() -> None:
    exceptions = {*WHOLE_FOR_LARGE_INPUT, *TABLE_IS_THE_INPUT, *ALIVE_IS_THE_INPUT}
    assert exceptions - {statement.name for statement in all_statements()} == set()


def test_every_parameter_has_a_value() -> None:
    """Here without a database: a new statement is in the gate as soon as this passes."""
    known = {**fixed(FEW), **dict.fromkeys(READ)}
    for statement in all_statements():
        inputs_of(statement, known)


# SQL that has no name, and why the gate need not see it.
NAMELESS: Final[Mapping[str, str]] = {
    "graph/embedded.py": "makes the database, which is empty then",
    "graph/migrate.py": "migrations, each of them once",
    "web/snapshot.py": "says how a transaction reads, and reads nothing",
}
RUNNING: Final = {"execute", "executemany", "fetch_all", "fetch_one", "fetch_value", "fetch_as"}


def test_whatever_the_program_runs_is_a_named_statement() -> None:
    """So the gate misses nothing: who runs SQL runs a Statement, and makes it in `gradient.graph`, all of
    which `all_statements` looks through."""
    constants = {
        name
        for module in graph_modules()
        for name, value in vars(module).items()
        if isinstance(value, Statement)
    }
    nameless, makers = set(), set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            called, module = ast.unparse(call.func).rpartition(".")[2], str(path.relative_to(PACKAGE))
            if called == "Statement":
                makers.add(module)
            # What is called `statement` is handed on.
            given = set(map(ast.unparse, call.args))
            if called in RUNNING and not given & {*constants, "statement", "_text(statement)"}:
                nameless.add(module)
    assert nameless == set(NAMELESS)
    assert {module for module in makers if not module.startswith("graph/")} == set()


def graph_modules() -> list[ModuleType]:
    assert all_statements()
    return [module for name, module in sys.modules.items() if name.startswith("gradient.graph.")]
