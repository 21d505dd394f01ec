"""`gradient serve`: the composition root of the server. Every long-lived task of the process is named in
`_start`; follow any one of them downward.

    root nursery
    ├── database          embedded PostgreSQL, unless a DSN is set
    ├── instance lock     one server per database
    ├── graph writer      one channel in, stopped last
    ├── passes            builds, evaluations, waiting states, retries, resync: a budget each
    ├── proto listener    one session nursery a worker
    └── http              API, cache, pages
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Final

import attrs
import structlog
import trio

from gradient import __version__
from gradient.graph.access import FIRST_CACHE, FIRST_PROJECT, ensure_first_rows, hash_token
from gradient.graph.embedded import EmbeddedPostgres
from gradient.graph.migrate import InstanceLock, migrate
from gradient.graph.moves import Moves
from gradient.graph.pg import DATABASE_ERRORS, Connection, Pool
from gradient.graph.recovery import recover_interrupted_work
from gradient.graph.writer import TRANSACTION_BUDGET, GraphWriter
from gradient.nar.store import NarStore
from gradient.nursery.drain import Phase
from gradient.nursery.health import HealthTable
from gradient.nursery.periodic import periodic
from gradient.nursery.root import Task, run_root
from gradient.nursery.signals import Stop
from gradient.nursery.supervise import supervise
from gradient.passes.scheduler import Scheduler
from gradient.server_files import DATA_VERSION, ServerFiles, prepare_data_dir
from gradient.sessions.live import LiveHub
from gradient.sessions.queries import CacheSide
from gradient.sessions.sessions import DRAIN_LIMIT as SESSIONS_DRAIN
from gradient.sessions.sessions import Sessions
from gradient.settings import DataDir, Settings, write_atomically
from gradient.settings.address import Address
from gradient.web.app import make_app
from gradient.web.serve_http import serve_http
from gradient.web.site import Site, Urls
from gradient.web.uploads import Cache
from gradient.wire.listener import serve_links

log = structlog.get_logger()

# Connections for reads: passes, questions of workers, and pages never wait for each other long.
READERS: Final = 8
TICK: Final = 5.0  # seconds between two runs of a pass that nobody woke
RESYNC: Final = 60.0
PASS_BUDGET: Final = 120.0


@attrs.frozen
class Serving:
    """Where a running server is, as clients on this machine reach it."""

    http_url: str
    proto_url: str
    cache_url: str
    public_key: str


class CannotListen(Exception):
    """An address cannot be listened on: somebody else does, or it is none of this machine's."""


def _now() -> datetime:
    return datetime.now(UTC)


