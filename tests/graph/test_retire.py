"""Cached paths that go: what rested on them moves back, is made again, and is as it was afterwards."""

from __future__ import annotations

import itertools
from datetime import timedelta

import attrs
import pytest

from gradient.graph.build_failures import BuildFailed
from gradient.graph.demote import DemoteCacheClaim, DemoteMissingNar, DemotePath
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.failure import RetryLimits
from gradient.graph.heal import Repair
from gradient.graph.pg import Connection
from gradient.graph.promises import PromiseDerivations
from gradient.graph.requeue import RetryTransient
from gradient.graph.retire import Retired, reopen, retire_cached_paths
from gradient.graph.transaction import Transaction
from gradient.graph.walk_completeness import unwalk_derivations
from gradient.model import BuildStatus, EvaluationStatus, FailureKind
from tests.graph.world import LIMITS, World, drv, hash_part, nar, out

S = BuildStatus
V = EvaluationStatus
# `lib` is referred to by `tool` and `app` at run time; `gcc` is needed to build only.
GRAPH = {"app": ["tool", "lib"], "tool": ["lib", "gcc"], "lib": ["gcc"], "gcc": []}
REFERENCES = {"app": ["tool", "lib"], "tool": ["lib"], "lib": [], "gcc": []}
COUNTERS = """
    SELECT array_agg((d.name, b.fetchable, b.blocking_deps, b.missing_runtime_deps) ORDER BY d.name)::text
    FROM derivation d JOIN derivation_build b ON b.derivation = d.id
"""


@attrs.frozen
class Retire:
    """The retirement of paths as a message of its own."""

    hashes: tuple[str, ...]

    async def apply(self, tx: Transaction) -> Retired:
        return await retire_cached_paths(tx, self.hashes)


@attrs.frozen
class Reopen:
    """What an answer of the upstream probe would do: settle rows afresh."""

    ids: tuple[int, ...]

    async def apply(self, tx: Transaction) -> None:
        await reopen(tx, self.ids)


@attrs.frozen
class Unwalk:
    ids: tuple[int, ...]

    async def apply(self, tx: Transaction) -> None:
        await unwalk_derivations(tx, self.ids)


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def built(world: World) -> int:
    """An evaluation of GRAPH that completed."""
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["app"])
    await world.end_stream(evaluation)
    for name in ("gcc", "lib", "tool", "app"):
        await world.build(name, REFERENCES[name])
    assert await world.evaluation_status(evaluation) is V.COMPLETED
    return evaluation


async def counters(world: World) -> str:
    return str(await world.value(COUNTERS))


async def retire(world: World, *names: str) -> Retired:
    return await world.apply(Retire(tuple(hash_part(name) for name in names)))


async def held(world: World, path: str) -> bool:
    query = "SELECT EXISTS (SELECT FROM cached_path WHERE hash = %s)"
    return bool(await world.value(query, path.removeprefix("/nix/store/")[:32]))


# --- retirement -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gone", [c for n in (1, 2, 4) for c in itertools.combinations(sorted(GRAPH), n)], ids="-".join
)
async def test_retired_and_committed_again_is_as_it_was(world: World, gone: tuple[str, ...]) -> None:
    await built(world)
    before = await counters(world)
    await retire(world, *gone)
    await world.check()
    assert await counters(world) != before
    for name in gone:
        await world.commit(nar(out(name), map(out, REFERENCES[name])))
        await world.check()
    assert await counters(world) == before
    # Nothing has to be built: what was reset is what the cache holds again.
    assert set((await world.statuses()).values()) <= {S.COMPLETED, S.SUBSTITUTED}


async def test_what_an_entry_point_refers_to_is_built_again(world: World) -> None:
    await built(world)
    assert (await retire(world, "lib")).producers == (await world.id("lib"),)
    assert await world.statuses() == {
        "app": S.COMPLETED,
        "tool": S.COMPLETED,
        "lib": S.QUEUED,
        "gcc": S.COMPLETED,
    }
    assert await world.value("SELECT count(*) FROM derivation_build WHERE fetchable") == 1
    assert world.moves.queued == [await world.id("lib")]
    await world.build("lib")
    await world.check()
    assert await world.value("SELECT count(*) FROM derivation_build WHERE fetchable") == 4


