"""The parts of a server are wired to each other: each pass runs, and news reaches whoever follows it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from gradient.graph.evaluation_end import FailEvaluation
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.nar import CommitNars
from gradient.graph.pg import Connection, fetch_value
from gradient.graph.pg_pool import Pool
from gradient.model import Repository
from gradient.server import Server
from gradient.server_files import prepare_data_dir
from gradient.settings import DataDir, Settings
from gradient.settings.tables import Gc, Metrics
from tests.graph.world import nar, out
from tests.patience import PATIENCE, until

PASSES = {
    "build assignment",
    "evaluation assignment",
    "waiting state",
    "transient retries",
    "resync",
    "unconfirmed aborts",
    "lost .drv files",
    "missing objects",
    "object removal",
    "record of fetches",
}
CHECKS = {"graph-stuck reheal", "graph consistency"}
COLLECTIONS = {"garbage", "old evaluations"}


@asynccontextmanager
async def running(settings: Settings, url: str, pool: Pool, folder: Path) -> AsyncIterator[Server]:
    """A server without its listeners and its passes."""
    data = DataDir(folder)
    server = Server(settings, data, prepare_data_dir(data), url, pool)
    await server.prepare()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run_writer)
        yield server
        server.writer.close()


def done(server: Server) -> set[str]:
    """The passes that have run once."""
    return {child.name for child in server.health.snapshot() if child.last_good is not None}


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        (Settings(), PASSES | CHECKS | COLLECTIONS),
        (Settings(gc=Gc(interval_secs=0)), PASSES | CHECKS),
        (Settings(metrics=Metrics(graph_consistency_interval_secs=0)), PASSES | COLLECTIONS),
    ],
)
async def test_every_pass_runs_that_is_not_turned_off(
    settings: Settings, passes: set[str], database_url: str, pool: Pool, tmp_path: Path
) -> None:
    async with running(settings, database_url, pool, tmp_path) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.run_passes)
        await until(lambda: passes <= done(server))
        assert {child.name for child in server.health.snapshot()} == passes | {"graph writer"}
        nursery.cancel_scope.cancel()


async def test_news_reaches_the_collector_and_fetches_the_database(
    database_url: str, pool: Pool, tmp_path: Path, connection: Connection
) -> None:
    async with running(Settings(), database_url, pool, tmp_path) as server:
        source = Repository("git+https://example.org/x")
        evaluation = await server.writer.submit(CreateEvaluation("main", source))
        await server.writer.submit(FailEvaluation(evaluation, "test", "it broke"))
        with trio.fail_after(PATIENCE):
            await server.garbage.ended.wait()
        path = nar(out("a"))
        await server.writer.submit(CommitNars(server.site.cache.id, (path,)))
        server.site.fetched(path.nar.file_hash)
        await server.fetches.record()
        assert await fetch_value(connection, "SELECT fetch_count FROM cached_path_signature") == 1
