"""Migrations: what is decided, what is recorded, and the lock of the one server."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo

from gradient.graph import migrate as migrate_module
from gradient.graph import pg
from gradient.graph.migrate import (
    Applied,
    BadMigrations,
    DatabaseTooNew,
    InstanceLock,
    Migration,
    MigrationChanged,
    WrongEncoding,
    migrate,
    pending,
    read_migrations,
)
from gradient.graph.pg import Connection
from gradient.graph.pg_errors import DATABASE_ERRORS, START_ERRORS, DatabaseGone, DatabaseInUse, start_failed
from tests.conftest import Databases
from tests.patience import PATIENCE

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
FIRST = Migration(1, "first", "CREATE TABLE a (x bigint); CREATE TABLE b (x text CHECK (x LIKE 'y%'))")
SECOND = Migration(2, "second", "ALTER TABLE a ADD y bigint")


def applied(*migrations: Migration) -> list[Applied]:
    return [Applied(migration.number, migration.name, migration.checksum) for migration in migrations]


def test_what_is_missing_is_pending_in_order() -> None:
    assert pending([FIRST, SECOND], []) == [FIRST, SECOND]
    assert pending([FIRST, SECOND], applied(FIRST)) == [SECOND]
    assert pending([FIRST, SECOND], applied(FIRST, SECOND)) == []


def test_a_newer_database_is_refused_in_one_line() -> None:
    with pytest.raises(DatabaseTooNew) as caught:
        pending([FIRST], applied(FIRST, SECOND))
    assert "0002 (second)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_changed_migration_is_refused() -> None:
    changed = Migration(1, "first", FIRST.text + " ")
    with pytest.raises(MigrationChanged, match=r"0001 \(first\)"):
        pending([changed, SECOND], applied(FIRST))


@pytest.mark.parametrize(
    "names", [["0002_a.sql"], ["0001_a.sql", "0003_b.sql"], ["0001_a.sql", "0001_b.sql"]]
)
def test_numbers_count_from_one(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("SELECT 1")
    with pytest.raises(BadMigrations, match="must count from 1"):
        read_migrations(tmp_path)


def test_a_file_with_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tables.sql").write_text("SELECT 1")
    with pytest.raises(BadMigrations, match=r"tables\.sql"):
        read_migrations(tmp_path)


def test_the_files_of_the_program_are_read() -> None:
    migrations = read_migrations()
    assert [migration.number for migration in migrations] == list(range(1, len(migrations) + 1))
    assert migrations[0].text


@pytest.fixture
async def empty(empty_database_url: str):
    async with await Connection.connect(empty_database_url) as connection:
        yield connection


async def recorded(connection: Connection) -> list[tuple[object, ...]]:
    return await pg.fetch_all(
        connection, "SELECT number, name, applied_at FROM schema_migration ORDER BY number"
    )


async def test_each_is_applied_once(empty: Connection) -> None:
    assert await migrate(empty, NOW, [FIRST]) == [FIRST]
    assert await migrate(empty, NOW, [FIRST, SECOND]) == [SECOND]
    assert await migrate(empty, NOW, [FIRST, SECOND]) == []
    assert await recorded(empty) == [(1, "first", NOW), (2, "second", NOW)]
    assert await pg.execute(empty, "INSERT INTO a (x, y) VALUES (1, 2)") == 1


async def test_all_of_the_program_apply_to_an_empty_database(empty: Connection) -> None:
    assert await migrate(empty, NOW) == list(read_migrations())
    assert await migrate(empty, NOW) == []


async def test_one_that_fails_leaves_those_before_it(empty: Connection) -> None:
    broken = Migration(2, "broken", "CREATE TABLE c (x bigint); SELECT 1 / 0")
    with pytest.raises(psycopg.errors.DivisionByZero):
        await migrate(empty, NOW, [FIRST, broken])
    assert await recorded(empty) == [(1, "first", NOW)]
    assert await pg.fetch_value(empty, "SELECT to_regclass('c')") is None
    assert await migrate(empty, NOW, [FIRST, SECOND]) == [SECOND]


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_database_that_cannot_hold_every_text_is_refused(databases: Databases, encoding: str) -> None:
    with databases.fresh(f"template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'") as (_, url):
        async with await Connection.connect(url) as connection:
            with pytest.raises(WrongEncoding, match=f"is encoded in {encoding}: make one with createdb"):
                await migrate(connection, NOW)


async def test_a_database_that_does_not_let_us_is_no_bug(empty_database_url: str) -> None:
    url = make_conninfo(empty_database_url, options="-c default_transaction_read_only=on")
    async with await Connection.connect(url) as connection:
        with pytest.raises(START_ERRORS) as refused:
            await migrate(connection, NOW)
    assert str(start_failed(refused.value)).startswith("the database does not let its user do what")


async def test_a_database_that_goes_away_in_the_middle_is_no_bug(empty_database_url: str) -> None:
    suicide = Migration(1, "suicide", "SELECT pg_terminate_backend(pg_backend_pid())")
    async with await Connection.connect(empty_database_url) as connection:
        with pytest.raises(START_ERRORS) as gone:
            await migrate(connection, NOW, [suicide])
    fault = start_failed(gone.value)
    assert isinstance(fault, DatabaseGone)
    assert str(fault).startswith("the database went away during the start: ")


async def test_a_newer_database_is_not_touched(empty: Connection) -> None:
    await migrate(empty, NOW, [FIRST, SECOND])
    with pytest.raises(DatabaseTooNew):
        await migrate(empty, NOW, [FIRST])
    assert len(await recorded(empty)) == 2


async def test_cancelled_anywhere_a_migration_is_whole_or_not_there(
    sweep, empty: Connection, empty_database_url: str
) -> None:
    async def scenario() -> None:
        async with await Connection.connect(empty_database_url) as connection:
            await migrate(connection, NOW, [FIRST, SECOND])

    async def check() -> None:
        columns = await pg.fetch_value(
            empty, "SELECT count(*) FROM information_schema.columns WHERE table_name = 'a'"
        )
        if await pg.fetch_value(empty, "SELECT to_regclass('schema_migration')") is None:
            assert columns == 0
        else:
            assert columns == len(await recorded(empty))
        await pg.execute(empty, "DROP TABLE IF EXISTS schema_migration, a, b")

    assert await sweep(scenario, check) > 10


# --- one server -----------------------------------------------------------------------------------


async def test_a_second_server_is_refused_in_one_line(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate_module, "INSTANCE_WAIT", 0.05)
    async with trio.open_nursery() as nursery:
        await nursery.start(InstanceLock(database_url).run)
        with pytest.raises(DatabaseInUse) as caught:
            await InstanceLock(database_url).run()
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, DATABASE_ERRORS)
        nursery.cancel_scope.cancel()


async def test_the_next_server_waits_for_the_end_of_the_last(
    database_url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate_module, "INSTANCE_WAIT", PATIENCE)
    started = trio.Event()
    waiting = """
        SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    """

    async def begin() -> None:
        await last.start(InstanceLock(database_url).run)
        started.set()

    async with trio.open_nursery() as last:
        async with trio.open_nursery() as first:
            await first.start(InstanceLock(database_url).run)
            last.start_soon(begin)
            with trio.fail_after(PATIENCE):
                while not await pg.fetch_value(connection, waiting):
                    pass
            assert not started.is_set()
            first.cancel_scope.cancel()
        await started.wait()
        last.cancel_scope.cancel()


async def test_databases_of_one_server_have_a_lock_each(database_url: str, empty_database_url: str) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(InstanceLock(database_url).run)
        await nursery.start(InstanceLock(empty_database_url).run)
        nursery.cancel_scope.cancel()


async def test_a_lost_lock_is_an_error_of_the_database(database_url: str, connection: Connection) -> None:
    async def hold(*, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC128
        with pytest.raises(DATABASE_ERRORS):
            await InstanceLock(database_url).run(task_status=task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(hold)
        await pg.execute(
            connection,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
    assert issubclass(DatabaseGone, DATABASE_ERRORS)
