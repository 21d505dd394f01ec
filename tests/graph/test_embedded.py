"""The embedded PostgreSQL: started, stopped, killed, found again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from gradient.graph import embedded, pg
from gradient.graph.embedded import EmbeddedFailed, EmbeddedPostgres
from gradient.graph.pg import Connection
from gradient.graph.pg_errors import DATABASE_ERRORS, DatabaseInUse
from tests.conftest import TEST_SETTINGS, memory_folder
from tests.patience import PATIENCE

needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes through /proc")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    parent = Path(tempfile.mkdtemp(prefix="gradient-", dir=memory_folder()))
    yield parent / "postgres"
    assert embedded._processes_of(parent / "postgres" / "cluster") == []
    shutil.rmtree(parent)


def server(folder: Path) -> EmbeddedPostgres:
    return EmbeddedPostgres(folder, TEST_SETTINGS)


async def ask(url: str, query: str) -> object:
    async with await Connection.connect(url) as connection:
        return await pg.fetch_value(connection, query)


async def test_it_starts_keeps_its_data_and_leaves_nothing(folder: Path) -> None:
    postgres = server(folder)
    async with trio.open_nursery() as nursery:
        url = await nursery.start(postgres.run)
        assert url == postgres.url
        async with await Connection.connect(url) as connection:
            await pg.execute(connection, "CREATE TABLE t AS SELECT 5 AS a")
        nursery.cancel_scope.cancel()
    assert embedded._processes_of(postgres.cluster) == []
    assert not (postgres.cluster / "postmaster.pid").exists()
    async with trio.open_nursery() as nursery:
        url = await nursery.start(server(folder).run)
        assert await ask(url, "SELECT a FROM t") == 5
        nursery.cancel_scope.cancel()


async def test_it_can_be_reached_by_its_owner_alone(folder: Path) -> None:
    async with trio.open_nursery() as nursery:
        url = await nursery.start(server(folder).run)
        assert await ask(url, "SHOW listen_addresses") == ""
        assert server(folder).socket_folder.stat().st_mode & 0o777 == 0o700
        assert server(folder).cluster.stat().st_mode & 0o777 == 0o700
        nursery.cancel_scope.cancel()


async def test_it_is_durable_by_default(folder: Path) -> None:
    async with trio.open_nursery() as nursery:
        url = await nursery.start(EmbeddedPostgres(folder).run)
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            assert await ask(url, f"SHOW {setting}") == "on"
        assert await ask(url, "SHOW data_checksums") == "on"
        nursery.cancel_scope.cancel()


async def test_a_second_server_on_the_folder_is_refused(folder: Path) -> None:
    async with trio.open_nursery() as nursery:
        url = await nursery.start(server(folder).run)
        with pytest.raises(DatabaseInUse, match="another Gradient server"):
            await server(folder).run()
        assert await ask(url, "SELECT 1") == 1
        nursery.cancel_scope.cancel()


@needs_proc
async def test_its_death_is_an_error_of_the_database_and_it_starts_again(folder: Path) -> None:
    postgres = server(folder)

    async def until_it_dies(*, task_status: trio.TaskStatus[str]) -> None:  # noqa: ASYNC128
        with pytest.raises(DATABASE_ERRORS, match="the embedded PostgreSQL ended"):
            await postgres.run(task_status=task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(until_it_dies)
        postmaster = embedded._recorded_pid(postgres.cluster)
        assert postmaster is not None
        os.kill(postmaster, signal.SIGKILL)
    async with trio.open_nursery() as nursery:
        url = await nursery.start(postgres.run)
        assert await ask(url, "SELECT 1") == 1
        nursery.cancel_scope.cancel()


async def test_a_long_path_gets_a_short_socket(folder: Path) -> None:
    long = folder.parent / ("x" * 60) / ("y" * 60)
    long.parent.mkdir()
    postgres = server(long)
    assert len(str(postgres.socket_folder)) < embedded.SOCKET_PATH_LIMIT
    async with trio.open_nursery() as nursery:
        url = await nursery.start(postgres.run)
        assert await ask(url, "SELECT 1") == 1
        nursery.cancel_scope.cancel()
    assert not postgres.socket_folder.exists()


async def test_a_path_may_hold_anything(folder: Path) -> None:
    folder = folder.parent / 'a, "b"'
    async with trio.open_nursery() as nursery:
        url = await nursery.start(server(folder).run)
        assert await ask(url, "SELECT 1") == 1
        nursery.cancel_scope.cancel()


def test_other_accounts_may_pass_through_but_not_look(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "open").mkdir(parents=True)
    closed.chmod(0o700)
    (closed / "open").chmod(0o755)
    embedded._let_through(closed / "open" / "cluster")
    assert closed.stat().st_mode & 0o777 == 0o701
    assert (closed / "open").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_somebody_else_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "target")
    with pytest.raises(EmbeddedFailed, match="belongs to somebody else"):
        embedded._make_private(tmp_path / "run", embedded.Account(os.geteuid(), os.getegid()))


async def test_a_cluster_of_another_version_is_refused(folder: Path) -> None:
    (folder / "cluster").mkdir(parents=True)
    (folder / "cluster" / "PG_VERSION").write_text("17\n")
    with pytest.raises(EmbeddedFailed, match="made by PostgreSQL 17"):
        await server(folder).run()


async def test_one_that_cannot_start_says_why(folder: Path) -> None:
    with pytest.raises(EmbeddedFailed, match=r'PostgreSQL did not start: .*"nonsense"'):
        await EmbeddedPostgres(folder, {"max_connections": "nonsense"}).run()


async def test_half_an_initdb_is_thrown_away(folder: Path) -> None:
    (folder / "cluster.new").mkdir(parents=True)
    (folder / "cluster.new" / "PG_VERSION").write_text("18\n")
    async with trio.open_nursery() as nursery:
        url = await nursery.start(server(folder).run)
        assert await ask(url, "SELECT 1") == 1
        nursery.cancel_scope.cancel()


async def test_cancelled_while_it_starts_it_leaves_nothing(folder: Path) -> None:
    postgres = server(folder)
    with trio.CancelScope() as scope:  # noqa: ASYNC912
        async with trio.open_nursery() as nursery:
            nursery.start_soon(postgres.run)
            while not (postgres.cluster / "postmaster.pid").exists():  # noqa: ASYNC110
                await trio.lowlevel.checkpoint()
            scope.cancel()
    assert scope.cancelled_caught
    assert embedded._processes_of(postgres.cluster) == []


# --- our own death --------------------------------------------------------------------------------

CHILD = """
import sys, trio
from pathlib import Path
from gradient.graph.embedded import EmbeddedPostgres

