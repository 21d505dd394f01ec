"""What the functions of the graph promise each other: who may move the need, who must hold which lock, who
queues.

Source: seed "Queueing and Counters" (Start Condition Columns, Queueing Events, Needs Build).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest

import gradient
import gradient.graph
from gradient.graph import can_start, nar, need, record, repair
from gradient.graph.builds import BuildCompleted
from gradient.graph.heal import Repair
from gradient.graph.locks import LOCK_SHARED_BUILDS, LockNotHeld, SharedBuildLock, lock_shared_builds, proven
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.predicates import promotable_predicate
from gradient.graph.record import Record
from gradient.graph.statements import Statement, all_statements
from gradient.graph.transaction import Transaction, graph_transaction
from gradient.model import BuildStatus, EntryPoint
from tests.graph import world as world_module
from tests.graph.world import LIMITS, START, World, derivation, drv, out

PACKAGE = Path(gradient.__file__).parent
CRATE_PRIVATE = {"update_need", "settle_need"}


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return tuple((str(path.relative_to(PACKAGE)), ast.parse(path.read_text())) for path in paths)


def names_in(tree: ast.AST) -> set[str]:
    """Every name that is read, imported or looked up on something."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.ImportFrom(names=aliases):
                found |= {alias.name for alias in aliases}
            case ast.Constant(value=str(name)):
                found.add(name)
    return found


def test_the_list_of_modules_has_every_module() -> None:
    names = {f"{module.name}.py" for module in pkgutil.iter_modules(gradient.graph.__path__)}
    assert set(re.findall(r"\w+\.py", gradient.graph.__doc__ or "")) == names


# --- the need -------------------------------------------------------------------------------------


def test_nothing_outside_the_graph_moves_the_need_by_itself() -> None:
    users = {path for path, tree in sources() if names_in(tree) & CRATE_PRIVATE}
    assert {path for path in users if not path.startswith("graph/")} == set()
    assert "graph/need.py" in users  # the search finds what it looks for


def test_who_updates_the_need_settles_it() -> None:
    callers = {}
    for path, tree in sources():
        for function in ast.walk(tree):
            if isinstance(function, ast.AsyncFunctionDef) and function.name not in CRATE_PRIVATE:
                called = {
                    node.func.id
                    for node in ast.walk(function)
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                }
                if "update_need" in called:
                    callers[f"{path}:{function.name}"] = "settle_need" in called
    assert "graph/need.py:update_and_settle_need" in callers
    assert [caller for caller, settles in callers.items() if not settles] == []


# --- locks ----------------------------------------------------------------------------------------


def demanding_the_lock() -> dict[str, Callable[..., Awaitable[Any]]]:
    """Every function of the graph with a parameter `lock`."""
    found = {}
    for module in pkgutil.iter_modules(gradient.graph.__path__, "gradient.graph."):
        for name, function in inspect.getmembers(
            importlib.import_module(module.name), inspect.iscoroutinefunction
        ):
            if "lock" in inspect.signature(function).parameters and function.__module__ == module.name:
                found[f"{module.name}.{name}"] = function
    return found


def test_the_spreading_functions_demand_the_lock() -> None:
    demanding = {name.rpartition(".")[2] for name in demanding_the_lock()}
    assert {
        "add_blocking_deps",
        "became_fetchable",
        "lost_fetchability",
        "seed_blocking_deps",
        "seed_missing_runtime_deps",
    } <= demanding


async def call(function: Callable[..., Awaitable[Any]], tx: Transaction, lock: SharedBuildLock) -> None:
    """With the lock, the ids [1, 2], and nothing for what else it wants."""
    given: dict[str, Any] = {
        "tx": tx,
        "lock": lock,
        "ids": [1, 2],
        "complete_before": frozenset({1, 2}),
        "edges": [(1, 3), (2, 3)],
    }
    parameters = inspect.signature(function).parameters
    await function(
        **{
            name: given.get(name, frozenset())
            for name in parameters
            if name in given or _needed(parameters[name])
        }
    )


