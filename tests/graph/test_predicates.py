"""The SQL bodies of the schema, the predicates of the package and the sets of the model say one thing."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from gradient import model
from gradient.graph import predicates
from gradient.graph.pg import Connection, fetch_all, fetch_value
from gradient.graph.statements import all_statements
from gradient.model import (
    EVALUATION_ACTIVE,
    EVALUATION_TERMINAL,
    NEED_BUILD_STATUSES,
    REQUEUEABLE,
    BuildStatus,
    EdgeKind,
    EvaluationStatus,
)

SCHEMA = Path(predicates.__file__).parent / "schema"
STATES = list(itertools.product(BuildStatus, (False, True)))


async def truth(connection: Connection, predicate: str, columns: str) -> bool:
    """What a predicate over one made-up row `b` says."""
    return bool(await fetch_value(connection, f"SELECT {predicate} FROM (SELECT {columns}) b"))


async def counted(connection: Connection, status: BuildStatus, wanted: bool) -> tuple[int, ...]:
    call = f"evaluation_shared_build_counts({int(status)}::smallint, {wanted})"
    return (await fetch_all(connection, f"SELECT * FROM {call}"))[0]


async def test_the_counted_memberships(connection: Connection) -> None:
    for status, wanted in STATES:
        blocks = (status in NEED_BUILD_STATUSES and wanted) or status in {
            BuildStatus.QUEUED,
            BuildStatus.BUILDING,
        }
        assert await counted(connection, status, wanted) == (
            int(blocks),
            int(status in REQUEUEABLE),
            int(status is BuildStatus.QUEUED),
            int(status is BuildStatus.BUILDING),
        )
        columns = f"{int(status)} AS status, {wanted} AS wanted"
        assert await truth(connection, predicates.blocks_evaluation("b"), columns) is blocks


@pytest.mark.parametrize("status", EvaluationStatus)
async def test_the_ledger_is_kept_for_live_evaluations(
    connection: Connection, status: EvaluationStatus
) -> None:
    """All three triggers: naming, moving, unnaming."""
    await connection.execute("INSERT INTO project (name, created_at) VALUES ('p', now())")
    await connection.execute("INSERT INTO derivation (hash, name, created_at) VALUES ('h', 'd', now())")
    await connection.execute(
        "INSERT INTO derivation_build (derivation, created_at, updated_at)"
        " SELECT id, now(), now() FROM derivation"
    )
    await connection.execute(
        "INSERT INTO evaluation (project, status, created_at, updated_at)"
        f" SELECT id, {int(status)}, now(), now() FROM project"
    )
    ledger = "SELECT named, active, failed, queued, building FROM evaluation_shared_build_delta ORDER BY id"
    name = "INSERT INTO build_job SELECT v.id, d.id, false, now() FROM evaluation v, derivation d"
    expected: list[tuple[int, ...]] = []
    for statement, delta in (
        (name, (1, 0, 0, 0, 0)),
        (name + " ON CONFLICT DO NOTHING", None),
        ("UPDATE derivation_build SET wanted = true", (0, 1, 0, 0, 0)),
        ("UPDATE derivation_build SET wanted = true, attempt = 1", None),
        (f"UPDATE derivation_build SET status = {int(BuildStatus.QUEUED)}", (0, 0, 0, 1, 0)),
        (f"UPDATE derivation_build SET status = {int(BuildStatus.BUILDING)}", (0, 0, 0, -1, 1)),
        (f"UPDATE derivation_build SET status = {int(BuildStatus.ABORTED)}", (0, -1, 1, 0, -1)),
        ("DELETE FROM build_job", (-1, 0, -1, 0, 0)),
    ):
        await connection.execute(statement.encode())
        if delta is not None and status in EVALUATION_ACTIVE:
            expected.append(delta)
        assert await fetch_all(connection, ledger) == expected


async def test_live_means_active(connection: Connection) -> None:
    for status in EvaluationStatus:
        columns = f"{int(status)} AS status"
        assert await truth(connection, predicates.live_evaluation("b"), columns) is (
            status in EVALUATION_ACTIVE
        )


@pytest.mark.parametrize("began", [False, True])
async def test_past_its_walk_is_what_came_to_its_builds_and_has_not_ended(
    connection: Connection, began: bool
) -> None:
    stamp = "now()" if began else "NULL::timestamptz"
    at_builds = {EvaluationStatus.BUILDING, EvaluationStatus.WAITING}
    for status in EvaluationStatus:
        columns = f"{int(status)} AS status, {stamp} AS building_started_at"
        past = began and status in at_builds
        assert await truth(connection, predicates.past_walk("b"), columns) is past, status


async def test_edges(connection: Connection) -> None:
    for kind in EdgeKind:
        columns = f"{int(kind)} AS kind"
        runtime = await truth(connection, predicates.runtime_edge("b"), columns)
        build = await truth(connection, predicates.build_edge("b"), columns)
        assert (build, runtime) == (kind is not EdgeKind.RUNTIME, kind is not EdgeKind.BUILD)


async def test_what_is_open_and_what_is_a_builder(connection: Connection) -> None:
    for status, fetchable, walked, probed, available in itertools.product(BuildStatus, *[(False, True)] * 4):
        columns = (
            f"{int(status)} AS status, {fetchable} AS fetchable, {walked} AS walked,"
            f" {probed} AS probed, {available} AS cache_available"
        )
        opened = not fetchable and status not in model.TERMINAL_FAILURE
        assert await truth(connection, predicates.open_predicate("b"), columns) is opened
        builder = walked and probed and not available and status in model.BUILDER_STATUSES
        assert await truth(connection, predicates.builder_predicate("b", "b"), columns) is builder


@pytest.mark.parametrize(("walked", "unwalked"), itertools.product((False, True), (0, 1, 2)))
async def test_what_is_recorded_is_walked_to_its_leaves(
    connection: Connection, walked: bool, unwalked: int
) -> None:
    columns = f"{walked} AS walked, {unwalked} AS unwalked_inputs"
    assert await truth(connection, predicates.recorded_predicate("b"), columns) is (walked and unwalked == 0)


def body(name: str) -> str:
    """The text of a function, as the newest migration that has it says."""
    texts = [path.read_text() for path in sorted(SCHEMA.glob("*.sql"))]
    text = next(text for text in reversed(texts) if f"FUNCTION {name}(" in text)
    return text[text.index(f"FUNCTION {name}(") :].split("END $$", 1)[0]


def test_the_bodies_of_the_schema_name_the_numbers_of_the_model() -> None:
    """What the tests above do not reach by running it: each number in a body, by what it stands for."""
    runtime, build = predicates.runtime_edge("e"), predicates.build_edge("e")
    assert runtime in body("ripple_missing_runtime_deps")
    assert build in body("ripple_unwalked_inputs")
    active = predicates.live_evaluation("v")
    assert active in body("evaluation_shared_build_moved")
    assert active in body("evaluation_shared_build_named")
    tables = (SCHEMA / "0001_tables.sql").read_text()
    assert tables.count(active.replace("v.", "")) == 2
    for index, status in (
        ("derivation_build_queued", BuildStatus.QUEUED),
        ("derivation_build_retry", BuildStatus.FAILED_TRANSIENT),
        ("derivation_build_building", BuildStatus.BUILDING),
    ):
        assert re.search(rf"INDEX {index} .*WHERE status = {int(status)};", tables)
    assert f"WHERE outcome = {int(model.AttemptOutcome.RUNNING)};" in tables


# A status, kind, outcome, reason or level compared with a bare number in the text of a module.
BARE_NUMBER = re.compile(r"\b(status|kind|outcome|reason|level)\b *(=|<>|IN) *\(?[0-9]")


def test_no_module_spells_a_number_of_the_model() -> None:
    modules = sorted((SCHEMA.parent).glob("*.py"))
    assert len(modules) > 20
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in modules
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BARE_NUMBER.search(line)
    ]
    assert found == []


def test_every_statement_belongs_to_a_module_of_the_package() -> None:
    assert {statement.module.rpartition(".")[0] for statement in all_statements()} == {"gradient.graph"}


def test_the_statuses_part_as_they_should() -> None:
    assert set(EvaluationStatus) == EVALUATION_ACTIVE | EVALUATION_TERMINAL
    assert not EVALUATION_ACTIVE & EVALUATION_TERMINAL
    assert model.EVALUATION_RUNNING < EVALUATION_ACTIVE
    done = model.TERMINAL_SUCCESS | REQUEUEABLE
    assert set(BuildStatus) == NEED_BUILD_STATUSES | done
    assert not NEED_BUILD_STATUSES & done
    assert BuildStatus.ABORTED not in NEED_BUILD_STATUSES
    assert model.CASCADE_TARGET < model.BUILDER_STATUSES
    assert BuildStatus.BUILDING not in model.CASCADE_TARGET
