"""The spreads move by transitions: what does not flip moves nothing, and a flip moves each row above by its
edges.

Source: seed "Queueing and Counters" (Start Condition Columns, Queued Invariant, Skipped and Thaw).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from itertools import pairwise
from typing import Any

import attrs
import pytest

from gradient.graph import transaction
from gradient.graph.build_failures import BuildFailed
from gradient.graph.can_start import became_fetchable, clear_fetchable, seed_blocking_deps
from gradient.graph.demote import DemotePath
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.locks import lock_shared_builds
from gradient.graph.moves import BuildChange
from gradient.graph.nar import CommitNars
from gradient.graph.need import WRITE_NEED, need_after, skip_unwanted, thaw_wanted, update_and_settle_need
from gradient.graph.pg import Connection, execute, fetch_all
from gradient.graph.record import Record
from gradient.graph.statements import Statement
from gradient.graph.transaction import Message, Transaction, graph_transaction
from gradient.graph.walk_completeness import unwalk_derivations
from gradient.model import BuildStatus, FailureKind, OutputPath
from tests.graph.world import LIMITS, START, World, derivation, hash_part, nar, out

S = BuildStatus


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def built(world: World) -> int:
    """`top` above `a` and `b`, which are built."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["a", "b"], "a": [], "b": []}, entries=["top"])
    await world.build("a")
    await world.build("b")
    assert await world.status("top") is S.QUEUED
    return evaluation


async def ids(world: World, *names: str) -> list[int]:
    return [await world.id(name) for name in names]


async def blocking(world: World, name: str = "top") -> int:
    query = "SELECT blocking_deps FROM derivation_build WHERE derivation = %s"
    return int(await world.value(query, await world.id(name)))


async def evict(world: World, names: Collection[str]) -> list[int]:
    """Take outputs away and spread it; the rows that flipped."""
    rows = await ids(world, *names)
    async with graph_transaction(world.connection, START) as tx:
        lock = await lock_shared_builds(tx, rows)
        await execute(
            world.connection,
            "UPDATE derivation_output SET is_cached = false WHERE derivation = ANY(%(ids)s)",
            {"ids": rows},
        )
        flipped = await clear_fetchable(tx, lock, rows)
        world.moves = tx.moves
    return flipped


async def restore(world: World, names: Collection[str]) -> list[int]:
    """The way back."""
    rows = await ids(world, *names)
    async with graph_transaction(world.connection, START) as tx:
        lock = await lock_shared_builds(tx, rows)
        await execute(
            world.connection,
            "UPDATE derivation_output SET is_cached = true WHERE derivation = ANY(%(ids)s)",
            {"ids": rows},
        )
        return await became_fetchable(tx, lock, rows)


async def test_a_flag_that_is_right_moves_nothing(world: World) -> None:
    await built(world)
    assert await restore(world, ["a", "b"]) == []
    assert await blocking(world) == 0
    assert await evict(world, ["top"]) == []
    await world.check()


async def test_a_flip_moves_by_every_edge_and_the_way_back_is_the_same(world: World) -> None:
    await built(world)
    assert sorted(await evict(world, ["a", "b"])) == sorted(await ids(world, "a", "b"))
    assert await blocking(world) == 2
    assert await world.status("top") is S.CREATED
    assert [(c.old, c.new) for c in world.moves.builds.values()] == [(S.QUEUED, S.CREATED)]
    # Twice is not a transition.
    assert await evict(world, ["a", "b"]) == []
    assert await blocking(world) == 2
    assert len(await restore(world, ["a", "b"])) == 2
    assert await blocking(world) == 0
    assert await world.status("top") is S.QUEUED
    await world.check()


async def test_one_of_two_inputs_lost_and_back(world: World) -> None:
    await built(world)
    await evict(world, ["a"])
    assert (await blocking(world), await world.status("top")) == (1, S.CREATED)
    await restore(world, ["a"])
    assert (await blocking(world), await world.status("top")) == (0, S.QUEUED)


async def test_a_job_that_is_out_goes_on_without_its_input(world: World) -> None:
    await built(world)
    assert await world.claim("top") is not None
    await evict(world, ["a"])
    assert (await blocking(world), await world.status("top")) == (1, S.QUEUED)
    assert world.moves.builds == {}


