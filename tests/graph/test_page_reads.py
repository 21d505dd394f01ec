"""What pages, the cache and the handshake read of a real graph."""

from __future__ import annotations

from uuid import UUID

import pytest

from gradient.graph import access, build_reads, cache_reads, evaluation_reads, log_reads
from gradient.graph.build_failures import BuildFailed
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.failure_causes import failure_causes
from gradient.graph.messages import AddMessage
from gradient.graph.pg import Connection, execute
from gradient.model import (
    AttemptOutcome,
    AttemptReason,
    BuildStatus,
    EvaluationStatus,
    FailureKind,
    MessageLevel,
    OutputPath,
)
from tests.graph.world import LIMITS, START, World, drv, hash_part, nar, out


@pytest.fixture
async def world(connection: Connection) -> World:
    world = World(connection)
    await world.setup()
    return world


async def write_log(world: World, name: str, *pieces: bytes) -> int:
    """Write rows to the log of the newest attempt at `name`; the attempt's id."""
    query = "SELECT max(id) FROM build_attempt WHERE derivation = %s"
    attempt = int(await world.value(query, await world.id(name)))
    for index, piece in enumerate(pieces):
        await world.connection.execute(
            "INSERT INTO build_log_chunk VALUES (%s, %s, %s)", (attempt, index, piece)
        )
    return attempt


async def fail_started(world: World, name: str) -> None:
    """The running build of `name` fails."""
    await world.apply(BuildFailed(world.open.pop(name), FailureKind.PERMANENT, "it broke", LIMITS))


# --- evaluations ----------------------------------------------------------------------------------


async def test_an_evaluation_counts_moves_that_are_not_folded_yet(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"b": ["a"], "a": []}, entries=["b"])
    await world.end_stream(evaluation)
    await world.start("a")
    row = await evaluation_reads.evaluation(world.connection, evaluation)
    assert row is not None
    assert row.status is EvaluationStatus.BUILDING
    assert (row.named, row.active, row.failed, row.queued, row.building) == (2, 2, 0, 0, 1)
    assert await evaluation_reads.evaluation(world.connection, 10**9) is None


async def test_evaluations_newest_first_and_the_active_ones(world: World) -> None:
    first, second, third = [await world.evaluation() for _ in range(3)]
    await world.apply(AbortEvaluation(second, "not this one"))
    newest = await evaluation_reads.evaluations(world.connection, 2)
    assert [row.id for row in newest] == [third, second]
    active = await evaluation_reads.active_evaluations(world.connection)
    assert [row.id for row in active] == [third, first]
    assert await evaluation_reads.evaluations(world.connection, -1) == []


async def test_entry_points_with_their_outputs(world: World) -> None:
    evaluation = await world.evaluation()
    outputs = (OutputPath("out", out("a")), OutputPath("dev", out("a", "dev")))
    await world.record(evaluation, {"a": []}, entries=["a"], outputs=outputs)
    (point,) = await evaluation_reads.entry_points(world.connection, evaluation)
    assert (point.attr, point.status, point.drv_path) == ("a", BuildStatus.QUEUED, drv("a"))
    assert point.outputs == {"out": out("a"), "dev": out("a", "dev")}


async def test_messages_after_the_last_one_seen(world: World) -> None:
    evaluation = await world.evaluation()
    for text in ("one", "two", "three"):
        await world.apply(AddMessage(evaluation, MessageLevel.WARNING, "nix", text))
    first, *rest = await evaluation_reads.messages(world.connection, evaluation)
    assert (first.level, first.message) == (MessageLevel.WARNING, "one")
    assert await evaluation_reads.messages(world.connection, evaluation, first.id) == rest


# --- builds ---------------------------------------------------------------------------------------


async def test_builds_come_running_failed_waiting_done(world: World) -> None:
    evaluation = await world.evaluation()
    graph: dict[str, list[str]] = {
        "done": [],
        "broken": [],
        "above": ["broken"],
        "running": [],
        "queued": [],
        "created": ["queued"],
    }
    await world.record(evaluation, graph, entries=["done", "above", "running", "created"])
    await world.build("done")
    await world.fail("broken")
    await world.start("running")
    rows = await build_reads.builds_of_evaluation(world.connection, evaluation)
    assert [row.name for row in rows] == ["running", "broken", "above", "queued", "created", "done"]
    running, broken, _, queued, created, done = rows
    assert (running.worker, running.attempts, running.finished_at) == ("w", 1, None)
    assert (broken.error, broken.status) == ("it broke", BuildStatus.FAILED_PERMANENT)
    assert (queued.worker, queued.attempts, queued.drv_present) == (None, 0, True)
    assert (created.blocking_deps, created.wanted) == (1, True)
    assert done.started_at is not None
    assert done.finished_at is not None