async def test_what_nobody_wants_is_not_built_again(world: World) -> None:
    await built(world)
    await retire(world, "gcc")
    assert await world.status("gcc") is S.SKIPPED
    # Its user goes too: now it is needed.
    await retire(world, "lib")
    assert (await world.status("gcc"), await world.status("lib")) == (S.QUEUED, S.CREATED)
    await world.check()


async def test_what_was_never_wanted_is_skipped_again(world: World) -> None:
    evaluation = await world.evaluation()
    await world.commit(nar(out("app")))
    await world.record(evaluation, {"app": ["lib"], "lib": []}, entries=["app"])
    await world.end_stream(evaluation)
    assert await world.statuses() == {"app": S.SUBSTITUTED, "lib": S.SKIPPED}
    await world.commit(nar(out("lib")))
    assert await world.status("lib") is S.SUBSTITUTED
    await retire(world, "lib")
    assert await world.status("lib") is S.SKIPPED
    await world.check()


async def test_an_aborted_evaluation_wants_nothing_back(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["app"])
    await world.end_stream(evaluation)
    await world.build("gcc")
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    await retire(world, "gcc")
    assert await world.status("gcc") is S.SKIPPED
    await world.check()


async def test_a_producer_starts_from_the_beginning(world: World) -> None:
    await built(world)
    await world.connection.execute("UPDATE derivation_build SET attempt = 2, substituted = true")
    await retire(world, "lib")
    query = "SELECT (attempt, substituted)::text FROM derivation_build WHERE derivation = %s"
    assert await world.value(query, await world.id("lib")) == "(0,f)"
    assert await world.value(query, await world.id("gcc")) == "(2,t)"


async def test_queued_builds_above_leave_the_queue_and_jobs_go_on(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {**GRAPH, "other": ["gcc"]}, entries=["app", "other"])
    await world.end_stream(evaluation)
    await world.build("gcc")
    await world.start("other")
    assert await world.status("lib") is S.QUEUED
    await retire(world, "gcc")
    assert await world.status("lib") is S.CREATED
    assert await world.status("other") is S.BUILDING
    assert await world.id("lib") in world.moves.unqueued
    await world.check()
    await world.build("gcc")
    assert await world.status("lib") is S.QUEUED
    await world.check()


async def test_a_lost_drv_takes_its_owner_out_of_the_queue(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["app"])
    assert await world.status("gcc") is S.QUEUED
    await retire(world, "gcc.drv")
    assert await world.status("gcc") is S.CREATED
    await world.check()
    await world.commit(nar(drv("gcc")))
    assert await world.status("gcc") is S.QUEUED
    await world.check()


async def test_a_retired_path_leaves_a_note_for_the_removal_of_its_object(world: World) -> None:
    await built(world)
    retired = await retire(world, "app", "gcc.drv", "unknown")
    assert set(retired.hashes) == {hash_part("app"), hash_part("gcc.drv")}
    assert retired.references == {hash_part("tool"), hash_part("lib")}
    query = "SELECT array_agg(package ORDER BY package) FROM retired_nar"
    assert await world.value(query) == ["app", "gcc.drv"]
    assert await world.value("SELECT count(*) FROM cached_path_signature s") == 6
    await retire(world, "app", "gcc.drv", "unknown")
    assert await world.value("SELECT count(*) FROM retired_nar") == 2


