"""A passthrough ends what comes from below: neither need nor failure goes through it.

Source: seed "Queueing and Counters" (Needs Build, Dependency Failure).
"""

from __future__ import annotations

import pytest

from gradient.graph.need import update_and_settle_need
from gradient.graph.pg import Connection, execute
from gradient.graph.transaction import graph_transaction
from gradient.model import BuildStatus
from tests.graph.world import START, World

S = BuildStatus
GRAPH = {"top": ["relay"], "relay": ["low"], "low": ["deep"], "deep": []}


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def with_relay(world: World, entries: list[str]) -> int:
    """GRAPH, with `relay` served by an upstream cache as a probe would leave it."""
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=entries)
    relay = await world.id("relay")
    async with graph_transaction(world.connection, START) as tx:
        await execute(
            world.connection, f"UPDATE derivation_build SET cache_available = true WHERE derivation = {relay}"
        )
        await update_and_settle_need(tx, [relay])
        await execute(world.connection, f"UPDATE derivation_build SET status = 1 WHERE derivation = {relay}")
    await world.check()
    return evaluation


async def test_what_a_passthrough_was_made_of_is_not_wanted_through_it(world: World) -> None:
    await with_relay(world, ["top"])
    assert await world.statuses() == {
        "top": S.CREATED,
        "relay": S.QUEUED,
        "low": S.SKIPPED,
        "deep": S.SKIPPED,
    }


async def test_a_fresh_failure_stops_at_a_passthrough(world: World) -> None:
    await with_relay(world, ["top", "low"])
    await world.fail("deep")
    await world.check()
    assert await world.statuses() == {
        "top": S.CREATED,
        "relay": S.QUEUED,
        "low": S.DEPENDENCY_FAILED,
        "deep": S.FAILED_PERMANENT,
    }


async def test_the_repeated_walk_stops_at_a_passthrough_too(world: World) -> None:
    evaluation = await with_relay(world, ["top", "low"])
    await world.fail("deep")
    # As if the cascade had been missed.
    low = await world.id("low")
    await execute(world.connection, f"UPDATE derivation_build SET status = 0 WHERE derivation = {low}")
    await world.end_stream(evaluation)
    await world.check()
    statuses = await world.statuses()
    assert (statuses["low"], statuses["relay"], statuses["top"]) == (S.DEPENDENCY_FAILED, S.QUEUED, S.CREATED)


async def test_a_build_waits_for_the_passthrough_itself(world: World) -> None:
    """An upstream copy is never fetchable: its output comes into our cache first."""
    await with_relay(world, ["top"])
    assert (
        await world.value(
            "SELECT blocking_deps FROM derivation_build WHERE derivation = %s", await world.id("top")
        )
        == 1
    )
    assert not await world.value("SELECT bool_or(fetchable) FROM derivation_build")
