"""Answers of the upstream caches: passthroughs, and what becomes of the need below them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gradient.graph.assignments import ClaimBuild
from gradient.graph.build_failures import BuildFailed
from gradient.graph.builds import BuildCompleted
from gradient.graph.pg import Connection
from gradient.graph.requeue import RetryTransient
from gradient.graph.upstream import AnswerProbe
from gradient.model import BuildStatus, EvaluationStatus, FailureKind
from tests.graph.world import LIMITS, WORKER, World, nar, out

CHAIN = {"top": ["mid"], "mid": ["low"], "low": []}


@pytest.fixture
async def world(connection: Connection) -> World:
    """With an upstream cache: nothing may start before it was asked."""
    world = World(connection)
    await world.setup()
    await connection.execute(
        "INSERT INTO cache_upstream (cache, url, public_key)"
        " SELECT id, 'https://cache.example.org', 'key:k' FROM cache"
    )
    return world


async def answer(world: World, served: str = "", missed: str = "") -> None:
    """Answers for derivations by name; what changed must be what was new about them."""
    ids = {name: await world.id(name) for name in f"{served} {missed}".split()}
    await world.apply(
        AnswerProbe(tuple(ids[name] for name in served.split()), tuple(ids[name] for name in missed.split()))
    )
    await world.check()


async def fetch(world: World, name: str) -> int:
    assignment = await world.apply(ClaimBuild(await world.id(name), True, WORKER, "w"))
    assert assignment is not None
    return assignment


async def test_nothing_starts_before_the_answer(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, CHAIN, entries=["top"])
    # `top` alone: until it is a builder nobody needs what is below it.
    assert await world.statuses() == {
        "top": BuildStatus.CREATED,
        "mid": BuildStatus.SKIPPED,
        "low": BuildStatus.SKIPPED,
    }
    await answer(world, missed="top mid low")
    assert await world.status("low") is BuildStatus.QUEUED


async def test_what_a_passthrough_is_built_from_is_not_built(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, CHAIN, entries=["top"])
    await world.end_stream(evaluation)
    await answer(world, missed="top mid low")
    await answer(world, served="mid")
    assert await world.status("mid") is BuildStatus.QUEUED
    assert await world.status("low") is BuildStatus.SKIPPED
    assert await world.status("top") is BuildStatus.CREATED  # an upstream copy is never fetchable
    assignment = await fetch(world, "mid")
    await world.commit(nar(out("mid")))
    assert await world.apply(BuildCompleted(assignment, LIMITS))
    await world.build("top")
    assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED
    await world.check()


async def test_a_success_is_no_passthrough_and_a_failure_becomes_one(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"good": [], "bad": []}, entries=["good", "bad"])
    await answer(world, missed="good bad")
    await world.build("good")
    await world.fail("bad")
    await answer(world, served="good bad")
    assert await world.status("good") is BuildStatus.COMPLETED
    assert await world.status("bad") is BuildStatus.QUEUED
    assert await world.value("SELECT count(*) FROM derivation_build WHERE cache_available") == 1


async def test_a_failure_that_nobody_asks_for_is_not_fetched(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["bad", "other"], "bad": [], "other": []}, entries=["top"])
    await answer(world, missed="top bad other")
    await world.start("bad")
    await world.fail("other")
    await world.apply(BuildFailed(world.open.pop("bad"), FailureKind.PERMANENT, "it broke too", LIMITS))
    await answer(world, served="bad")
    assert await world.status("bad") is BuildStatus.SKIPPED


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_passthrough_given_up_is_built_at_once_if_anybody_needs_it(
    world: World, wanted: bool
) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["low", "bad"], "low": [], "bad": []}, entries=["top"])
    await answer(world, missed="top bad", served="low")
    for gone in (False, not wanted):
        assignment = await fetch(world, "low")
        if gone:
            await world.fail("bad")
        await world.apply(BuildFailed(assignment, FailureKind.SUBSTITUTE_UNAVAILABLE, "404", LIMITS))
        await world.check()
    assert await world.status("low") is (BuildStatus.QUEUED if wanted else BuildStatus.SKIPPED)
    assert not await world.value("SELECT bool_or(cache_available) FROM derivation_build")


async def test_a_passthrough_that_breaks_off_every_time_is_given_up_too(world: World) -> None:
    """Its last attempt and each one after it count as misses: nothing else ends the tries."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["low"], "low": []}, entries=["top"])
    await answer(world, missed="low", served="top")
    await world.end_stream(evaluation)
    waits, again, built = BuildStatus.FAILED_TRANSIENT, BuildStatus.QUEUED, BuildStatus.CREATED
    for expected in (waits, waits, again, built):
        assignment = await fetch(world, "top")
        await world.apply(BuildFailed(assignment, FailureKind.TRANSIENT, "it broke off", LIMITS))
        await world.check()
        assert await world.status("top") is expected
        world.now += timedelta(hours=1)
        await world.apply(RetryTransient(LIMITS))
    assert await world.status("low") is BuildStatus.QUEUED
    await world.build("low")
    await world.build("top")
    assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED


async def test_what_is_named_after_a_passthrough_failed_fails_with_it(world: World) -> None:
    """Nobody else could end its wait: the cascade of the failure was before it."""
    first = await world.evaluation()
    await world.record(first, {"low": []}, entries=["low"])
    await answer(world, served="low")
    assignment = await fetch(world, "low")
    await world.apply(BuildFailed(assignment, FailureKind.PERMANENT, "no such thing", LIMITS))
    await world.record(first, {"late": ["low"]}, entries=["late"])
    await answer(world, missed="late")
    assert await world.status("late") is BuildStatus.CREATED
    await world.end_stream(first)
    assert await world.status("late") is BuildStatus.DEPENDENCY_FAILED
    assert await world.evaluation_status(first) is EvaluationStatus.FAILED
    await world.check()