def _needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


PUBLIC = {name: f for name, f in demanding_the_lock().items() if not name.rpartition(".")[2].startswith("_")}


@pytest.mark.parametrize("function", PUBLIC.values(), ids=PUBLIC)
async def test_no_flag_spreads_without_the_lock_of_its_own_transaction(
    connection: Connection, database_url: str, function: Callable[..., Awaitable[Any]]
) -> None:
    async with connection.transaction():
        tx = Transaction(connection, START)
        with pytest.raises(LockNotHeld, match="not locked"):
            await call(function, tx, await lock_shared_builds(tx, [2]))
        await call(function, tx, await lock_shared_builds(tx, [1, 2]))
        earlier = await lock_shared_builds(tx, [1, 2])
    # On the same connection, at the same time of the clock: what was locked then is free by now.
    async with connection.transaction():
        with pytest.raises(LockNotHeld, match="another transaction"):
            await call(function, Transaction(connection, START), earlier)
    async with await Connection.connect(database_url) as other, other.transaction():
        with pytest.raises(LockNotHeld, match="another transaction"):
            await call(function, Transaction(other, START), proven(tx, [1, 2]))


async def test_the_lock_is_on_the_rows(world: World, database_url: str) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": [], "b": [], "free": []}, entries=["a", "b", "free"])
    tried = "SELECT derivation FROM derivation_build ORDER BY 1 FOR NO KEY UPDATE SKIP LOCKED"
    ids = [await world.id(name) for name in ("a", "b")]
    async with await Connection.connect(database_url) as other, other.transaction():
        lock = await lock_shared_builds(Transaction(other, START), ids)
        assert lock.ids == set(ids)
        assert await fetch_all(world.connection, tried) == [(await world.id("free"),)]
        # Nobody who refers to a locked row waits: only who changes it.
        await fetch_all(world.connection, "SELECT FROM derivation_build FOR KEY SHARE")


async def test_the_lock_is_taken_once(world: World) -> None:
    async with world.connection.transaction():
        tx = Transaction(world.connection, START)
        held = await lock_shared_builds(tx, [1, 2])
        more = await lock_shared_builds(tx, [2, 3], held)
        assert more.ids == {1, 2, 3}


LOCKING = re.compile(r"FOR (NO KEY )?UPDATE")


def test_rows_are_locked_in_order() -> None:
    """Where a statement locks several rows, it sorts them first: two of them never wait for each other."""
    unordered = [
        statement.name
        for statement in all_statements()
        for match in LOCKING.finditer(statement.text)
        if "ORDER BY" not in statement.text[: match.start()].rpartition("SELECT")[2]
        and not re.search(r"WHERE [\w.]*(id|derivation) = %\(", statement.text)
        and statement.name != "last_commit_token"  # a table of one row
    ]
    assert unordered == []
    assert LOCKING.search(LOCK_SHARED_BUILDS.text)


async def test_the_bodies_of_the_schema_lock_in_order(connection: Connection) -> None:
    query = "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = current_schema()::regnamespace"
    bodies: dict[str, str] = dict(await fetch_all(connection, query))
    locking = {name: body for name, body in bodies.items() if LOCKING.search(body)}
    assert {"ripple_missing_runtime_deps", "ripple_unwalked_inputs"} <= set(locking)
    for name, body in locking.items():
        for match in LOCKING.finditer(body):
            assert "ORDER BY" in body[: match.start()].rpartition("SELECT")[2], name


def test_only_the_graph_transaction_makes_one() -> None:
    """Whoever moves the graph takes the graph lock; a savepoint of the writer is inside it."""
    assert makers_of("Transaction") == {"graph/transaction.py", "graph/writer.py"}


def makers_of(cls: str) -> set[str]:
    return {
        path
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == cls
    }


