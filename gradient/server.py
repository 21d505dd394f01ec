"""The parts of a server, wired. Layer: rank 6; `serve.py` says which of them are tasks.

Data flows one way: reports and requests go into the graph writer, and what it moved goes out through
`publish` to everybody who follows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Final

import attrs
import structlog
import trio

from gradient import __version__
from gradient.graph.access import FIRST_CACHE, FIRST_PROJECT, FirstRows, ensure_first_rows, hash_token
from gradient.graph.embedded import EmbeddedFailed, EmbeddedPostgres
from gradient.graph.migrate import InstanceLock, migrate
from gradient.graph.moves import Moves
from gradient.graph.pg import Connection
from gradient.graph.pg_errors import DATABASE_ERRORS, START_ERRORS, start_failed
from gradient.graph.pg_pool import Pool
from gradient.graph.recovery import recover_interrupted_work
from gradient.graph.writer import UNRECORDED, GraphWriter
from gradient.nar.claims import PathClaims
from gradient.nar.errors import StoreUnavailable
from gradient.nar.store import NarStore
from gradient.nursery.health import HealthTable
from gradient.nursery.periodic import periodic
from gradient.nursery.supervise import supervise
from gradient.passes.consistency import CONSISTENCY_BUDGET, check_graph
from gradient.passes.fetches import Fetches
from gradient.passes.garbage import Garbage
from gradient.passes.nar_files import NarFiles
from gradient.passes.scheduler import Scheduler
from gradient.server_files import DATA_VERSION, ServerFiles
from gradient.sessions.live import LiveHub
from gradient.sessions.queries import CacheSide
from gradient.sessions.sessions import Sessions
from gradient.settings import DataDir, Settings
from gradient.web.site import Site, Urls
from gradient.web.uploads import Cache

log = structlog.get_logger()

TICK: Final = 5.0  # seconds between two runs of a pass that nobody woke
RESYNC: Final = 60.0
REMOVALS: Final = 60.0  # between two looks for objects to remove
RECORDS: Final = 60.0  # between two records of what was fetched
PASS_BUDGET: Final = 120.0
GARBAGE_BUDGET: Final = 1800.0


def now() -> datetime:
    """Wall time, as rows hold it."""
    return datetime.now(UTC)


@attrs.define(eq=False)
class Server:
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
    garbage: Garbage = attrs.field(init=False)
    # Known once the first rows are there.
    sessions: Sessions = attrs.field(init=False)
    site: Site = attrs.field(init=False)
    nar_files: NarFiles = attrs.field(init=False)
    fetches: Fetches = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.writer = GraphWriter(self.url, self.publish, now)
        self.scheduler = Scheduler(self.writer, self.readers, self.settings.build, now)
        gc, evaluations = self.settings.gc, self.settings.eval
        self.garbage = Garbage(self.readers, self.writer.submit, gc, evaluations, now)

    def publish(self, moves: Moves) -> None:
        """What a transaction moved goes to everybody who follows it. Never blocks."""
        self.scheduler.moved(moves)
        self.sessions.moved(moves)
        self.hub.publish(moves)
        self.nar_files.moved(moves)
        self.garbage.moved(moves)

    async def prepare(self) -> None:
        """Migrations, first rows, recovery; then what needs to know the cache. Raises PostgresError."""
        try:
            first = await self._prepare_database()
        except START_ERRORS as error:
            raise start_failed(error) from error
        store = await trio.to_thread.run_sync(NarStore.open, self.data.store, self.settings.nar.url)
        claims = PathClaims()
        self.nar_files = NarFiles(self.readers, self.writer.submit, store, claims)
        self.fetches = Fetches(self.writer.submit, first.cache)
        cache = Cache(first.cache, FIRST_CACHE, self.files.signing_key)
        side = CacheSide(
            first.cache,
            f"/cache/{FIRST_CACHE}",
            "/api/v1/uploads",
            self.files.grants,
            self.settings.nar.grant_ttl_secs,
            now,
        )
        self.sessions = Sessions(self.readers, self.writer, self.scheduler, self.hub, side, now)
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
            clock=now,
            claims=claims,
            suspect=self.nar_files.suspect,
            fetched=self.fetches.note,
        )

    async def _prepare_database(self) -> FirstRows:
        async with await Connection.connect(self.url) as connection:
            await migrate(connection, now())
            admin, worker = hash_token(self.files.admin_token), hash_token(self.files.worker_token)
            first = await ensure_first_rows(connection, now(), admin, worker)
            recovered = await recover_interrupted_work(connection, now())
        log.info("recovered", **attrs.asdict(recovered))
        return first

    async def run_database(  # noqa: ASYNC128  # hands its task_status on
        self, embedded: EmbeddedPostgres, *, task_status: trio.TaskStatus[str]
    ) -> None:
        """The embedded PostgreSQL, started again when it was killed, while it starts again too."""
        await supervise(
            "database",
            embedded.run,
            restart_on=(*DATABASE_ERRORS, EmbeddedFailed),
            health=self.health,
            task_status=task_status,
        )

    async def hold_lock(  # noqa: ASYNC128  # hands its task_status on
        self, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """The one-server lock, taken again when the database was away. Raises DatabaseInUse."""
        await supervise(
            "instance lock",
            InstanceLock(self.url).run,
            restart_on=DATABASE_ERRORS,
            health=self.health,
            task_status=task_status,
        )

    async def run_writer(self) -> None:
        """The graph writer under supervision; returns once it is closed and has emptied its channel."""
        try:
            await supervise(
                "graph writer",
                self.writer.run,
                restart_on=DATABASE_ERRORS,
                health=self.health,
                may_return=True,
            )
        finally:
            # Also when it is cancelled between two runs: whoever waits, perhaps shielded, is told.
            self.writer.stop()

    async def run_passes(self) -> None:
        """Every pass, side by side, until cancelled."""
        async with trio.open_nursery() as nursery:
            for a_pass in self.passes():
                nursery.start_soon(a_pass)

    def passes(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """Every pass, as a task with its own budget."""
        scheduler, files = self.scheduler, self.nar_files
        recoverable = (*UNRECORDED, StoreUnavailable)
        a_pass = partial(periodic, budget=PASS_BUDGET, health=self.health, recoverable=recoverable)
        for name, run, interval, wake in (
            ("build assignment", scheduler.assign_builds, TICK, scheduler.builds_moved),
            ("evaluation assignment", scheduler.assign_queued_evals, TICK, scheduler.evaluations_moved),
            ("waiting state", scheduler.refresh_waiting_state, TICK, scheduler.waiting_moved),
            ("transient retries", scheduler.retry_transient, TICK, None),
            ("resync", scheduler.resync, RESYNC, None),
            ("unconfirmed aborts", scheduler.abandon_unconfirmed, RESYNC, None),
            ("lost .drv files", scheduler.recover_drv_stuck_evals, RESYNC, None),
            ("missing objects", files.look_for_suspected, RESYNC, files.missed),
            ("object removal", files.remove_retired, REMOVALS, None),
            ("record of fetches", self.fetches.record, RECORDS, None),
        ):
            yield partial(a_pass, name, interval, pass_fn=run, wake=wake)
        if interval := self.settings.metrics.graph_consistency_interval_secs:
            yield partial(a_pass, "graph-stuck reheal", interval, pass_fn=scheduler.reheal_stuck)
            check = partial(check_graph, self.url, self.writer.submit)
            yield partial(
                periodic,
                "graph consistency",
                interval,
                CONSISTENCY_BUDGET,
                check,
                health=self.health,
                recoverable=UNRECORDED,
            )
        if interval := self.settings.gc.interval_secs:
            collects = partial(a_pass, budget=GARBAGE_BUDGET)
            garbage = self.garbage
            yield partial(collects, "garbage", interval, pass_fn=garbage.collect)
            yield partial(
                collects,
                "old evaluations",
                interval,
                pass_fn=garbage.collect_evaluations,
                wake=garbage.ended,
            )
