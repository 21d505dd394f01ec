"""A database in which every maintained column is wrong somewhere: one consistency check puts it right, to
the last value, in messages of a bounded size; says how much of what was wrong; and then finds nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import attrs
import pytest

from gradient.graph import consistency
from gradient.graph.consistency import ConsistencyReport, graph_consistency_report
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.transaction import Message
from gradient.model import BuildStatus, EvaluationStatus
from tests.graph.world import COUNTERS, World, nar, out

T = TypeVar("T")
S = BuildStatus
CHUNK = 7
SIZE, BUILT, HELD = 160, 60, 12
# What a check sends, in the order in which one thing counts over the other. Counters of evaluations are
# recounted beside the writer.
STEPS = (
    "RecountUnwalkedInputs",
    "RecountMissingRuntimeDeps",
    "RepairFetchable",
    "RecountWanted",
    "SettleSkipped",
    "RepairCanStart",
    "AdoptPending",
    "FinishEvaluation",
)

# Everything that a check may write: the columns, who names what, what the counters say. The mark of need says
# nothing where nothing is left to be made.
BUILDS = """
    SELECT d.name, d.unwalked_inputs, b.status, b.fetchable, b.missing_runtime_deps, b.blocking_deps,
           b.wanted AND NOT b.fetchable
    FROM derivation d JOIN derivation_build b ON b.derivation = d.id ORDER BY d.id
"""
NAMES = "SELECT evaluation, derivation FROM build_job ORDER BY evaluation, derivation"


@attrs.frozen
class Row:
    """A shared build of the sound graph."""

    name: str
    status: BuildStatus = attrs.field(converter=BuildStatus)
    wanted: bool
    fetchable: bool
    blocking: int
    inputs: list[str]
    users: list[str]
    is_entry: bool
    unwalked_inputs: int
    missing_runtime_deps: int

    def waits(self) -> bool:
        """For a dependency."""
        return self.status is S.CREATED and self.wanted and self.blocking > 0


ROWS = """
    SELECT d.name, b.status, b.wanted, b.fetchable, b.blocking_deps,
           ARRAY(SELECT i.name FROM derivation_dependency e JOIN derivation i ON i.id = e.dependency
                 WHERE e.derivation = d.id),
           ARRAY(SELECT u.name FROM derivation_dependency e JOIN derivation u ON u.id = e.derivation
                 WHERE e.dependency = d.id),
           EXISTS (SELECT FROM entry_point t WHERE t.derivation = d.id),
           d.unwalked_inputs, b.missing_runtime_deps
    FROM derivation d JOIN derivation_build b ON b.derivation = d.id ORDER BY d.id