async def test_the_graph_is_moved_by_one_at_a_time(connection: Connection, database_url: str) -> None:
    free = "SELECT pg_try_advisory_xact_lock(642)"
    async with await Connection.connect(database_url) as other:
        async with graph_transaction(other, START):
            assert await fetch_all(connection, free) == [(False,)]
        assert await fetch_all(connection, free) == [(True,)]


# --- who queues -----------------------------------------------------------------------------------


@attrs.frozen
class Code:
    """The functions of the graph and what each of them names: who calls whom, and who runs a statement."""

    named: dict[str, set[str]]  # by "module:function", methods with their class

    @classmethod
    def read(cls) -> Code:
        named = {}
        for path, tree in sources():
            if path.startswith("graph/"):
                for owner, function in functions_of(tree):
                    named[f"{path}:{owner}{function.name}"] = names_in(function)
        return cls(named)

    def reaches(self, function: str, goals: set[str]) -> bool:
        """Whether `function` names one of `goals`, or calls who does in its own module: what others do on
        the way is for their own ends."""
        module = function.partition(":")[0]
        seen, due = set(), {function}
        while due:
            names = self.named[due.pop()]
            if names & goals:
                return True
            called = {f"{module}:{name}" for name in names} & self.named.keys()
            due |= called - seen
            seen |= called
        return False

    def ends_in(self, function: str, goals: set[str]) -> bool:
        """Whether `function` reaches one of `goals`, or everybody who calls it does."""
        if self.reaches(function, goals):
            return True
        callers = self.users(function.partition(":")[2]) - {function}
        return bool(callers) and all(self.ends_in(caller, goals) for caller in callers)

    def users(self, name: str) -> set[str]:
        return {function for function, names in self.named.items() if name in names}


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        yield from ((owner, f) for f in inside if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef))


def constants() -> dict[str, str]:
    """The name of the constant of each statement."""
    found = {}
    for module in pkgutil.iter_modules(gradient.graph.__path__, "gradient.graph."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Statement):
                found[value.name] = name
    return found


# What writes Queued to shared builds, or a status that comes from outside.
QUEUES = re.compile(
    rf"UPDATE derivation_build\b[^;]*?\bSET status = ({int(BuildStatus.QUEUED)}\b|%\(|e\.)"
    rf"|\bstatus = CASE[^,]*?\b(THEN|ELSE) {int(BuildStatus.QUEUED)}\b"
)


def test_who_writes_queued_asks_the_conditions_or_settles_its_rows() -> None:
    """The assigner reads only the status: Queued must mean that the conditions held."""
    code, names = Code.read(), constants()
    writers = {s.name: s for s in all_statements() if QUEUES.search(s.text)}
    asking = {name for name, s in writers.items() if promotable_predicate("b", "d") in s.text}
    assert asking == {"promote", "promote_closure"}
    settling = {"requeue_building", "retry_transient", "requeue_all_building", "write_build_status"}
    assert set(writers) - asking - settling == {"complete_builds"}  # its statuses are successes
    assert code.reaches("graph/requeue.py:settle_requeued", {"unpromote_ungated"})
    settles = {"unpromote_ungated", "settle_requeued"}
    for name in sorted(settling):
        users = code.users(names[name])
        assert users, name
        for function in users:
            assert code.ends_in(function, settles), f"{function} queues by {name}"


def test_nobody_else_derives_the_queue_conditions_again() -> None:
    """They are asked where rows enter or leave the queue, and where the consistency check looks for a lost
    move."""
    asking = {
        path for path, tree in sources() if names_in(tree) & {"gates_predicate", "promotable_predicate"}
    }
    assert asking == {"graph/predicates.py", "graph/can_start.py", "graph/drift.py"}


def test_a_proof_is_of_rows_that_were_locked() -> None:
    code, names = Code.read(), constants()
    assert makers_of("SharedBuildLock") == {"graph/locks.py"}
    locking = {names[s.name] for s in all_statements() if LOCKING.search(s.text)}
    claiming = code.users("proven")
    assert claiming
    for function in claiming:
        assert code.ends_in(function, locking), f"{function} has locked nothing"


