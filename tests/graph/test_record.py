"""Recording batches: any order and any cut gives the same graph, and nothing is recorded twice."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import attrs
import pytest

from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.evaluation_reports import EvalFailed
from gradient.graph.nar import CommitNars
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.record import Record
from gradient.graph.transaction import Rejected
from gradient.model import BuildStatus, EdgeKind, EntryPoint, EvaluationStatus, FailureKind, OutputPath
from tests.graph.universe import Universe
from tests.graph.world import World, derivation, drv, nar, out


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


STATE = """
    SELECT d.name, CASE WHEN b.status IN (3, 7) THEN 'done' ELSE b.status::text END, b.fetchable,
           b.wanted AND NOT b.fetchable, b.blocking_deps, b.missing_runtime_deps, d.unwalked_inputs, d.walked,
           ARRAY(SELECT i.name || ':' || e.kind FROM derivation_dependency e
                 JOIN derivation i ON i.id = e.dependency WHERE e.derivation = d.id ORDER BY 1)
    FROM derivation d JOIN derivation_build b ON b.derivation = d.id ORDER BY d.name
"""


async def outcome(world: World, steps: list[Any], tops: list[str]) -> list[tuple[Any, ...]]:
    """The graph after these steps, in a transaction that is undone."""
    async with world.connection.transaction(force_rollback=True):
        evaluation = await world.evaluation()
        for step in steps:
            message = Record(evaluation, step) if isinstance(step, tuple) else CommitNars(1, (step,))
            await world.apply(message)
            await world.check()
        points = tuple(EntryPoint(top, drv(top)) for top in tops)
        await world.apply(Record(evaluation, (), points))
        await world.end_stream(evaluation)
        await world.check()
        return await fetch_all(world.connection, STATE)


@pytest.mark.parametrize("seed", range(6))
async def test_the_order_of_batches_and_nars_does_not_matter(world: World, seed: int) -> None:
    dice = random.Random(seed)
    universe = Universe.of(dice, 8)
    tops = dice.sample(list(universe.inputs), 2)
    names = universe.closure(tops)
    await world.commit(*(nar(drv(name)) for name in names if dice.random() < 0.8))
    landed = [nar(path, refs) for path, refs in universe.references.items() if dice.random() < 0.3]
    expected = None
    for _ in range(4):
        dice.shuffle(names)
        cut = dice.choice((1, 2, 3, len(names)))
        batches = [
            tuple(universe.record(name) for name in names[i : i + cut]) for i in range(0, len(names), cut)
        ]
        # Some batches come twice, as after a retry.
        steps: list[Any] = [*batches, *landed, *dice.sample(batches, 1)]
        dice.shuffle(steps)
        found = await outcome(world, steps, tops)
        expected = expected or found
        assert found == expected


async def test_entry_points_may_come_with_their_batch_or_after_it(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": [], "b": ["a"]}, entries=["a"])
    await world.apply(Record(evaluation, (), (EntryPoint("again", drv("a")), EntryPoint("late", drv("b")))))
    await world.check()
    assert await world.value("SELECT count(*) FROM entry_point") == 3
    assert await world.statuses() == {"a": BuildStatus.QUEUED, "b": BuildStatus.CREATED}


async def test_an_entry_point_nobody_ever_named_is_refused(world: World) -> None:
    evaluation = await world.evaluation()
    with pytest.raises(Rejected, match="never sent"):
        await world.apply(Record(evaluation, (derivation("a"),), (EntryPoint("x", drv("x")),)))


async def test_what_nobody_needs_is_named_and_skipped(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"alone": ["below"], "below": []})
    await world.check()
    assert set((await world.statuses()).values()) == {BuildStatus.SKIPPED}
    assert await world.value("SELECT count(*) FROM build_job") == 2
    await world.record(evaluation, {"top": ["alone"]}, entries=["top"])
    await world.check()
    assert await world.status("below") is BuildStatus.QUEUED


async def test_an_entry_point_of_what_was_skipped_or_aborted_thaws_it(world: World) -> None:
    first = await world.evaluation()
    await world.record(first, {"top": ["mid"], "mid": ["low"], "low": []}, entries=["top"])
    await world.apply(AbortEvaluation(first, "by a person"))
    assert set((await world.statuses()).values()) == {BuildStatus.ABORTED}
    second = await world.evaluation()
    await world.apply(Record(second, (), (EntryPoint("mid", drv("mid")),)))
    await world.check()
    assert await world.statuses() == {
        "top": BuildStatus.ABORTED,
        "mid": BuildStatus.CREATED,
        "low": BuildStatus.QUEUED,
    }


async def test_an_entry_point_that_failed_is_not_waited_for(world: World) -> None:
    first = await world.evaluation()
    await world.record(first, {"bad": []}, entries=["bad"])
    await world.fail("bad")
    second = await world.evaluation()
    await world.record(second, {"bad": []}, entries=["bad"])
    await world.check()
    assert await world.status("bad") is BuildStatus.FAILED_PERMANENT


async def test_a_stub_is_named_and_never_queued(world: World) -> None:
    evaluation = await world.evaluation()
    await world.commit(nar(drv("below")))
    await world.record(evaluation, {"top": ["below"]}, entries=["top"])
    await world.check()
    assert await world.status("below") is BuildStatus.CREATED
    assert await world.value("SELECT unwalked_inputs FROM derivation WHERE name = 'top'") == 1
    assert await world.claim("below") is None


async def test_what_was_added_to_a_graph_moves_its_version(world: World) -> None:
    async def version(evaluation: int) -> Any:
        return await world.value("SELECT graph_version FROM evaluation WHERE id = %s", evaluation)

    one, other, apart = [await world.evaluation() for _ in range(3)]
    await world.record(apart, {"alone": []}, entries=["alone"])
    await world.record(one, {"top": ["below"]}, entries=["top"])
    await world.record(other, {"top": ["below"]}, entries=["top"])
    assert [await version(e) for e in (one, other, apart)] == [1, 1, 1]
    # Both name the input, which was a stub.
    await world.record(other, {"below": ["lowest"]})
    assert [await version(e) for e in (one, other, apart)] == [2, 2, 1]
    # What comes again adds nothing.
    await world.record(other, {"top": ["below"], "below": ["lowest"]}, entries=["top"])
    assert [await version(e) for e in (one, other, apart)] == [2, 2, 1]


async def test_several_outputs_that_refer_to_each_other_and_themselves(world: World) -> None:
    evaluation = await world.evaluation()
    outputs = (OutputPath("out", out("a")), OutputPath("dev", out("a", "dev")))
    await world.record(evaluation, {"a": []}, entries=["a"], outputs=outputs)
    await world.record(evaluation, {"user": ["a"]}, entries=["user"])
    await world.start("a")
    await world.commit(nar(out("a"), [out("a")]))
    await world.check()
    assert await world.status("user") is BuildStatus.CREATED
    await world.commit(nar(out("a", "dev"), [out("a"), out("a", "dev")]))
    await world.check()
    assert await world.value("SELECT count(*) FROM derivation_dependency WHERE kind <> 0") == 0


async def test_two_derivations_of_one_path(world: World) -> None:
    """Fixed outputs: whichever is built first, the other is done with it."""
    evaluation = await world.evaluation()
    one, other = (
        derivation("one"),
        attrs.evolve(derivation("other"), outputs=(OutputPath("out", out("one")),)),
    )
    await world.commit(nar(drv("one")), nar(drv("other")))
    points = (EntryPoint("one", drv("one")), EntryPoint("other", drv("other")))
    await world.apply(Record(evaluation, (one, other), points))
    await world.end_stream(evaluation)
    await world.build("one")
    await world.check()
    assert await world.statuses() == {"one": BuildStatus.COMPLETED, "other": BuildStatus.SUBSTITUTED}
    assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED


@pytest.mark.parametrize("order", ["owner first", "target first", "together"])
async def test_runtime_references_are_adopted_on_either_side(world: World, order: str) -> None:
    """The NAR of `app` was there before either derivation was known."""
    await world.commit(nar(out("app"), [out("lib")]))
    evaluation = await world.evaluation()
    for batch in {
        "owner first": (["app"], ["lib"]),
        "target first": (["lib"], ["app"]),
        "together": (["app", "lib"],),
    }[order]:
        await world.record(evaluation, {name: [] for name in batch}, entries=batch)
        await world.check()
    kind = await world.value("SELECT kind FROM derivation_dependency")
    assert kind == EdgeKind.RUNTIME
    assert await world.value("SELECT fetchable FROM derivation_build WHERE status IN (3, 7)") is not True
    await world.build("lib")
    await world.end_stream(evaluation)
    await world.check()
    assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED


async def test_what_an_earlier_output_refers_to_is_needed_and_waited_for_as_it_is_known(world: World) -> None:
    evaluation = await world.evaluation()
    outputs = (OutputPath("out", out("top")), OutputPath("dev", out("top", "dev")))
    await world.record(evaluation, {"top": []}, entries=["top"], outputs=outputs)
    await world.commit(nar(out("top"), [out("late")]))
    assert await world.status("top") is BuildStatus.QUEUED
    await world.record(evaluation, {"late": []})
    await world.check()
    assert await world.statuses() == {"top": BuildStatus.CREATED, "late": BuildStatus.QUEUED}
    await world.build("late")
    assert await world.status("top") is BuildStatus.QUEUED


async def test_a_build_input_that_is_also_referred_to_has_one_edge(world: World) -> None:
    evaluation = await world.evaluation()
    await world.commit(nar(out("top"), [out("lib")]))
    await world.record(evaluation, {"lib": [], "top": ["lib"]}, entries=["top"])
    assert await fetch_all(world.connection, "SELECT kind FROM derivation_dependency") == [(EdgeKind.BOTH,)]
    await world.check()


async def test_a_closure_that_breaks_under_a_fresh_one_is_counted_once(world: World) -> None:
    """`f` becomes present in the very batch that breaks `r` below it: what stands above counts it once."""
    first = await world.evaluation()
    chain = ["h", "g", "f", "r", "t"]
    await world.commit(*(nar(out(above), [out(below)]) for above, below in pairwise(chain)))
    await world.record(first, {"h": [], "g": [], "r": []}, entries=["h", "g", "r"])
    await world.check()
    await world.record(first, {"f": [], "t": []}, entries=["f", "t"])
    await world.check()
    await world.build("t")
    await world.check()
    assert set((await world.statuses()).values()) <= {BuildStatus.SUBSTITUTED, BuildStatus.COMPLETED}
    assert await world.value("SELECT bool_and(fetchable) FROM derivation_build")


@pytest.mark.parametrize("end", ["abort", "fail", "finish"])
async def test_a_batch_after_the_end_is_dropped(world: World, end: str) -> None:
    evaluation = await world.evaluation()
    if end == "abort":
        await world.apply(AbortEvaluation(evaluation, "by a person"))
    elif end == "fail":
        await world.apply(EvalFailed(world.open[f"eval:{evaluation}"], FailureKind.PERMANENT, "no", 3))
    else:
        await world.end_stream(evaluation)
    recorded = await world.apply(Record(evaluation, (derivation("a"),), errors=("late",)))
    assert recorded.dropped
    assert await world.value("SELECT count(*) FROM derivation") == 0
    assert await world.value("SELECT count(*) FROM evaluation_message WHERE message = 'late'") == 0


async def test_the_walk_goes_on_where_the_graph_knows_less(world: World) -> None:
    """Known means: walked, and everything below it too."""
    evaluation = await world.evaluation()
    for graph, unwalked in (
        ({"top": ["mid", "side"]}, [2]),
        ({"mid": ["low"]}, [2, 1]),
        ({"low": []}, [1, 0, 0]),
        ({"side": []}, [0, 0, 0, 0]),
    ):
        await world.record(evaluation, graph)
        await world.check()
        query = "SELECT array_agg(unwalked_inputs ORDER BY unwalked_inputs DESC) FROM derivation WHERE walked"
        assert await world.value(query) == unwalked