"""


class Vandal:
    """Writes into a sound graph, and knows what a check has to say about it."""

    def __init__(self, world: World, dice: random.Random, rows: Collection[Row]) -> None:
        self.world = world
        self.dice = dice
        self.rows = rows
        self.touched: set[str] = set()
        self.expected = ConsistencyReport()

    async def break_everything(self) -> None:
        """Each column by itself, in rows of its own where one fault would hide another."""
        await self.counts("derivation", "unwalked_inputs", "id", walk_drift=15)
        await self.counts("derivation_build", "missing_runtime_deps", "derivation", runtime_drift=12)
        flipped = [
            *await self.builds("fetchable = false", 6, lambda row: row.fetchable, counter_drift=6),
            *await self.builds("fetchable = true", 6, Row.waits, counter_drift=6),
        ]
        recounted = {user for row in flipped for user in row.users}
        await self.builds(
            "blocking_deps = blocking_deps + 3", 6, lambda row: row.name not in recounted, counter_drift=6
        )
        await self.builds(
            "blocking_deps = 0", 4, lambda row: row.waits() and row.name not in recounted, counter_drift=4
        )
        await self.builds("status = 1", 6, Row.waits, counter_drift=6)
        await self.builds("status = 1", 3, lambda row: row.status is S.SKIPPED, counter_drift=3)
        await self.builds("status = 0", 4, lambda row: row.status is S.QUEUED, unpromoted_startable=4)
        await self.builds("status = 0", 3, lambda row: row.status is S.SKIPPED, skipped_moves=3)
        await self.builds(
            "status = 10", 2, lambda row: row.status is S.QUEUED and not row.inputs, skipped_moves=2
        )
        await self.builds("wanted = true", 3, lambda row: row.status is S.SKIPPED, need_drift=3)
        await self.builds(
            "wanted = false", 8, lambda row: row.status is S.QUEUED or row.waits(), need_drift=8
        )
        await self.names(5)
        await self.evaluations()

    def expect(self, **found: int) -> None:
        added = {field: getattr(self.expected, field) + rows for field, rows in found.items()}
        self.expected = attrs.evolve(self.expected, **added)

    async def counts(self, table: str, column: str, key: str, **found: int) -> None:
        """A counter that is off by something in either direction, in a sample of all rows."""
        (rows,) = found.values()
        counting = [row for row in self.rows if getattr(row, column)]
        some = self.dice.sample(counting, min(len(counting), 3))
        others = self.dice.sample([row for row in self.rows if row not in some], rows - len(some))
        for row in some + others:
            value = 0 if getattr(row, column) else self.dice.choice((1, 4))
            await self.write(
                f"UPDATE {table} SET {column} = {value} WHERE {key} = {await self.world.id(row.name)}"
            )
        self.expect(**found)

    async def builds(self, value: str, number: int, which: Callable[[Row], bool], **found: int) -> list[Row]:
        chosen = self.choose(number, which)
        for row in chosen:
            await self.write(
                f"UPDATE derivation_build SET {value} WHERE derivation = {await self.world.id(row.name)}"
            )
        self.expect(**found)
        return chosen

    def choose(self, number: int, which: Callable[[Row], bool]) -> list[Row]:
        chosen = self.dice.sample([r for r in self.rows if r.name not in self.touched and which(r)], number)
        self.touched |= {row.name for row in chosen}
        return chosen

    async def names(self, number: int) -> None:
        """Nobody names some of what evaluations wait for."""
        for row in self.choose(number, lambda row: row.waits() and not row.is_entry):
            cursor = await self.world.connection.execute(
                "DELETE FROM build_job WHERE derivation = %s", (await self.world.id(row.name),)
            )
            assert cursor.rowcount > 0
            self.expect(adopted=cursor.rowcount)

    async def evaluations(self) -> None:
        """The counters of all that go on; and one that has ended is in the middle of its builds again."""
        cursor = await self.world.connection.execute(
            "UPDATE evaluation SET active_shared_builds = active_shared_builds - 2, failed_shared_builds = 9,"
            " named_shared_builds = 0, queued_shared_builds = -1 WHERE status IN (2, 3)"
        )
        self.expect(eval_counter_drift=cursor.rowcount, wedged_building_evals=1)
        await self.write(
            "UPDATE evaluation SET status = 3, finished_at = NULL WHERE id ="
            " (SELECT t.evaluation FROM entry_point t JOIN derivation d ON d.id = t.derivation"
            " WHERE d.name = 'done')"
        )

    async def write(self, statement: str) -> None:
        await self.world.connection.execute(statement.encode())


async def sound(world: World, dice: random.Random) -> list[Row]:
    """A package set that is built in part, for two evaluations; what the cache holds, and what that would
    have needed; a walk that is under way; and an evaluation that has ended."""
    names = [f"g{i}" for i in range(SIZE)]
    graph = {
        name: dice.sample(names[max(0, i - 15) : i], min(i, dice.choice((0, 0, 1, 2, 2, 3))))
        for i, name in enumerate(names)
    }
    needed = {below for inputs in graph.values() for below in inputs}
    first = await world.evaluation()
    await world.record(first, graph, entries=[name for name in names if name not in needed])
    await world.end_stream(first)
    for name in names[:BUILT]:
        await world.build(name, dice.sample(graph[name], len(graph[name]) // 2))
    second = await world.evaluation()
    await world.record(second, {"x": names[-6:]}, entries=["x"])
    await world.end_stream(second)

    held = await world.evaluation()
    await world.commit(*(nar(out(f"h{i}")) for i in range(HELD)))
    unneeded: dict[str, list[str]] = {f"u{i}": [] for i in range(HELD)}
    users = {f"h{i}": [f"u{i}"] for i in range(HELD)}
    await world.record(held, {**unneeded, **users}, entries=users)
    await world.end_stream(held)
    walking = await world.evaluation()
    await world.record(walking, {f"w{i}": [f"w{i + 1}"] for i in range(8)}, entries=["w0"])
    done = await world.evaluation()
    await world.record(done, {"done": []}, entries=["done"])
    await world.end_stream(done)
    await world.build("done")
    assert await world.evaluation_status(done) is EvaluationStatus.COMPLETED
    await world.check()
    return [Row(*row) for row in await fetch_all(world.connection, ROWS)]


async def picture(world: World) -> list[list[Any]]:
    return [await fetch_all(world.connection, query) for query in (BUILDS, NAMES, COUNTERS)]


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 30))]
)
async def test_a_broken_database_is_put_right_by_one_check(
    connection: Connection, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consistency, "CHUNK", CHUNK)
    dice = random.Random(seed)
    world = World(connection)
    await world.setup()
    vandal = Vandal(world, dice, await sound(world, dice))
    before = await picture(world)
    await vandal.break_everything()
    assert await picture(world) != before
    steps: dict[str, None] = {}

    async def submit(message: Message[T]) -> T:
        """One transaction, of no more rows than a chunk."""
        answer = await world.apply(message)
        steps[type(message).__name__] = None
        written: Any = getattr(message, "ids", None) or getattr(message, "names", None) or answer
        assert isinstance(written, (int, bool)) or len(written) <= CHUNK
        return answer

    assert await graph_consistency_report(connection, submit) == vandal.expected
    assert min(attrs.astuple(vandal.expected)) > 0
    assert tuple(steps) == STEPS
    await world.check()
    assert await picture(world) == before
    assert await graph_consistency_report(connection, submit) == ConsistencyReport()


def test_the_fields_of_the_report_stand_in_the_order_of_the_steps() -> None:
    assert [field.name for field in attrs.fields(ConsistencyReport)] == [
        "walk_drift",
        "runtime_drift",
        "counter_drift",
        "need_drift",
        "skipped_moves",
        "unpromoted_startable",
        "adopted",
        "eval_counter_drift",
        "wedged_building_evals",
    ]