async def test_what_is_out_is_not_done_before_its_report(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": [], "b": []}, entries=["a", "b"])
    assert await world.claim("a") is not None
    await world.commit(nar(out("a")), nar(out("b")))
    assert (await world.status("a"), await world.status("b")) == (S.QUEUED, S.SUBSTITUTED)
    await world.check()


async def test_a_passthrough_stays_queued_without_its_inputs(world: World) -> None:
    await built(world)
    await execute(world.connection, "UPDATE derivation_build SET cache_available = true WHERE status = 1")
    await evict(world, ["a"])
    assert (await blocking(world), await world.status("top")) == (1, S.QUEUED)


async def test_an_input_without_a_shared_build_blocks(world: World) -> None:
    await built(world)
    top, a = await ids(world, "top", "a")
    await execute(world.connection, f"DELETE FROM derivation_build WHERE derivation = {a}")
    async with graph_transaction(world.connection, START) as tx:
        await seed_blocking_deps(tx, await lock_shared_builds(tx, [top]), [top])
    assert await blocking(world) == 1


async def test_a_nar_committed_again_changes_nothing(world: World) -> None:
    """Not even if it is another one: the first to come stays."""
    await built(world)
    columns = "SELECT array_agg((b.*)::text ORDER BY b.derivation) FROM derivation_build b"
    paths = "SELECT array_agg((p.*)::text ORDER BY p.id) FROM cached_path p"
    before = [await world.value(query) for query in (columns, paths)]
    await world.commit(nar(out("a"), [out("top")]), nar(out("b")))
    assert [await world.value(query) for query in (columns, paths)] == before
    assert world.moves.empty
    await world.check()


async def test_nars_that_land_together_are_counted_once(world: World) -> None:
    """Each is new to the others: what one counts as missing comes with the same commit."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"app": [], "lib": [], "libc": []}, entries=["app", "lib", "libc"])
    await world.commit(nar(out("app"), [out("lib")]), nar(out("lib"), [out("libc")]), nar(out("libc")))
    await world.check()
    assert await world.value("SELECT bool_and(fetchable) FROM derivation_build")


async def statements(world: World, message: Message[Any]) -> int:
    """How many statements its transaction sends."""
    sent: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fetch_all", "fetch_value", "execute"):
            patch.setattr(transaction, name, counted(getattr(transaction, name), sent))
        await world.apply(message)
    await world.check()
    return len(sent)


def counted(run: Callable[..., Awaitable[Any]], sent: list[str]) -> Callable[..., Awaitable[Any]]:
    async def sending(connection: Connection, statement: Statement, params: Any = None) -> Any:
        sent.append(statement.name)
        return await run(connection, statement, params)

    return sending


async def of_a_runtime_chain(world: World, depth: int) -> list[int]:
    """The last NAR of a chain of references comes, and goes again."""
    names = [f"n{i}" for i in range(depth)]
    evaluation = await world.evaluation()
    await world.record(evaluation, {name: [] for name in names}, entries=names)
    await world.commit(*(nar(out(high), [out(low)]) for high, low in pairwise(names)))
    last = out(names[-1])
    came = await statements(world, CommitNars(1, (nar(last),)))
    assert await world.value("SELECT bool_and(fetchable) FROM derivation_build")
    return [came, await statements(world, DemotePath((hash_part(names[-1]),), world.now))]


async def of_a_walked_chain(world: World, depth: int) -> list[int]:
    """The last derivation of a chain of inputs is walked, and forgotten again."""
    names = [f"n{i}" for i in range(depth + 1)]
    evaluation = await world.evaluation()
    await world.record(evaluation, {high: [low] for high, low in pairwise(names)}, entries=["n0"])
    came = await statements(world, Record(evaluation, (derivation(names[-1]),)))
    assert await world.value("SELECT bool_and(walked AND unwalked_inputs = 0) FROM derivation")
    return [came, await statements(world, Unwalk(await world.id(names[-1])))]


@attrs.frozen
class Unwalk:
    """What the missing-input self-heal does to a derivation."""

    derivation: int

    async def apply(self, tx: Transaction) -> None:
        await unwalk_derivations(tx, [self.derivation])


@pytest.mark.parametrize("chain", [of_a_runtime_chain, of_a_walked_chain])
async def test_a_spread_takes_as_many_statements_however_deep_it_is(
    world: World, chain: Callable[[World, int], Awaitable[list[int]]]
) -> None:
    found = []
    for depth in (4, 60):
        async with world.connection.transaction(force_rollback=True):
            found.append(await chain(world, depth))
    assert found[0] == found[1]


async def test_an_abort_takes_as_many_statements_however_many_builds_it_ends(world: World) -> None:
    """Half of them are shared with an evaluation that goes on."""
    found = []
    for width in (4, 60):
        async with world.connection.transaction(force_rollback=True):
            graph = {"top": [f"n{i}" for i in range(width)], **{f"n{i}": [] for i in range(width)}}
            doomed, live = await world.evaluation(), await world.evaluation()
            await world.record(doomed, graph, entries=["top"])
            await world.record(live, {"other": graph["top"][: width // 2]}, entries=["other"])
            found.append(await statements(world, AbortEvaluation(doomed, "by a person")))
            aborted = await world.value("SELECT count(*) FROM derivation_build WHERE status = 5")
            assert aborted == width // 2 + 1
    assert found[0] == found[1]


async def test_what_is_not_walked_any_more_leaves_the_queue(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["a"], "a": []}, entries=["top"])
    async with graph_transaction(world.connection, START) as tx:
        assert await unwalk_derivations(tx, await ids(world, "a")) == await ids(world, "a")
    await world.check()
    assert await world.status("a") is S.CREATED
    assert await world.value("SELECT unwalked_inputs FROM derivation WHERE name = 'top'") == 1


async def test_a_transition_moves_the_need_below_it_in_either_direction(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["low"], "low": []}, entries=["top"])
    top = await world.id("top")
    for change, expected in (
        (BuildChange(top, S.CREATED, S.ABORTED), S.SKIPPED),
        (BuildChange(top, S.ABORTED, S.CREATED), S.QUEUED),
    ):
        async with graph_transaction(world.connection, START) as tx:
            await execute(
                world.connection,
                f"UPDATE derivation_build SET status = {int(change.new)} WHERE derivation = {top}",
            )
            await need_after(tx, [change])
        assert await world.status("low") is expected


async def test_what_failed_ends_the_walk_of_the_need(world: World) -> None:
    """`top` has failed, and one of its outputs refers to `lib`: neither what wants `top` still, nor what
    begins to, wants `lib`."""
    evaluation = await world.evaluation()
    outputs = (OutputPath("out", out("top")), OutputPath("dev", out("top", "dev")))
    await world.commit(nar(out("above"), [out("top")]))
    await world.record(evaluation, {"lib": []})
    await world.record(evaluation, {"top": []}, outputs=outputs)
    await world.record(evaluation, {"above": [], "free": []}, entries=["above", "free"])
    await world.end_stream(evaluation)
    await world.start("top")
    await world.commit(nar(out("top"), [out("lib")]))
    assert (await world.status("above"), await world.status("lib")) == (S.COMPLETED, S.QUEUED)
    await world.apply(BuildFailed(world.open.pop("top"), FailureKind.PERMANENT, "no", LIMITS))
    assert await world.status("lib") is S.SKIPPED
    async with graph_transaction(world.connection, START) as tx:
        await update_and_settle_need(tx, await ids(world, "above", "top", "lib"))
    await world.check()
    # The mark of what has failed means nothing: it says what was wanted at that time.
    for user, mark in (("user", True), ("other", False)):
        top = await world.id("top")
        await execute(
            world.connection, f"UPDATE derivation_build SET wanted = {mark} WHERE derivation = {top}"
        )
        await world.record(await world.evaluation(), {user: ["top"]}, entries=[user])
        await world.check()
        assert await world.status("lib") is S.SKIPPED


async def test_a_mark_that_is_right_is_not_written(world: World) -> None:
    await built(world)
    top, a = await ids(world, "top", "a")
    given = {"ids": [top, a], "marks": [True, False]}
    await execute(
        world.connection, f"UPDATE derivation_build SET wanted = true WHERE derivation IN ({top}, {a})"
    )
    assert await fetch_all(world.connection, WRITE_NEED, given) == [(a, False)]
    assert await fetch_all(world.connection, WRITE_NEED, given) == []


async def test_an_entry_point_that_is_wanted_by_itself_is_never_skipped(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": [], "b": []}, entries=["a"])
    await execute(world.connection, "UPDATE derivation_build SET status = 0, wanted = false")
    async with graph_transaction(world.connection, START) as tx:
        await skip_unwanted(tx, await ids(world, "a", "b"))
    assert (await world.status("a"), await world.status("b")) == (S.CREATED, S.SKIPPED)


@pytest.mark.parametrize("status", [S.SKIPPED, S.ABORTED])
async def test_a_thaw_begins_anew(world: World, status: BuildStatus) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await execute(world.connection, f"UPDATE derivation_build SET status = {int(status)}, attempt = 2")
    async with graph_transaction(world.connection, START) as tx:
        await thaw_wanted(tx, await ids(world, "a"))
    assert await world.status("a") is S.QUEUED
    assert await world.value("SELECT attempt FROM derivation_build") == 0


async def test_a_queued_build_whose_output_refers_to_what_is_missing_leaves_the_queue(world: World) -> None:
    evaluation = await world.evaluation()
    outputs = (OutputPath("out", out("top")), OutputPath("dev", out("top", "dev")))
    await world.record(evaluation, {"late": []}, entries=["late"])
    await world.record(evaluation, {"top": []}, entries=["top"], outputs=outputs)
    assert await world.status("top") is S.QUEUED
    await world.commit(nar(out("top"), [out("late")]))
    await world.check()
    assert await world.status("top") is S.CREATED
    await world.build("late")
    assert await world.status("top") is S.QUEUED


async def test_a_new_reference_to_what_is_fetchable_does_not_block(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": [], "there": [], "late": []}, entries=["top", "there", "late"])
    await world.build("there")
    await world.start("top")
    await world.commit(nar(out("top"), [out("there"), out("late")]))
    assert (
        await world.value(
            "SELECT blocking_deps FROM derivation_build WHERE derivation = %s", await world.id("top")
        )
        == 1
    )
    await world.check()