async def serve(
    settings: Settings, stop: Stop, *, task_status: trio.TaskStatus[Serving] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a server until `stop`, then drain it.

    Raises, in a group, what keeps it from starting: DataDirUnusable, SettingsError, PortInUse,
    CannotListen, DatabaseDown, DatabaseInUse, DatabaseTooNew, EmbeddedFailed. Cancelling it stops at once;
    the next start recovers.
    """
    data = DataDir(settings.server.data_dir)
    files = await trio.to_thread.run_sync(prepare_data_dir, data)
    embedded = None if settings.database.url else EmbeddedPostgres(data.postgres)
    url = embedded.url if embedded else str(settings.database.url)
    async with Pool.open(url, READERS) as readers:
        server = _Server(settings, data, files, url, readers)
        try:
            await run_root(partial(_start, server, embedded, task_status), stop)
        finally:
            if server.announced:  # else the file is another server's, which keeps us from starting
                data.http_url.unlink(missing_ok=True)


@attrs.define(eq=False)
class _Server:
    """The parts of the server, wired: data flows from the writer to everybody else through `publish`."""

    settings: Settings
    data: DataDir
    files: ServerFiles
    url: str
    readers: Pool
    # Whether `http-url` in the data directory is ours.
    announced: bool = attrs.field(default=False, init=False)
    health: HealthTable = attrs.field(factory=HealthTable)
    hub: LiveHub = attrs.field(factory=LiveHub)
    writer: GraphWriter = attrs.field(init=False)
    scheduler: Scheduler = attrs.field(init=False)
    # Known once the first rows are there.
    sessions: Sessions = attrs.field(init=False)
    site: Site = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.writer = GraphWriter(self.url, self.publish, _now)
        self.scheduler = Scheduler(self.writer, self.readers, self.settings.build, _now)

    def publish(self, moves: Moves) -> None:
        """What a transaction moved goes to everybody who follows it. Never blocks."""
        self.scheduler.moved(moves)
        self.sessions.moved(moves)
        self.hub.publish(moves)

    async def prepare(self) -> None:
        """Migrations, first rows, recovery; then the parts that need to know the cache."""
        async with await Connection.connect(self.url) as connection:
            await migrate(connection, _now())
            first = await ensure_first_rows(
                connection, _now(), hash_token(self.files.admin_token), hash_token(self.files.worker_token)
            )
            recovered = await recover_interrupted_work(connection, _now())
        log.info("recovered", **attrs.asdict(recovered))
        store = await trio.to_thread.run_sync(NarStore.open, self.data.store, self.settings.nar.url)
        cache = Cache(first.cache, FIRST_CACHE, self.files.signing_key)
        side = CacheSide(
            first.cache,
            f"/cache/{FIRST_CACHE}",
            "/api/v1/uploads",
            self.files.grants,
            self.settings.nar.grant_ttl_secs,
            _now,
        )
        self.sessions = Sessions(self.readers, self.writer, self.scheduler, self.hub, side, _now)
        self.site = Site(
            readers=self.readers,
            submit=self.writer.submit,
            store=store,
            grants=self.files.grants,
            cache=cache,
            project=FIRST_PROJECT,
            live=self.hub,
            health=self.health,
            workers=self.scheduler.pool,
            urls=Urls("", ""),
            version=__version__,
            data_version=DATA_VERSION,
            clock=_now,
        )


async def _start(
    server: _Server,
    embedded: EmbeddedPostgres | None,
    task_status: trio.TaskStatus[Serving],
    root: trio.Nursery,
) -> Sequence[Phase]:
    """Start every task of the process, in order; returns how they stop."""
    health, scheduler, settings = server.health, server.scheduler, server.settings
    if embedded is not None:
        await root.start(embedded.run)
    await root.start(InstanceLock(server.url).run)
    await server.prepare()

    writer = Task("graph writer")
    run_writer = partial(
        supervise,
        "graph writer",
        server.writer.run,
        restart_on=DATABASE_ERRORS,
        health=health,
        may_return=True,
    )
    root.start_soon(writer.run, run_writer)

    a_pass = partial(periodic, budget=PASS_BUDGET, health=health, recoverable=DATABASE_ERRORS)
    for name, run, interval, wake in (
        ("build assignment", scheduler.assign_builds, TICK, scheduler.builds_moved),
        ("evaluation assignment", scheduler.assign_queued_evals, TICK, scheduler.evaluations_moved),
        ("waiting state", scheduler.refresh_waiting_state, TICK, scheduler.waiting_moved),
        ("transient retries", scheduler.retry_transient, TICK, None),
        ("resync", scheduler.resync, RESYNC, None),
    ):
        root.start_soon(partial(a_pass, name, interval, pass_fn=run, wake=wake))

    proto = Task("proto listener")
    address = settings.server.proto
    links = partial(
        serve_links,
        server.sessions.serve,
        host=address.host,
        port=address.port,
        connection_limit=settings.proto.max_connections,
    )
    with _listening_on(address):
        bound = await root.start(partial(proto.serve, links))
    http, stop_http = Task("http"), trio.Event()
    address = settings.server.http
    pages = partial(serve_http, make_app(server.site), address.host, address.port, stop=stop_http)
    with _listening_on(address):
        port = await root.start(partial(http.serve, pages))
    task_status.started(
        await _announce(server, Address(address.host, port), Address(settings.server.proto.host, bound[0][1]))
    )

    async def end_sessions() -> None:
        scheduler.draining = True
        await server.sessions.drain()
        await proto.stop()

    async def end_http() -> None:
        stop_http.set()
        await http.wait()

    async def end_writer() -> None:
        server.writer.close()
        await writer.wait()

    return (
        Phase("sessions", end_sessions, SESSIONS_DRAIN + 5, server.sessions.waiting_for),
        Phase("http", end_http, 10),
        Phase("graph writer", end_writer, TRANSACTION_BUDGET),
    )


@contextmanager
def _listening_on(address: Address) -> Iterator[None]:
    """Name the address when it cannot be bound."""
    try:
        yield
    except OSError as error:
        raise CannotListen(f"cannot listen on {address}: {error.strerror}") from error


async def _announce(server: _Server, http: Address, proto: Address) -> Serving:
    """Say where the server is: to the handlers, in the data directory, to the caller."""
    urls = Urls(http.url(), proto.url("ws") + "/proto")
    server.site.urls = urls
    server.announced = True
    await trio.to_thread.run_sync(write_atomically, server.data.http_url, urls.http + "\n")
    return Serving(urls.http, urls.proto, urls.cache(FIRST_CACHE), server.site.cache.public_key)