async def test_named_builds_and_whether_they_moved(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"b": ["a"], "a": []}, entries=["b"])
    a, b = await world.id("a"), await world.id("b")
    assert await build_reads.named_builds(world.connection, evaluation) == {a: True, b: False}
    assert [row.build for row in await build_reads.builds(world.connection, [a, b])] == sorted([a, b])


async def test_one_build_with_attempts_outputs_and_blockers(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"b": ["a"], "a": []}, entries=["b"])
    await world.fail("a")
    build = await world.id("a")
    (attempt,) = await build_reads.attempts(world.connection, build)
    assert (attempt.outcome, attempt.message, attempt.worker) == (AttemptOutcome.FAILED, "it broke", "w")
    assert attempt.reason is AttemptReason.BUILDER_NONZERO
    (output,) = await build_reads.outputs(world.connection, build)
    assert (output.name, output.path, output.cached) == ("out", out("a"), False)
    assert await build_reads.products(world.connection, build) == []
    (blocker,) = await build_reads.blockers(world.connection, await world.id("b"))
    assert (blocker.name, blocker.status) == ("a", BuildStatus.FAILED_PERMANENT)
    assert await build_reads.blockers(world.connection, build) == []


async def test_the_size_of_the_queue(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"c": ["a", "b"], "a": [], "b": []}, entries=["c"])
    await world.start("a")
    assert await build_reads.queue_sizes(world.connection) == build_reads.QueueSizes(1, 1, 1)


# --- causes of dependency failures ----------------------------------------------------------------


async def test_the_failed_build_is_named_however_deep(world: World) -> None:
    evaluation = await world.evaluation()
    chain = {f"n{i}": [f"n{i - 1}"] for i in range(1, 40)} | {"n0": []}
    await world.record(evaluation, chain, entries=["n39"])
    await world.fail("n0")
    ids = [await world.id(f"n{i}") for i in range(1, 40)]
    causes = await failure_causes(world.connection, ids)
    assert set(causes) == set(ids)
    assert {tuple(cause.name for cause in found) for found in causes.values()} == {("n0",)}


async def test_each_build_gets_its_own_causes(world: World) -> None:
    evaluation = await world.evaluation()
    graph = {"both": ["left", "right"], "left": ["x"], "right": ["y"], "x": [], "y": []}
    await world.record(evaluation, graph, entries=["both", "right"])
    await world.start("x")
    await world.start("y")
    await fail_started(world, "x")
    await fail_started(world, "y")
    names = {"both": ["x", "y"], "left": ["x"], "right": ["y"]}
    ids = {name: await world.id(name) for name in names}
    causes = await failure_causes(world.connection, ids.values())
    assert {name: sorted(cause.name for cause in causes[i]) for name, i in ids.items()} == names


async def test_nothing_is_asked_for_nothing(world: World) -> None:
    assert await failure_causes(world.connection, []) == {}


# --- logs -----------------------------------------------------------------------------------------


