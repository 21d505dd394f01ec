"""What tests of several folders share: one PostgreSQL for the run, one database a test, a real Nix.

The cluster is ours, in a temporary folder, or the server that GRADIENT_TEST_DATABASE_URL names (a role
that may create databases). Databases are copies of a template with all migrations applied; their names
hold the process id, so that runs may be beside each other.
"""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gradient.graph.embedded import EmbeddedPostgres
from gradient.graph.migrate import migrate
from gradient.graph.pg import Connection, Pool

# Nothing here outlives the run: a test must not wait for a disk.
TEST_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "100",
}
NOW = datetime(2026, 1, 1, tzinfo=UTC)
_numbers = itertools.count(1)


@contextmanager
def running(postgres: EmbeddedPostgres) -> Iterator[str]:
    """Run `postgres` in a trio thread beside pytest-trio's runs; the DSN of its maintenance database."""
    started: queue.Queue[tuple[trio.lowlevel.TrioToken, trio.CancelScope] | BaseException] = queue.Queue()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(postgres.run)
            started.put((trio.lowlevel.current_trio_token(), nursery.cancel_scope))

    def thread() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            started.put(error)

    runner = threading.Thread(target=thread, name="postgres")
    runner.start()
    outcome = started.get()
    if isinstance(outcome, BaseException):
        raise outcome
    token, scope = outcome
    try:
        yield postgres.url_of("postgres")
    finally:
        token.run_sync_soon(scope.cancel)
        runner.join()


@pytest.fixture(scope="session")
def admin_url() -> Iterator[str]:
    """The DSN of a maintenance database of the run's PostgreSQL."""
    if given := os.environ.get("GRADIENT_TEST_DATABASE_URL"):
        yield given
        return
    # Not pytest's own temporary folder: that is kept after the run, and its path may be too long.
    folder = tempfile.mkdtemp(prefix="gradient-pg-")
    try:
        with running(EmbeddedPostgres(Path(folder) / "postgres", TEST_SETTINGS)) as url:
            yield url
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def admin(admin_url: str) -> Iterator[psycopg.Connection]:
    """A blocking connection to the maintenance database, in autocommit mode."""
    with psycopg.connect(admin_url, autocommit=True) as connection:
        yield connection


@contextmanager
def fresh_database(admin: psycopg.Connection, url: str, template: str) -> Iterator[tuple[str, str]]:
    """Name and DSN of a new database, dropped after the block whoever is still connected."""
    name = f"gradient_test_{os.getpid()}_{next(_numbers)}"
    admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
    try:
        yield name, make_conninfo(**{**conninfo_to_dict(url), "dbname": name})
    finally:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(scope="session")
def template(admin: psycopg.Connection, admin_url: str) -> Iterator[str]:
    """The name of a database with all migrations applied."""

    async def fill(url: str) -> None:
        async with await Connection.connect(url) as connection:
            await migrate(connection, NOW)

    with fresh_database(admin, admin_url, "template0") as (name, url):
        trio.run(fill, url)
        yield name


@pytest.fixture
def database_url(admin: psycopg.Connection, admin_url: str, template: str) -> Iterator[str]:
    """The DSN of a database of this test's own, with all migrations applied."""
    with fresh_database(admin, admin_url, template) as (_, url):
        yield url


@pytest.fixture
def empty_database_url(admin: psycopg.Connection, admin_url: str) -> Iterator[str]:
    """The DSN of a database of this test's own, with nothing in it."""
    with fresh_database(admin, admin_url, "template0") as (_, url):
        yield url


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[Connection]:
    """A connection to this test's database."""
    async with await Connection.connect(database_url) as connection:
        yield connection


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    """A pool of four readers of this test's database."""
    async with Pool.open(database_url, size=4) as pool:
        yield pool


@pytest.fixture(scope="session")
def nix() -> str:
    """The path of the `nix` that tests marked `nix` must pass with. Without one they fail, never skip."""
    found = shutil.which(os.environ.get("GRADIENT_TEST_NIX") or "nix")
    if found is None:
        pytest.fail("no Nix: put `nix` on PATH or its path into GRADIENT_TEST_NIX, or run -m 'not nix'")
    return found