async def main():
    async with trio.open_nursery() as nursery:
        print(await nursery.start(EmbeddedPostgres(Path(sys.argv[1]), {"fsync": "off"}).run), flush=True)

trio.run(main)
"""


@pytest.fixture
def child(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs the embedded PostgreSQL in `folder`, once it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline()
        while url and not url.startswith("postgresql:"):
            url = process.stdout.readline()
        assert url
        yield process
        process.kill()


def wait_until_gone(cluster: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while embedded._processes_of(cluster):
        assert time.monotonic() < deadline, "PostgreSQL outlived its parent"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="the leash is Linux's")
async def test_when_we_are_killed_it_shuts_down_cleanly(folder: Path, child: subprocess.Popen[str]) -> None:
    cluster = server(folder).cluster
    child.kill()
    await trio.to_thread.run_sync(wait_until_gone, cluster)
    # A clean shutdown takes its pid file away.
    assert not (cluster / "postmaster.pid").exists()


@needs_proc
async def test_the_next_start_replaces_what_is_left(
    folder: Path, child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the leash did not hold, here because PostgreSQL is stopped and cannot obey."""
    postgres = server(folder)
    leftover = embedded._recorded_pid(postgres.cluster)
    assert leftover is not None
    tell = embedded._signal

    def tell_and_resume(*args: Any) -> None:
        tell(*args)
        with suppress(ProcessLookupError):
            os.kill(leftover, signal.SIGCONT)

    monkeypatch.setattr(embedded, "_signal", tell_and_resume)
    os.kill(leftover, signal.SIGSTOP)
    child.kill()
    child.wait()
    async with trio.open_nursery() as nursery:
        url = await nursery.start(postgres.run)
        assert await ask(url, "SELECT 1") == 1
        assert embedded._recorded_pid(postgres.cluster) not in {leftover, None}
        nursery.cancel_scope.cancel()


@needs_proc
async def test_a_leftover_that_does_not_obey_is_killed(
    folder: Path, child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_STEPS", ((signal.SIGINT, 0.1), (signal.SIGKILL, PATIENCE)))
    postgres = server(folder)
    leftover = embedded._recorded_pid(postgres.cluster)
    assert leftover is not None
    os.kill(leftover, signal.SIGSTOP)
    child.kill()
    child.wait()
    async with trio.open_nursery() as nursery:
        url = await nursery.start(postgres.run)
        monkeypatch.undo()  # the new one obeys
        assert await ask(url, "SELECT 1") == 1
        nursery.cancel_scope.cancel()


@needs_proc
async def test_lock_files_of_another_life_are_thrown_away(folder: Path) -> None:
    """Their number is a running process, ours, which has nothing to do with the cluster."""
    postgres = server(folder)
    async with trio.open_nursery() as nursery:
        await nursery.start(postgres.run)
        nursery.cancel_scope.cancel()
    embedded._make_private(postgres.socket_folder, postgres._account())
    for file in (
        postgres.cluster / "postmaster.pid",
        postgres.socket_folder / f"{embedded.SOCKET_NAME}.lock",
    ):
        file.write_text(f"{os.getpid()}\n{postgres.cluster}\n0\n5432\n{postgres.socket_folder}\n\n")
        shutil.chown(file, postgres._account().uid)
    async with trio.open_nursery() as nursery:
        url = await nursery.start(postgres.run)
        assert await ask(url, "SELECT 1") == 1
        nursery.cancel_scope.cancel()
