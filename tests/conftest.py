"""What tests of several folders share: one PostgreSQL for the run, one database a test, a real Nix.

The cluster is ours, in a temporary folder, or the server that GRADIENT_TEST_DATABASE_URL names (a role
that may create databases). Databases are copies of a template with all migrations applied; their names
hold the process id, so that runs may be beside each other.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import attrs
import psycopg
import pytest
import structlog
import trio
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from trio._core import _run

from gradient.graph.embedded import EmbeddedPostgres
from gradient.graph.migrate import migrate
from gradient.graph.pg import Connection
from gradient.graph.pg_pool import Pool

# The same examples on every run, and no deadline: a busy machine is no failure. Nor do they hang on which
# modules are imported: the literals in those would be drawn too.
settings.register_profile(
    "gradient", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gradient")
pytest.MonkeyPatch().setattr(providers, "_get_local_constants", Constants)

# A test that is about the log configures it itself.
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

# Of trio's schedule (`schedule`).
SEED = os.environ.get("GRADIENT_TEST_SEED", "0")

# Nothing here outlives the run: a test must not wait for a disk.
TEST_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "100",
    # The log of a large database would be larger than the database.
    "max_wal_size": "128MB",
    # It would come between two statements of a test, when it likes: with locks, and with other plans.
    "autovacuum": "off",
}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on the run's PostgreSQL, so that `-m postgres` repeats just that on another."""
    for item in items:
        if "databases" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.postgres)


@pytest.fixture(autouse=True)
def schedule(request: pytest.FixtureRequest) -> None:
    """trio shuffles the tasks that are ready: the same way on every run of a test, and another way with
    another GRADIENT_TEST_SEED."""
    _run._r.seed(f"{SEED} {request.node.nodeid}")


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
        except BaseException as error:  # handed to the waiting fixture  # noqa: ASYNC103
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
    with tempfile.TemporaryDirectory(prefix="gradient-pg-", dir=memory_folder()) as folder:
        with running(EmbeddedPostgres(Path(folder) / "postgres", TEST_SETTINGS)) as url:
            yield url


def memory_folder() -> str | None:
    """A folder in memory with two GiB to spare, where copying a database takes 10 ms on any machine."""
    folder = "/dev/shm"
    if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 2 * 2**30:
        return folder
    return None


@attrs.define(eq=False)
class Databases:
    """Makes the databases of the tests, and drops them one test later.

    Dropped at once, a database would wait 100 ms for the last of its sessions to be gone.
    """

    admin: psycopg.Connection
    url: str
    # Ours has fsync off: copying files is fastest. Elsewhere that would mean two checkpoints each.
    strategy: str
    _used: list[str] = attrs.field(factory=list)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)

    @contextmanager
    def fresh(self, template: str) -> Iterator[tuple[str, str]]:
        """Name and DSN of a new database, ours for the block."""
        self.drop_used()
        name = f"gradient_test_{os.getpid()}_{next(self._numbers)}"
        self.admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY {self.strategy}".encode())
        try:
            yield name, make_conninfo(**{**conninfo_to_dict(self.url), "dbname": name})
        finally:
            self._used.append(name)

    def drop_used(self) -> None:
        while self._used:
            self.admin.execute(f"DROP DATABASE {self._used.pop()} WITH (FORCE)".encode())


@pytest.fixture(scope="session")
def databases(admin_url: str) -> Iterator[Databases]:
    """The maker of databases of this run."""
    ours = "GRADIENT_TEST_DATABASE_URL" not in os.environ
    with psycopg.connect(admin_url, autocommit=True) as admin:
        databases = Databases(admin, admin_url, "FILE_COPY" if ours else "WAL_LOG")
        yield databases
        databases.drop_used()


@pytest.fixture(scope="session")
def template(databases: Databases) -> Iterator[str]:
    """The name of a database with all migrations applied."""

    async def fill(url: str) -> None:
        async with await Connection.connect(url) as connection:
            await migrate(connection, NOW)

    with databases.fresh("template0") as (name, url):
        trio.run(fill, url)
        yield name


@pytest.fixture
def database_url(databases: Databases, template: str) -> Iterator[str]:
    """The DSN of a database of this test's own, with all migrations applied."""
    with databases.fresh(template) as (_, url):
        yield url


@pytest.fixture
def empty_database_url(databases: Databases) -> Iterator[str]:
    """The DSN of a database of this test's own, with nothing in it."""
    with databases.fresh("template0") as (_, url):
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
