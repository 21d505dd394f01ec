"""Numbered migrations and the one-server lock. Layer: rank 2.

`schema/NNNN_name.sql` are applied in order, each in its own transaction together with its row in
`schema_migration`, so a crash between two leaves a database that the next start finishes. An applied
file never changes: its checksum is compared at each start.

Migrations do not guard against a second server: hold `InstanceLock` first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from gradient.graph import pg
from gradient.graph.pg import Connection
from gradient.graph.pg_errors import DatabaseGone, DatabaseInUse, PostgresError
from gradient.graph.statements import Statement

SCHEMA: Final = Path(__file__).parent / "schema"
_FILE_NAME: Final = re.compile(r"(\d{4})_(\w+)\.sql")

# The key of the one-server lock among the advisory locks of the database; 640 is the fold's.
INSTANCE_KEY: Final = 641
# Seconds to wait for the lock: a killed server's session ends within a moment, not at once.
INSTANCE_WAIT: Final = 3.0

# Not a Statement: PostgreSQL prepares queries only.
_CREATE_SCHEMA_MIGRATION: Final = """
CREATE TABLE IF NOT EXISTS schema_migration (
    number     integer     PRIMARY KEY,
    name       text        NOT NULL,
    applied_at timestamptz NOT NULL,
    checksum   text        NOT NULL
)
"""
APPLIED_MIGRATIONS = Statement(
    "applied_migrations", "SELECT number, name, checksum FROM schema_migration ORDER BY number"
)
RECORD_MIGRATION = Statement(
    "record_migration",
    """
    INSERT INTO schema_migration (number, name, applied_at, checksum)
    VALUES (%(number)s, %(name)s, %(applied_at)s, %(checksum)s)
    """,
)
TAKE_INSTANCE_LOCK = Statement("take_instance_lock", "SELECT pg_advisory_lock(%(key)s::bigint)")


class DatabaseTooNew(PostgresError):
    """The database was used by a newer Gradient."""


class MigrationChanged(PostgresError):
    """An applied migration is not the file it was."""


class WrongEncoding(PostgresError):
    """The database cannot hold every text."""


class BadMigrations(PostgresError):
    """The migration files are not numbered 0001, 0002, ... without gaps."""


@attrs.frozen
class Migration:
    """One file of `schema/`."""

    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@attrs.frozen
class Applied:
    """One row of `schema_migration`."""

    number: int
    name: str
    checksum: str


def read_migrations(folder: Path = SCHEMA) -> tuple[Migration, ...]:
    """The migrations of `folder`, in order. Raises `BadMigrations`. Blocking file IO."""
    found = []
    for path in sorted(folder.glob("*.sql")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None:
            raise BadMigrations(f"{path.name}: name it NNNN_name.sql")
        found.append(Migration(int(match[1]), match[2], path.read_text()))
    numbers = [migration.number for migration in found]
    if numbers != list(range(1, len(found) + 1)):
        raise BadMigrations(f"migrations are numbered {numbers}: they must count from 1 without gaps")
    return tuple(found)


def pending(known: Sequence[Migration], applied: Sequence[Applied]) -> Sequence[Migration]:
    """Which of `known` are still to be applied. Raises `DatabaseTooNew` and `MigrationChanged`."""
    by_number: Mapping[int, Migration] = {migration.number: migration for migration in known}
    for row in applied:
        migration = by_number.get(row.number)
        if migration is None:
            raise DatabaseTooNew(
                f"the database has migration {row.number:04} ({row.name}), this Gradient knows "
                f"{len(known)}: run the newer Gradient, or restore a backup made before its first start"
            )
        if migration.checksum != row.checksum:
            raise MigrationChanged(
                f"migration {row.number:04} ({row.name}) was applied from another text: "
                "restore the file, and put the change into a new migration"
            )
    done = {row.number for row in applied}
    return [migration for migration in known if migration.number not in done]


async def migrate(
    connection: Connection, now: datetime, migrations: Sequence[Migration] | None = None
) -> Sequence[Migration]:
    """Bring the database to the newest schema; the migrations applied.

    `now` (aware) is recorded with each. Raises `WrongEncoding`, `DatabaseTooNew`, `MigrationChanged`,
    `BadMigrations`, and `psycopg.Error` for a migration that fails: those before it stay. Cancellation:
    likewise.
    """
    if migrations is None:
        migrations = await trio.to_thread.run_sync(read_migrations)
    _check_encoding(connection)
    await pg.execute(connection, _CREATE_SCHEMA_MIGRATION)
    applied = await pg.fetch_as(connection, Applied, APPLIED_MIGRATIONS)
    todo = pending(migrations, applied)
    for migration in todo:
        await _apply(connection, migration, now)
    return todo


def _check_encoding(connection: Connection) -> None:
    """A build's log and a flake's names are Unicode; and from SQL_ASCII psycopg reads bytes."""
    encoding = (connection.pgconn.parameter_status(b"server_encoding") or b"").decode()
    if encoding != "UTF8":
        raise WrongEncoding(
            f"the database is encoded in {encoding}: make one with "
            "createdb --encoding UTF8 --template template0"
        )


async def _apply(connection: Connection, migration: Migration, now: datetime) -> None:
    async with connection.transaction():
        # Without parameters the text may hold many statements, and a percent sign is itself.
        await pg.execute(connection, migration.text)
        await pg.execute(connection, RECORD_MIGRATION, _row(migration, now))


def _row(migration: Migration, now: datetime) -> dict[str, Any]:
    return {
        "number": migration.number,
        "name": migration.name,
        "applied_at": now,
        "checksum": migration.checksum,
    }


@attrs.define(eq=False)
class InstanceLock:
    """One server per database: a session advisory lock on a connection of its own.

    PostgreSQL frees it when the session ends, so a killed server leaves nothing to clean up.
    """

    url: str

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the lock until cancelled; `started` once it is held.

        Raises `DatabaseInUse` when another server has it for `INSTANCE_WAIT` seconds, and
        `DatabaseGone` when the connection, and so the lock, is lost.
        """
        async with await Connection.connect(self.url) as connection:
            await self._acquire(connection)
            task_status.started()
            await self._watch(connection)

    async def _acquire(self, connection: Connection) -> None:
        with trio.move_on_after(INSTANCE_WAIT):
            await pg.execute(connection, TAKE_INSTANCE_LOCK, {"key": INSTANCE_KEY})
            return
        raise DatabaseInUse("another Gradient server uses this database: stop it, or name another database")

    async def _watch(self, connection: Connection) -> None:
        """The server says nothing on this connection but that it ends."""
        async for _ in connection.notifies():
            pass
        raise DatabaseGone("the connection that holds the one-server lock was lost")
