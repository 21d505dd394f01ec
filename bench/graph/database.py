"""A PostgreSQL as the server starts it, with its defaults and on a disk, and fresh databases in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TypeVar

import attrs
import trio
from psycopg.conninfo import conninfo_to_dict

from gradient.graph.embedded import EmbeddedPostgres
from gradient.graph.migrate import migrate
from gradient.graph.pg import Connection

T = TypeVar("T")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@attrs.define(eq=False)
class Cluster:
    """A running PostgreSQL."""

    postgres: EmbeddedPostgres
    _numbers: count[int] = attrs.field(factory=count)

    async def fresh(self) -> str:
        """The URL of a new database with all migrations applied, and a project and a cache called main."""
        url = await self._created("")
        async with await Connection.connect(url) as connection:
            await migrate(connection, NOW)
            await connection.execute("INSERT INTO project (name, created_at) VALUES ('main', now())")
            await connection.execute("INSERT INTO cache (name, created_at) VALUES ('main', now())")
        return url

    async def copy(self, url: str) -> str:
        """The URL of a copy of a database that nobody is connected to; both are on the disk."""
        return await self._created(f"TEMPLATE {_name_of(url)} STRATEGY FILE_COPY")

    async def drop(self, url: str) -> None:
        """Make room."""
        async with await self._admin() as admin:
            await admin.execute(f"DROP DATABASE {_name_of(url)}".encode())

    async def _created(self, how: str) -> str:
        name = f"bench_{next(self._numbers)}"
        async with await self._admin() as admin:
            await admin.execute(f"CREATE DATABASE {name} {how}".encode())
        return self.postgres.url_of(name)

    async def _admin(self) -> Connection:
        return await Connection.connect(self.postgres.url_of("postgres"))


def _name_of(url: str) -> str:
    return str(conninfo_to_dict(url)["dbname"])


def on_cluster(folder: Path, action: Callable[[Cluster], Awaitable[T]]) -> T:
    """Run `action` with a PostgreSQL of its own in `folder`."""

    async def main() -> T:
        async with _running(folder) as cluster:
            return await action(cluster)

    return trio.run(main)


@asynccontextmanager
async def _running(folder: Path) -> AsyncIterator[Cluster]:
    postgres = EmbeddedPostgres(folder / "postgres")
    async with trio.open_nursery() as nursery:
        await nursery.start(postgres.run)
        yield Cluster(postgres)
        nursery.cancel_scope.cancel()
