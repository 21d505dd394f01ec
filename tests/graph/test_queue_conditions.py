"""The queue conditions of the seed, one by one: each keeps a build out of the queue, and takes it out again.

Source: seed "Queueing and Counters" (Queue Conditions, Queued Invariant, Needs Build).
"""

from __future__ import annotations

import pytest

from gradient.graph.assignments import ClaimBuild
from gradient.graph.can_start import promote, promote_closure, unpromote_ungated
from gradient.graph.need import thaw_wanted, update_and_settle_need
from gradient.graph.pg import Connection, execute
from gradient.graph.requeue import ReturnAssignment
from gradient.graph.transaction import graph_transaction
from gradient.model import BuildStatus
from tests.graph.world import START, WORKER, World

S = BuildStatus
# What ends a condition of the build `a`, and whether a passthrough needs it too.
CONDITIONS = {
    "walked": ("UPDATE derivation SET walked = false", True),
    "named": ("DELETE FROM build_job", True),
    "wanted": ("UPDATE derivation_build SET wanted = false", True),
    "probed": ("UPDATE derivation_build SET probed = false", False),
    "no blocking input": ("UPDATE derivation_build SET blocking_deps = 1", False),
    ".drv known": ("DELETE FROM cached_path", False),
    ".drv backed": ("UPDATE cached_path SET file_hash = NULL", False),
}


@pytest.fixture
async def world(connection: Connection) -> World:
    """With one build `a`, Queued."""
    world = World(connection)
    await world.setup()
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    assert await world.status("a") is S.QUEUED
    return world


async def settle(world: World) -> BuildStatus:
    """Take it out of the queue if it has no place there."""
    async with graph_transaction(world.connection, START) as tx:
        await unpromote_ungated(tx, [await world.id("a")])
    return await world.status("a")


async def queue(world: World) -> BuildStatus:
    """Queue it from Created if it may be, both ways there are."""
    for closure in (False, True):
        await execute(world.connection, f"UPDATE derivation_build SET status = {int(S.CREATED)}")
        async with graph_transaction(world.connection, START) as tx:
            queued = await promote_closure(tx, 1) if closure else await promote(tx, [await world.id("a")])
        assert (queued != []) is (await world.status("a") is S.QUEUED)
    return await world.status("a")


@pytest.mark.parametrize("passthrough", [False, True])
@pytest.mark.parametrize("condition", CONDITIONS)
async def test_each_condition_keeps_out_of_the_queue(world: World, condition: str, passthrough: bool) -> None:
    await execute(world.connection, f"UPDATE derivation_build SET cache_available = {passthrough}")
    assert await settle(world) is await queue(world) is S.QUEUED
    end, of_passthroughs_too = CONDITIONS[condition]
    await execute(world.connection, end)
    expected = S.CREATED if of_passthroughs_too or not passthrough else S.QUEUED
    assert await settle(world) is expected
    # Nobody queues through the names of an evaluation what has none.
    assert await queue(world) is expected


async def test_a_job_that_is_out_is_not_called_back(world: World) -> None:
    assignment = await world.claim("a")
    assert assignment is not None
    await execute(world.connection, CONDITIONS["wanted"][0])
    assert await settle(world) is S.QUEUED
    await execute(world.connection, "UPDATE derivation_build SET wanted = true")
    await world.apply(ReturnAssignment(assignment))
    assert await world.status("a") is S.QUEUED
    await execute(world.connection, CONDITIONS["wanted"][0])
    assert await settle(world) is S.CREATED


@pytest.mark.parametrize("status", sorted(set(S) - {S.CREATED}))
async def test_only_what_is_created_is_queued(world: World, status: BuildStatus) -> None:
    await execute(world.connection, f"UPDATE derivation_build SET status = {int(status)}")
    async with graph_transaction(world.connection, START) as tx:
        assert await promote(tx, [await world.id("a")]) == []
        assert await promote_closure(tx, 1) == []
        assert tx.moves.builds == {}
    assert await world.status("a") is status


@pytest.mark.parametrize("status", S)
async def test_only_what_is_queued_is_claimed(world: World, status: BuildStatus) -> None:
    await execute(world.connection, f"UPDATE derivation_build SET status = {int(status)}")
    claimed = await world.apply(ClaimBuild(await world.id("a"), False, WORKER, "w"))
    assert (claimed is not None) is (status is S.QUEUED)


# --- what wants a build ---------------------------------------------------------------------------


async def wanted(world: World) -> bool:
    """After the need was read afresh."""
    async with graph_transaction(world.connection, START) as tx:
        await update_and_settle_need(tx, [await world.id("a")])
    return bool(await world.value("SELECT wanted FROM derivation_build"))


@pytest.mark.parametrize("status", range(9))
async def test_entry_points_want_until_their_evaluation_is_aborted(world: World, status: int) -> None:
    await execute(world.connection, f"UPDATE evaluation SET status = {status}")
    assert await wanted(world) is (status != 7)


async def test_a_build_aborted_in_its_evaluation_is_not_wanted_there(world: World) -> None:
    await execute(world.connection, "UPDATE build_job SET aborted = true")
    assert not await wanted(world)
    assert await world.status("a") is S.SKIPPED
    await execute(world.connection, "UPDATE build_job SET aborted = false")
    assert await wanted(world)
    assert await world.status("a") is S.QUEUED


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("marked_there", [False, True])
async def test_an_abort_by_a_person_holds_until_somebody_else_asks(
    world: World, marked: bool, live: bool, marked_there: bool
) -> None:
    """Named by the evaluation it was aborted in, perhaps, and by another, and wanted all the same."""
    other = await world.evaluation()
    for statement in (
        f"UPDATE build_job SET aborted = {marked}",
        f"INSERT INTO build_job SELECT {other}, derivation, {marked_there}, now() FROM derivation_build",
        f"UPDATE evaluation SET status = {2 if live else 6} WHERE id = {other}",
        f"UPDATE derivation_build SET status = {int(S.ABORTED)}, wanted = true",
    ):
        await execute(world.connection, statement)
    first_asks = not marked  # it is live
    async with graph_transaction(world.connection, START) as tx:
        thawed = await thaw_wanted(tx, [await world.id("a")])
    assert bool(thawed) is (first_asks or (live and not marked_there))
    assert await world.status("a") is (S.QUEUED if thawed else S.ABORTED)


async def test_above_a_build_aborted_in_its_evaluation_the_stream_ends_with_failures(
    connection: Connection,
) -> None:
    world = World(connection)
    await world.setup()
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["mid"], "mid": ["a"], "a": [], "free": []}, ["top", "free"])
    a = await world.id("a")
    await execute(connection, f"UPDATE build_job SET aborted = true WHERE derivation = {a}")
    await execute(connection, f"UPDATE derivation_build SET status = {int(S.ABORTED)} WHERE derivation = {a}")
    await world.end_stream(evaluation)
    statuses = await world.statuses()
    assert {name: statuses[name] for name in ("top", "mid", "free")} == {
        "top": S.DEPENDENCY_FAILED,
        "mid": S.DEPENDENCY_FAILED,
        "free": S.QUEUED,
    }