# --- queueing events ------------------------------------------------------------------------------
# Each row: where the event queues, and what happens until the named build must be Queued. With the call
# taken away it is not: so whoever forgets it is found by what is tested here.


async def an_imported_batch(world: World) -> str:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.record(evaluation, {"b": ["a"]}, entries=["b"])
    return "a"


async def a_name_for_what_was_known(world: World) -> str:
    """Its need was there before its name."""
    first, second = await world.evaluation(), await world.evaluation()
    await world.record(first, {"top": ["a"], "a": []}, entries=["top"])
    await world.connection.execute("DELETE FROM build_job")
    await world.connection.execute("UPDATE derivation_build SET status = 0")
    await world.apply(Record(second, (derivation("a"),)))
    return "a"


async def a_dependency_that_turned_fetchable(world: World) -> str:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["a"], "a": []}, entries=["top"])
    await world.start("a")
    await world.commit(world_module.nar(out("a")))
    assert await world.apply(BuildCompleted(world.open.pop("a"), LIMITS))
    return "top"


async def a_drv_that_arrived(world: World) -> str:
    evaluation = await world.evaluation()
    await world.apply(Record(evaluation, (derivation("a"),), (EntryPoint("a", drv("a")),)))
    await world.commit(world_module.nar(drv("a")))
    return "a"


async def a_newly_needed_build(world: World) -> str:
    """Skipped as nobody needed it; then an output that landed refers to it."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": [], "late": []}, entries=["top"])
    assert await world.status("late") is BuildStatus.SKIPPED
    await world.start("top")
    await world.commit(world_module.nar(out("top"), [out("late")]))
    return "late"


async def a_stream_that_completed(world: World) -> str:
    """Something that no event has queued: what the pass over the closure is for."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.connection.execute("UPDATE derivation_build SET status = 0")
    await world.end_stream(evaluation)
    return "a"


async def a_heal_of_what_is_stuck(world: World) -> str:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.end_stream(evaluation)
    await world.connection.execute("UPDATE derivation_build SET status = 0")
    await world.apply(Repair(evaluation))
    return "a"


EVENTS: list[tuple[Any, str, Callable[[World], Awaitable[str]]]] = [
    (record, "promote", a_name_for_what_was_known),
    (can_start, "promote", a_dependency_that_turned_fetchable),
    (nar, "promote", a_drv_that_arrived),
    (need, "promote", a_newly_needed_build),
    (repair, "promote_closure", a_stream_that_completed),
    (repair, "promote_closure", a_heal_of_what_is_stuck),
]


@pytest.mark.parametrize(("module", "call", "event"), EVENTS, ids=[event.__name__ for *_, event in EVENTS])
async def test_every_queueing_event_queues_by_its_own_call(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    call: str,
    event: Callable[[World], Awaitable[str]],
) -> None:
    async with world.connection.transaction(force_rollback=True):
        name = await event(world)
        assert await world.status(name) is BuildStatus.QUEUED

    async def forgotten(*_: Any) -> list[int]:
        return []

    async with world.connection.transaction(force_rollback=True):
        monkeypatch.setattr(module, call, forgotten)
        world.open.clear()
        name = await event(world)
        assert await world.status(name) is BuildStatus.CREATED


async def test_an_imported_batch_queues_what_may_start(world: World) -> None:
    name = await an_imported_batch(world)
    assert await world.status(name) is BuildStatus.QUEUED
    await world.check()


def test_the_events_are_all_there() -> None:
    """Whoever queues is one of the events above, or opens builds again, names them, or takes something away
    that they waited for."""
    callers = {
        path
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.startswith("promote")
    }
    events = {f"graph/{module.__name__.rpartition('.')[2]}.py" for module, _, _ in EVENTS}
    others = {"build_failures", "upstream", "retire", "demote", "reachability"}
    assert callers == events | {f"graph/{module}.py" for module in others}
