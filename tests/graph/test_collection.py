"""Garbage: what goes, what stays, and what becomes of whom it served."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

import attrs
import pytest

from gradient.graph.derivation_gc import CollectDerivations, orphan_derivations
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.evaluation_gc import CollectEvaluations, expired_evaluations
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.path_gc import Ages, CollectPaths, unneeded_paths
from gradient.graph.pg import Connection
from gradient.graph.promises import PromiseDerivations, PromisePaths
from gradient.graph.record import Record
from gradient.graph.retire import retire_cached_paths
from gradient.graph.transaction import Transaction
from gradient.model import (
    BuildStatus,
    CachedSource,
    EntryPoint,
    EvaluationStatus,
    Repository,
)
from tests.graph.world import World, drv, hash_part, nar, out

S = BuildStatus
CHAIN = {"top": ["mid"], "mid": ["low"], "low": []}
DAY = timedelta(days=1)


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


@attrs.frozen
class Retire:
    name: str

    async def apply(self, tx: Transaction) -> None:
        await retire_cached_paths(tx, [hash_part(self.name)])


async def evaluated(world: World, graph: dict[str, list[str]], entries: Collection[str]) -> int:
    """An evaluation past its walk; a part of `graph` that is known is pruned, as a worker does."""
    evaluation = await world.evaluation()
    await world.record(evaluation, graph, entries=entries)
    await world.end_stream(evaluation)
    return evaluation


async def pruned(world: World, entries: Collection[str]) -> int:
    """An evaluation that found everything known."""
    evaluation = await world.evaluation()
    await world.apply(Record(evaluation, (), tuple(EntryPoint(name, drv(name)) for name in entries)))
    await world.end_stream(evaluation)
    return evaluation


async def build_all(world: World, *names: str) -> None:
    for name in names:
        await world.build(name)


async def names_of(world: World, evaluation: int) -> set[str]:
    query = "SELECT d.name FROM build_job j JOIN derivation d ON d.id = j.derivation WHERE evaluation = %s"
    cursor = await world.connection.execute(query, (evaluation,))
    return {row[0] for row in await cursor.fetchall()}


async def derivations(world: World) -> set[str]:
    cursor = await world.connection.execute("SELECT name FROM derivation")
    return {row[0] for row in await cursor.fetchall()}


# --- evaluations ----------------------------------------------------------------------------------


async def task(world: World, keep: int) -> int:
    await world.connection.execute(
        "INSERT INTO task (project, name, repository, keep_evaluations, created_at)"
        " SELECT p.id, 't' || count(t.id), 'u', %s, now()"
        " FROM project p LEFT JOIN task t ON true GROUP BY p.id",
        (keep,),
    )
    return int(await world.value("SELECT max(id) FROM task"))


async def ended(world: World, of: int | None = None) -> int:
    evaluation = await world.apply(CreateEvaluation("main", Repository("git+https://example.org/x"), task=of))
    await world.apply(AbortEvaluation(evaluation, "enough"))
    return evaluation


async def expired(world: World, keep: int = 2, wedged_hours: int = 24) -> list[int]:
    before = world.now - timedelta(hours=wedged_hours)
    return await expired_evaluations(world.connection, keep_without_task=keep, wedged_before=before)


async def test_each_task_keeps_its_newest(world: World) -> None:
    one, other = await task(world, 1), await task(world, 3)
    mine = [await ended(world, one) for _ in range(3)]
    theirs = [await ended(world, other) for _ in range(5)]
    loose = [await ended(world) for _ in range(3)]
    assert await expired(world) == sorted([*mine[:2], *theirs[:2], loose[0]], reverse=True)
    assert await expired(world, keep=0) == sorted([*mine[:2], *theirs[:2]], reverse=True)
    await world.connection.execute("UPDATE task SET keep_evaluations = 0")
    assert await expired(world) == [loose[0]]


async def test_one_that_ended_last_is_the_newest(world: World) -> None:
    """It had begun before all others, and somebody has just followed it to its end."""
    long = await world.apply(CreateEvaluation("main", Repository("git+https://example.org/x")))
    short = [await ended(world) for _ in range(3)]
    await world.apply(AbortEvaluation(long, "enough"))
    assert await expired(world) == [short[1], short[0]]


async def test_an_evaluation_that_gets_somewhere_keeps_its_tasks_old_ones(world: World) -> None:
    mine = await task(world, 1)
    old = [await ended(world, mine) for _ in range(2)]
    loose = [await ended(world) for _ in range(3)]
    active = await world.apply(CreateEvaluation("main", Repository("git+https://example.org/x"), task=mine))
    assert await expired(world) == [loose[0]]
    world.now += 2 * DAY
    assert await expired(world) == [loose[0], old[0]]
    # A phase it came to since is a sign of life; a write of its row is not.
    await world.connection.execute("UPDATE evaluation SET updated_at = %s WHERE id = %s", (world.now, active))
    assert await expired(world) == [loose[0], old[0]]
    await world.start_evaluation(active)
    assert await expired(world) == [loose[0]]


async def test_an_active_evaluation_is_never_deleted(world: World) -> None:
    active, done = await world.evaluation(), await ended(world)
    assert await world.apply(CollectEvaluations((active, done))) == (done,)
    assert await world.evaluation_status(active) is EvaluationStatus.EVALUATING_DERIVATION
    assert await world.apply(CollectEvaluations((done,))) == ()


async def test_neighbours_are_unlinked(world: World) -> None:
    one, two, three = [await ended(world) for _ in range(3)]
    for before, after in ((one, two), (two, three)):
        await world.connection.execute("UPDATE evaluation SET next = %s WHERE id = %s", (after, before))
        await world.connection.execute("UPDATE evaluation SET previous = %s WHERE id = %s", (before, after))
    await world.apply(CollectEvaluations((two,)))
    assert await world.value("SELECT array_agg((previous, next)) FROM evaluation") == [(None, None)] * 2


async def test_everything_of_its_own_goes_with_it(world: World) -> None:
    evaluation = await evaluated(world, CHAIN, ["top"])
    await build_all(world, "low", "mid", "top")
    await world.apply(CollectEvaluations((evaluation,)))
    for table in ("build_job", "entry_point", "phase_event", "evaluation_message", "evaluation_metric"):
        assert await world.value(f"SELECT count(*) FROM {table}") == 0
    # What was done stays on record.
    assert await world.value("SELECT count(*) FROM build_attempt WHERE evaluation IS NULL") == 3
    assert await world.value("SELECT count(*) FROM dispatched_job WHERE evaluation IS NULL") == 4
    await world.check()


async def test_what_others_wait_for_is_adopted_and_keeps_its_place(world: World) -> None:
    """Only the first evaluation walked `low`; the second stopped at `mid`, which it names."""
    first = await evaluated(world, CHAIN, ["top"])
    second = await evaluated(world, {"other": ["mid"]}, ["other"])
    await world.connection.execute(
        "DELETE FROM build_job WHERE evaluation = %s AND derivation = %s", (second, await world.id("low"))
    )
    await world.apply(AbortEvaluation(first, "by a person"))
    assert await world.status("low") is S.QUEUED
    await world.apply(CollectEvaluations((first,)))
    assert await names_of(world, second) == {"other", "mid", "low"}
    assert await world.status("low") is S.QUEUED
    assert world.moves.unqueued == []
    await world.check()
    await build_all(world, "low", "mid", "other")
    assert await world.evaluation_status(second) is EvaluationStatus.COMPLETED
    await world.check()


async def test_what_nobody_names_any_more_leaves_the_queue(world: World) -> None:
    """An ended evaluation wants it, and adopts nothing."""
    first = await evaluated(world, CHAIN, ["top"])
    for name, below in (("low", ()), ("mid", ("low",)), ("top", ("mid", "low"))):
        await world.build(name, below)
    second = await pruned(world, ["top"])
    assert await names_of(world, second) == {"top"}
    await world.apply(Retire("low"))
    assert await world.status("low") is S.QUEUED
    await world.apply(CollectEvaluations((first,)))
    assert await world.status("low") is S.CREATED
    assert world.moves.unqueued == [await world.id("low")]
    await world.check()
    # The next evaluation names it, and it goes on.
    third = await evaluated(world, {"user": ["top"]}, ["user"])
    assert "low" in await names_of(world, third)
    assert await world.status("low") is S.QUEUED
    await build_all(world, "low", "user")
    assert await world.evaluation_status(third) is EvaluationStatus.COMPLETED
    await world.check()


async def test_without_an_open_name_nothing_is_adopted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await evaluated(world, CHAIN, ["top"])
    await build_all(world, "low", "mid", "top")

    async def adopt(tx: Transaction) -> int:
        raise AssertionError("walked for nothing")

    monkeypatch.setattr("gradient.graph.evaluation_gc.adopt_pending_closures", adopt)
    await world.apply(CollectEvaluations((first,)))
    # Nobody wants what an aborted evaluation named alone.
    second = await evaluated(world, {"open": []}, ["open"])
    await world.apply(AbortEvaluation(second, "by a person"))
    await world.apply(CollectEvaluations((second,)))
    third, fourth = [await evaluated(world, {"shared": []}, ["shared"]) for _ in range(2)]
    await world.apply(AbortEvaluation(third, "by a person"))
    with pytest.raises(AssertionError, match="walked for nothing"):
        await world.apply(CollectEvaluations((third,)))
    assert await world.evaluation_status(fourth) is EvaluationStatus.BUILDING


async def test_its_entry_points_want_nothing_any_more(world: World) -> None:
    """A Completed evaluation still wants what it asked for, until it is deleted."""
    first = await evaluated(world, CHAIN, ["top"])
    await build_all(world, "low", "mid", "top")
    await world.apply(Retire("top"))
    assert await world.status("top") is S.QUEUED
    await world.start("top")
    await world.apply(CollectEvaluations((first,)))
    assert await world.status("top") is S.BUILDING  # it ends undisturbed
    await world.check()
    await world.apply(Retire("mid"))
    assert await world.status("mid") is S.SKIPPED
    await world.check()


async def test_an_evaluation_that_waited_for_what_only_the_deleted_one_wanted_ends(world: World) -> None:
    first = await evaluated(world, CHAIN, ["top"])
    await build_all(world, "low", "mid", "top")
    await world.apply(Retire("top"))
    second = await world.evaluation()
    await world.record(second, {"leaf": []}, entries=["leaf"])
    await world.connection.execute(
        "INSERT INTO build_job SELECT %s, id, false, now() FROM derivation WHERE name = 'top'", (second,)
    )
    await world.end_stream(second)
    await world.build("leaf")
    assert await world.evaluation_status(second) is EvaluationStatus.BUILDING
    await world.apply(CollectEvaluations((first,)))
    assert await world.status("top") is S.SKIPPED
    assert await world.evaluation_status(second) is EvaluationStatus.COMPLETED
    await world.check()


# --- derivations ----------------------------------------------------------------------------------


def cutoffs(world: World) -> dict[str, datetime]:
    return {"created_before": world.now - DAY, "promised_since": world.now - DAY}


async def orphans(world: World) -> list[int]:
    return await orphan_derivations(world.connection, **cutoffs(world))


async def collect(world: World, *names: str) -> int:
    """The pass as it is, or with these candidates."""
    candidates = [await world.id(name) for name in names] if names else await orphans(world)
    return await world.apply(CollectDerivations(tuple(candidates), **cutoffs(world)))


async def abandoned(world: World, graph: dict[str, list[str]], entries: Collection[str]) -> None:
    """Derivations of a deleted evaluation, two days old."""
    evaluation = await evaluated(world, graph, entries)
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    await world.apply(CollectEvaluations((evaluation,)))
    world.now += 2 * DAY


async def test_what_nothing_reaches_goes(world: World) -> None:
    await abandoned(world, {**CHAIN, "shared": ["low"]}, ["top", "shared"])
    await pruned(world, ["shared"])
    assert await orphans(world) == sorted([await world.id("top"), await world.id("mid")], reverse=True)
    assert await collect(world) == 2
    assert await derivations(world) == {"shared", "low"}
    await world.check()
    assert await collect(world) == 0


async def test_a_day_is_waited(world: World) -> None:
    await abandoned(world, CHAIN, ["top"])
    world.now -= 2 * DAY - timedelta(minutes=1)
    assert await orphans(world) == []
    assert await collect(world, *CHAIN) == 0
    world.now += DAY
    assert await collect(world, *CHAIN) == 3
    await world.check()


async def test_a_root_made_since_the_search_keeps_its_closure(world: World) -> None:
    await abandoned(world, {**CHAIN, "other": []}, ["top", "other"])
    found = await orphans(world)
    assert len(found) == 4
    evaluation = await world.evaluation()
    await world.record(evaluation, {"new": ["mid"]}, entries=["new"])
    assert await world.apply(CollectDerivations(tuple(found), **cutoffs(world))) == 2
    assert await derivations(world) == {"new", "mid", "low"}
    await world.end_stream(evaluation)
    await build_all(world, "low", "mid", "new")
    assert await world.evaluation_status(evaluation) is EvaluationStatus.COMPLETED
    await world.check()


async def test_a_root_far_above_keeps_its_closure(world: World) -> None:
    """Only the entry point is named: the interior has no name of its own."""
    await abandoned(world, CHAIN, ["top"])
    found = await orphans(world)
    evaluation = await world.apply(CreateEvaluation("main", Repository("git+https://example.org/x")))
    await world.start_evaluation(evaluation)
    await world.apply(Record(evaluation, (), (EntryPoint("top", drv("top")),)))
    await world.connection.execute("DELETE FROM build_job")
    assert await world.apply(CollectDerivations(tuple(found), **cutoffs(world))) == 0
    assert await world.apply(CollectDerivations((await world.id("low"),), **cutoffs(world))) == 0


async def test_what_a_worker_was_told_is_known_stays_for_it(world: World) -> None:
    await abandoned(world, CHAIN, ["top"])
    found = await orphans(world)
    mid = await world.id("mid")
    assert await world.apply(PromiseDerivations((mid,))) == {mid}
    assert await orphans(world) == [await world.id("top")]
    assert await world.apply(CollectDerivations(tuple(found), **cutoffs(world))) == 1
    assert await world.apply(PromiseDerivations((*found,))) == {mid, await world.id("low")}
    world.now += 2 * DAY
    assert await collect(world) == 2
    await world.check()


async def test_a_running_build_keeps_its_inputs(world: World) -> None:
    evaluation = await evaluated(world, CHAIN, ["top"])
    await world.build("low")
    await world.start("mid")
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    await world.apply(CollectEvaluations((evaluation,)))
    world.now += 2 * DAY
    assert await collect(world) == 1
    assert await derivations(world) == {"mid", "low"}
    await world.check()


async def test_survivors_are_walked_again(world: World) -> None:
    """A parent too young to go loses what it needs; nothing above it is known any more."""
    await abandoned(world, {"mid": ["low"], "low": []}, ["mid"])
    young = await evaluated(world, {"user": ["top"], "top": ["mid"]}, ["user"])
    await world.apply(AbortEvaluation(young, "by a person"))
    await world.apply(CollectEvaluations((young,)))
    assert await orphans(world) == sorted([await world.id("mid"), await world.id("low")], reverse=True)
    # In two chunks, and the wrong one first: `mid` is un-walked before it goes itself.
    assert await collect(world, "low") == 1
    assert await world.value("SELECT walked FROM derivation WHERE name = 'mid'") is False
    await world.check()
    assert await collect(world, "mid") == 1
    known = "SELECT array_agg(name) FROM derivation WHERE walked AND unwalked_inputs = 0"
    assert await world.value(known) is None
    assert await world.value("SELECT walked FROM derivation WHERE name = 'user'")
    await world.check()
    again = await evaluated(world, {"user": ["top"], "top": ["mid"], **CHAIN}, ["user"])
    assert await world.evaluation_status(again) is EvaluationStatus.BUILDING
    assert await world.value("SELECT count(*) FROM derivation WHERE walked AND unwalked_inputs = 0") == 4
    await world.check()


async def test_a_survivor_that_only_refers_to_it_is_as_if_it_never_had(world: World) -> None:
    await abandoned(world, {"lib": []}, ["lib"])
    young = await evaluated(world, {"user": []}, ["user"])
    await world.start("user")
    await world.commit(nar(out("user"), [out("lib")]))
    await world.complete("user")
    await world.apply(AbortEvaluation(young, "by a person"))
    await world.apply(CollectEvaluations((young,)))
    await world.check()
    assert await collect(world) == 1
    assert await derivations(world) == {"user"}
    assert await world.value("SELECT walked FROM derivation")
    await world.check()
    # Its NAR still says so: who records the derivation again finds the edge again.
    again = await evaluated(world, {"lib": []}, ["lib"])
    assert await world.value("SELECT count(*) FROM derivation_dependency") == 1
    await world.check()
    assert await world.evaluation_status(again) is EvaluationStatus.BUILDING


async def test_derivations_that_refer_to_each_other_go_together(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": [], "b": ["a"]}, entries=["b"])
    await world.commit(nar(out("a"), [out("b")]), nar(out("b"), [out("a")]))
    await world.end_stream(evaluation)
    await world.apply(AbortEvaluation(evaluation, "by a person"))
    await world.apply(CollectEvaluations((evaluation,)))
    world.now += 2 * DAY
    assert await collect(world) == 2
    assert await derivations(world) == set()
    await world.check()


# --- paths ----------------------------------------------------------------------------------------


def ages(world: World) -> Ages:
    return Ages(unused_since=world.now - 14 * DAY, promised_since=world.now - DAY)


async def unneeded(world: World, size: int = 2) -> set[str]:
    """What all pages find."""
    found: set[str] = set()
    last: int | None = 0
    while last is not None:
        last, hashes = await unneeded_paths(world.connection, ages(world), last, size)
        found |= set(hashes)
    return found


async def test_a_path_that_nothing_needs_goes_after_its_time(world: World) -> None:
    source = CachedSource("/nix/store/" + hash_part("flake") + "-source")
    await world.commit(*(nar(out(name)) for name in ("lonely", "input")), nar(source.store_path))
    await world.commit(nar(out("orphan"), [out("orphan"), out("below")]), nar(out("below")))
    evaluation = await world.apply(CreateEvaluation("main", cached=source))
    await world.start_evaluation(evaluation)
    await world.record(evaluation, {"kept": []}, entries=["kept"])
    await world.connection.execute(
        "INSERT INTO derivation_input_source SELECT id, %s, %s FROM derivation",
        (hash_part("input"), out("input")),
    )
    await world.commit(nar(out("kept")))
    assert await unneeded(world) == set()
    world.now += 15 * DAY
    everything = {"lonely", "input", "orphan", "below", "kept", "kept.drv", "flake"}
    assert await unneeded(world) == {hash_part("lonely"), hash_part("orphan")}
    below = await world.apply(CollectPaths(tuple(map(hash_part, everything)), ages(world)))
    assert below == {hash_part("below")}
    assert await world.apply(CollectPaths(tuple(below), ages(world))) == frozenset()
    query = "SELECT array_agg(package ORDER BY package) FROM cached_path"
    assert await world.value(query) == ["input", "kept", "kept.drv", "source"]
    assert await world.value("SELECT count(*) FROM retired_nar") == 3
    await world.check()


async def test_a_path_somebody_counts_on_stays(world: World) -> None:
    await world.commit(nar(out("told")), nar(out("fetched")))
    world.now += 15 * DAY
    found = tuple(await unneeded(world))
    assert len(found) == 2
    await world.connection.execute(
        "UPDATE cached_path_signature s SET last_fetched_at = %s FROM cached_path p"
        " WHERE p.id = s.cached_path AND p.hash = %s",
        (world.now, hash_part("fetched")),
    )
    assert await world.apply(PromisePaths((hash_part("told"), hash_part("never")))) == {hash_part("told")}
    assert await world.apply(CollectPaths(found, ages(world))) == frozenset()
    assert await world.value("SELECT count(*) FROM cached_path") == 2
    world.now += 2 * DAY
    assert await unneeded(world) == {hash_part("told")}