async def test_the_newest_attempt_that_has_a_log(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    build = await world.id("a")
    assert await log_reads.newest_log(world.connection, build) is None
    await world.start("a")
    assert await log_reads.newest_log(world.connection, build) is None
    running = await log_reads.newest_log(world.connection, build, or_running=True)
    attempt = await write_log(world, "a", b"one\n", b"two\n", b"three")
    assert running == log_reads.Log(attempt, running=True)
    assert await log_reads.newest_log(world.connection, build) == running
    assert await log_reads.attempt_runs(world.connection, attempt)
    await fail_started(world, "a")
    assert not await log_reads.attempt_runs(world.connection, attempt)


async def test_a_log_is_read_in_pages_and_from_its_end(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.start("a")
    rows = [b"line %d\nhalf " % i for i in range(log_reads.PAGE * 2 + 3)]
    attempt = await write_log(world, "a", *rows)
    seen: list[bytes] = []
    after = -1
    while chunks := await log_reads.log_chunks(world.connection, attempt, after):
        assert len(chunks) <= log_reads.PAGE
        seen += [chunk.data for chunk in chunks]
        after = chunks[-1].index
    assert seen == rows
    whole = b"".join(rows).split(b"\n")
    for lines in (1, 2, 20, 1000):
        tail, last = await log_reads.log_tail(world.connection, attempt, lines, 2**20)
        assert tail.split(b"\n") == whole[-lines:]
        assert last == len(rows) - 1
    assert (await log_reads.log_tail(world.connection, attempt, 10, 7))[0] == b"".join(rows)[-7:]
    assert await log_reads.log_tail(world.connection, 10**9, 10, 100) == (b"", -1)


async def test_the_tails_of_several_builds_at_once(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": [], "b": [], "c": []}, entries=["a", "b", "c"])
    for name in ("a", "b", "c"):
        await world.start(name)
    await write_log(world, "a", b"x" * log_reads.TAIL_BYTES, b"the end of a\n")
    await write_log(world, "b", b"of b\n")
    ids = {name: await world.id(name) for name in ("a", "b", "c")}
    tails = await log_reads.log_tails(world.connection, ids.values())
    assert set(tails) == {ids["a"], ids["b"]}
    assert tails[ids["b"]] == b"of b\n"
    assert len(tails[ids["a"]]) == log_reads.TAIL_BYTES
    assert tails[ids["a"]].endswith(b"xxx" + b"the end of a\n")


async def test_a_derivation_by_its_path(world: World) -> None:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    find = log_reads.find_derivation
    assert await find(world.connection, hash_part("a.drv"), "a") == await world.id("a")
    assert await find(world.connection, hash_part("a.drv"), "b") is None


# --- the cache ------------------------------------------------------------------------------------


async def test_a_path_is_served_where_it_is_signed_and_stored(world: World) -> None:
    await world.commit(nar(out("a"), [out("b")]), nar(out("b")))
    a, b = hash_part("a"), hash_part("b")
    served = await cache_reads.served_paths(world.connection, 1, [a, b, hash_part("c")])
    assert set(served) == {a, b}
    assert served[a].record == nar(out("a"), [out("b")]).nar
    assert served[a].signature == "key:signature"
    assert await cache_reads.served_paths(world.connection, 2, [a]) == {}
    digits = served[a].record.file_hash
    found = await cache_reads.served_nar(world.connection, 1, digits)
    # Both have this content, so either object will do.
    assert found in [cache_reads.ServedNar(out(name), 100) for name in "ab"]
    assert await cache_reads.served_nar(world.connection, 2, digits) is None
    assert await cache_reads.held_paths(world.connection, [a, hash_part("c")]) == {a}
    await world.connection.execute("UPDATE cached_path SET file_hash = NULL WHERE hash = %s", (a,))
    assert set(await cache_reads.served_paths(world.connection, 1, [a, b])) == {b}
    assert await cache_reads.held_paths(world.connection, [a, b]) == {b}


# --- access ---------------------------------------------------------------------------------------


async def test_a_first_start_makes_its_rows_once(connection: Connection) -> None:
    admin, worker = access.new_token(), access.new_token()
    hashes = access.hash_token(admin), access.hash_token(worker)
    first = await access.ensure_first_rows(connection, START, *hashes)
    assert await access.ensure_first_rows(connection, START, *hashes) == first
    for table in ("project", "cache", "project_cache", "api_token", "worker_registration"):
        row = await (await connection.execute(f"SELECT count(*) FROM {table}".encode())).fetchone()
        assert row == (1,), table
    (registration,) = await access.worker_registrations(connection)
    assert registration == access.WorkerRegistration("main", None, hashes[1])


async def test_a_new_token_file_is_valid_beside_the_old_one(connection: Connection) -> None:
    old, new = (access.hash_token(access.new_token()) for _ in range(2))
    await access.ensure_first_rows(connection, START, old, old)
    await access.ensure_first_rows(connection, START, new, new)
    assert await access.find_api_token(connection, old) == access.FIRST_TOKEN
    assert await access.find_api_token(connection, new) == access.FIRST_TOKEN
    assert [r.token_hash for r in await access.worker_registrations(connection)] == [old, new]


async def test_a_revoked_token_stays_revoked(connection: Connection) -> None:
    token = access.hash_token(access.new_token())
    await access.ensure_first_rows(connection, START, token, token)
    await execute(connection, "UPDATE api_token SET revoked_at = now()")
    await access.ensure_first_rows(connection, START, token, token)
    assert await access.find_api_token(connection, token) is None


async def test_registrations_of_one_worker_and_inactive_ones(connection: Connection) -> None:
    token = access.hash_token(access.new_token())
    rows = await access.ensure_first_rows(connection, START, token, token)
    await execute(connection, "UPDATE worker_registration SET active = false")
    await connection.execute(
        "INSERT INTO worker_registration (project, worker_id, token_hash, enable_eval, created_at)"
        " VALUES (%s, %s, %s, false, now())",
        (rows.project, UUID(int=7), b"hash"),
    )
    (registration,) = await access.worker_registrations(connection)
    assert registration == access.WorkerRegistration("main", UUID(int=7), b"hash", enable_eval=False)


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {access.new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {64}