async def test_two_derivations_of_one_path_lose_it_together(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": [], "b": [], "top": ["a", "b"]}, entries=["top"])
    await world.connection.execute(
        "UPDATE derivation_output SET hash = (SELECT min(hash) FROM derivation_output)"
        " WHERE derivation IN (SELECT id FROM derivation WHERE name IN ('a', 'b'))"
    )
    path = await world.value("SELECT min(hash) FROM derivation_output")
    await world.commit(nar(f"/nix/store/{path}-x"))
    assert await world.status("a") is await world.status("b") is S.SUBSTITUTED
    await world.apply(Retire((path,)))
    await world.check()
    assert await world.status("a") is await world.status("b") is S.QUEUED


# --- demotion -------------------------------------------------------------------------------------


async def test_a_missing_nar_is_made_again(world: World) -> None:
    await built(world)
    await world.apply(DemoteMissingNar((hash_part("lib"),)))
    assert await world.status("lib") is S.QUEUED
    await world.check()


async def test_a_missing_source_takes_what_refers_to_it_and_is_walked_again(world: World) -> None:
    source = "/nix/store/" + hash_part("src") + "-src"
    evaluation = await world.evaluation()
    await world.commit(nar(source))
    await world.record(evaluation, {"lib": []}, entries=["lib"])
    await world.connection.execute(
        "INSERT INTO derivation_input_source SELECT id, %s, %s FROM derivation", (hash_part("src"), source)
    )
    await world.end_stream(evaluation)
    await world.start("lib")
    await world.commit(nar(out("lib"), [source]))
    await world.complete("lib")
    await world.apply(AbortEvaluation(evaluation, "unused"))
    await world.apply(DemoteMissingNar((hash_part("src"),)))
    assert not await held(world, source)
    assert not await held(world, out("lib"))
    await world.check()
    # It is wanted, so it stays startable: it must be able to fail in words.
    assert await world.status("lib") is S.QUEUED
    assert await world.value("SELECT walked FROM derivation")
    for _ in range(3):
        await world.fail("lib", FailureKind.INPUTS_UNAVAILABLE, missing=(source,))
        world.now += timedelta(hours=1)
        await world.apply(RetryTransient(LIMITS))
        await world.check()
    assert await world.status("lib") is S.FAILED_PERMANENT
    assert not await world.value("SELECT walked FROM derivation")


async def test_what_must_be_built_again_and_is_not_walked_any_more_ends_its_evaluation(world: World) -> None:
    """`lib` is done when its source is lost: the next walk is to bring that. Then its output is lost too."""
    source = "/nix/store/" + hash_part("src") + "-src"
    evaluation = await world.evaluation()
    await world.commit(nar(source))
    await world.record(evaluation, {"lib": [], "other": []}, entries=["lib", "other"])
    await world.connection.execute(
        "INSERT INTO derivation_input_source SELECT id, %s, %s FROM derivation WHERE name = 'lib'",
        (hash_part("src"), source),
    )
    await world.end_stream(evaluation)
    await world.build("lib")
    await world.apply(DemoteMissingNar((hash_part("src"),)))
    await world.apply(DemoteMissingNar((hash_part("lib"),)))
    assert await world.status("lib") is S.CREATED
    await world.apply(Repair(evaluation))
    assert await world.evaluation_status(evaluation) is V.BUILDING  # of `other`
    await world.build("other")
    second = await world.evaluation()
    await world.apply(Repair(evaluation))
    assert await world.evaluation_status(evaluation) is V.BUILDING  # the second may walk it
    await world.apply(AbortEvaluation(second, "unused"))
    await world.apply(Repair(evaluation))
    assert await world.evaluation_status(evaluation) is V.FAILED
    assert await world.value("SELECT message FROM evaluation_message WHERE level = 0") == (
        "lib must be built again, and its record was taken out of the graph: evaluate again"
    )
    await world.check()
    # As that says.
    third = await world.evaluation()
    await world.commit(nar(source))
    await world.record(third, {"lib": []}, entries=["lib"])
    await world.end_stream(third)
    await world.build("lib")
    assert await world.evaluation_status(third) is V.COMPLETED


async def test_a_damaged_path_is_made_again_unless_it_came_since(world: World) -> None:
    await built(world)
    seen = world.now
    assert await world.apply(DemotePath((hash_part("lib"),), seen)) == (await world.id("lib"),)
    assert await world.status("lib") is S.QUEUED
    await world.build("lib")
    assert await world.apply(DemotePath((hash_part("lib"),), seen)) == ()
    assert await world.status("lib") is S.COMPLETED
    await world.check()


async def test_what_has_no_producer_is_only_suspected(world: World) -> None:
    await built(world)
    await world.apply(DemotePath((hash_part("gcc.drv"), hash_part("nobody")), world.now))
    assert await held(world, drv("gcc"))
    assert world.moves.suspected == {hash_part("gcc.drv"), hash_part("nobody")}
    assert not world.moves.empty


async def test_a_failed_producer_is_tried_again_unless_its_builder_said_no(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": [], "b": []}, entries=["a", "b"])
    for name, kind in (("a", FailureKind.TIMEOUT), ("b", FailureKind.PERMANENT)):
        await world.fail(name, kind)
        await world.commit(nar(out(name)))
    await world.apply(DemoteMissingNar((hash_part("a"), hash_part("b"))))
    assert await world.status("a") is S.QUEUED
    assert await world.status("b") is S.FAILED_PERMANENT
    await world.check()


async def test_a_cache_that_promised_too_much_is_not_believed(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["app"])
    await world.connection.execute(
        "UPDATE derivation_build SET cache_available = true WHERE derivation = %s", (await world.id("lib"),)
    )
    await world.apply(Reopen((await world.id("lib"), await world.id("gcc"))))
    await world.apply(DemoteCacheClaim((await world.id("lib"), await world.id("app"))))
    assert await world.status("lib") is S.CREATED
    assert await world.status("gcc") is S.QUEUED
    await world.check()


# --- the missing-input self-heal ------------------------------------------------------------------


async def test_a_build_waits_for_the_input_that_is_made_again(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"app": ["lib"], "lib": []}, entries=["app"])
    await world.end_stream(evaluation)
    await world.build("lib")
    await world.fail("app", FailureKind.INPUTS_UNAVAILABLE, missing=(out("lib"),))
    assert (await world.status("app"), await world.status("lib")) == (S.FAILED_TRANSIENT, S.QUEUED)
    await world.check()
    world.now += timedelta(hours=1)
    await world.apply(RetryTransient(LIMITS))
    assert await world.status("app") is S.CREATED
    assert await world.claim("app") is None
    await world.build("lib")
    assert await world.status("app") is S.QUEUED
    await world.build("app")
    assert await world.evaluation_status(evaluation) is V.COMPLETED
    await world.check()


async def test_a_worker_that_had_not_begun_uses_up_an_attempt_too(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"app": ["lib"], "lib": []}, entries=["app"])
    await world.build("lib")
    await world.claim("app")
    message = BuildFailed(
        world.open.pop("app"),
        FailureKind.INPUTS_UNAVAILABLE,
        "not in the cache",
        LIMITS,
        missing_paths=(hash_part("lib"),),
    )
    await world.apply(message)
    assert await world.status("app") is S.FAILED_TRANSIENT
    assert await world.value("SELECT attempt FROM derivation_build WHERE status = 8") == 1
    await world.check()


async def test_three_losses_are_enough(world: World) -> None:
    """Attempts run out first; the breaker keeps the last input from being made once more for nothing."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"app": ["lib"], "lib": []}, entries=["app"])
    await world.end_stream(evaluation)
    for _ in range(3):
        await world.build("lib")
        world.now += timedelta(hours=1)
        await world.apply(RetryTransient(LIMITS))
        await world.fail("app", FailureKind.INPUTS_UNAVAILABLE, missing=(out("lib"),))
        await world.check()
    assert await world.status("app") is S.FAILED_PERMANENT
    assert await world.evaluation_status(evaluation) is V.FAILED
    # Nobody needs it now; its entry point has failed.
    assert await world.status("lib") is S.SKIPPED


async def test_an_input_is_not_made_again_once_that_has_helped_nobody(world: World) -> None:
    """The breaker is open after as many losses as are set: the next is final, and mends nothing."""
    limits = RetryLimits(max_attempts=10, inputs_unavailable_max_loops=1)
    evaluation = await world.evaluation()
    await world.record(evaluation, {"app": ["lib"], "lib": []}, entries=["app", "lib"])
    for status, lib in ((S.FAILED_TRANSIENT, S.QUEUED), (S.FAILED_PERMANENT, S.COMPLETED)):
        await world.build("lib")
        world.now += timedelta(hours=1)
        await world.apply(RetryTransient(limits))
        await world.start("app")
        kind = FailureKind.INPUTS_UNAVAILABLE
        message = BuildFailed(world.open.pop("app"), kind, "gone", limits, missing_paths=(hash_part("lib"),))
        await world.apply(message)
        assert (await world.status("app"), await world.status("lib")) == (status, lib)
        await world.check()


async def test_an_input_that_only_another_evaluation_named_is_adopted(world: World) -> None:
    first = await built(world)
    again = await world.evaluation()
    await world.record(again, {"user": ["app"]}, entries=["user"])
    await world.end_stream(again)
    # `lib` is reached through what `app` refers to.
    await world.connection.execute("DELETE FROM evaluation WHERE id = %s", (first,))
    await world.fail("user", FailureKind.INPUTS_UNAVAILABLE, missing=(out("lib"),))
    assert await world.status("lib") is S.QUEUED
    query = "SELECT array_agg(evaluation) FROM build_job WHERE derivation = %s"
    assert await world.value(query, await world.id("lib")) == [again]
    await world.check()


async def test_an_input_that_nobody_can_name_has_its_users_walked_again(world: World) -> None:
    first = await built(world)
    again = await world.evaluation()
    await world.record(again, {"user": ["app"]}, entries=["user"])
    await world.end_stream(again)
    await world.start("user")
    await world.connection.execute("DELETE FROM evaluation WHERE id = %s", (first,))
    await world.apply(AbortEvaluation(again, "by a person"))
    await world.apply(
        BuildFailed(
            world.open.pop("user"),
            FailureKind.INPUTS_UNAVAILABLE,
            "gone",
            LIMITS,
            missing_paths=(hash_part("lib"),),
        )
    )
    query = "SELECT array_agg(name ORDER BY name) FROM derivation WHERE NOT walked"
    assert await world.value(query) == ["app", "tool"]
    await world.check()


# --- un-walking -----------------------------------------------------------------------------------


async def test_nothing_above_an_unwalked_derivation_is_known(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, GRAPH, entries=["app"])
    known = "SELECT array_agg(name ORDER BY name) FROM derivation WHERE walked AND unwalked_inputs = 0"
    assert await world.value(known) == sorted(GRAPH)
    await world.apply(Unwalk((await world.id("lib"),)))
    assert await world.value(known) == ["gcc"]
    # Nor is it promised to a walk that has asked before.
    everything = tuple([await world.id(name) for name in GRAPH])
    assert await world.apply(PromiseDerivations(everything)) == {await world.id("gcc")}
    assert await world.status("gcc") is S.QUEUED  # `tool` needs it
    await world.check()
    await world.apply(Unwalk((await world.id("tool"), await world.id("gcc"))))
    assert await world.value(known) is None
    assert await world.status("gcc") is S.SKIPPED  # nobody that could start needs it
    await world.check()
    await world.record(evaluation, GRAPH, entries=["app"])
    assert await world.value(known) == sorted(GRAPH)
    assert await world.status("gcc") is S.QUEUED
    await world.check()


async def test_an_unwalked_derivation_leaves_the_queue(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": [], "b": []}, entries=["a", "b"])
    await world.start("b")
    await world.apply(Unwalk((await world.id("a"), await world.id("b"))))
    assert (await world.status("a"), await world.status("b")) == (S.CREATED, S.BUILDING)
    assert world.moves.unqueued == [await world.id("a")]
    await world.check()
    await world.record(evaluation, {"a": [], "b": []}, entries=["a", "b"])
    assert await world.status("a") is S.QUEUED
    await world.check()


async def test_a_walk_that_was_overtaken_is_made_again(world: World) -> None:
    """It stopped at what was known, and that was un-walked: no fault of the worker."""
    await built(world)
    again = await world.evaluation()
    await world.record(again, {"user": ["app"]}, entries=["user"])
    await world.apply(Unwalk((await world.id("gcc"),)))
    await world.end_stream(again)
    assert await world.evaluation_status(again) is V.QUEUED
    await world.start_evaluation(again)
    await world.record(again, {"user": ["app"], **GRAPH}, entries=["user"])
    await world.end_stream(again)
    assert await world.evaluation_status(again) is V.BUILDING
    await world.check()


async def test_a_worker_that_leaves_a_gap_is_told_so_the_second_time(world: World) -> None:
    await built(world)
    again = await world.evaluation()
    await world.record(again, {"user": ["app", "never"]}, entries=["user"])
    await world.apply(Unwalk((await world.id("gcc"),)))
    await world.end_stream(again)
    assert await world.evaluation_status(again) is V.QUEUED
    await world.start_evaluation(again)
    await world.end_stream(again)
    assert await world.evaluation_status(again) is V.FAILED
    message = await world.value("SELECT message FROM evaluation_message WHERE evaluation = %s", again)
    assert f"without the record of {drv('never')}," in message
    await world.check()
