"""Every session of the server: from a link to a worker in the pool, and out again. Layer: sessions.

The one place that connects the protocol to the scheduler: `moved` takes what the graph writer published,
`serve` is the handler of each link, `drain` tells everybody that the server stops.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final
from uuid import UUID

import attrs
import structlog
import trio

from gradient.graph.moves import Moves
from gradient.graph.pg_errors import DATABASE_ERRORS
from gradient.graph.pg_pool import Pool
from gradient.graph.writer import GraphWriter
from gradient.passes.pool import Worker
from gradient.passes.scheduler import Scheduler
from gradient.sessions.imports import ImportWaits
from gradient.sessions.live import LiveHub
from gradient.sessions.log_lane import LogLane
from gradient.sessions.queries import CacheSide, Queries
from gradient.sessions.registrar import Registrar
from gradient.sessions.reports import ReportApplier
from gradient.sessions.session import Session
from gradient.wire.greeting import greet
from gradient.wire.handshake import Established
from gradient.wire.messages import Capabilities, Draining
from gradient.wire.transport import GOING_AWAY, Link

# Seconds a draining server leaves its workers to finish what they run.
DRAIN_LIMIT: Final = 20.0
# Seconds for their last reports once they are closed.
CLOSE_LIMIT: Final = 2.0
TRY_AGAIN_LATER: Final = 1013  # close code

log = structlog.get_logger()


@attrs.define(eq=False)
class Sessions:
    """The sessions of this server, by worker."""

    readers: Pool
    writer: GraphWriter
    scheduler: Scheduler
    hub: LiveHub
    side: CacheSide
    clock: Callable[[], datetime]
    imports: ImportWaits = attrs.field(init=False)
    _open: dict[UUID, Session] = attrs.field(factory=dict, init=False)
    # Set whenever a session or a job may have ended: the drain waits on it.
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self.imports = ImportWaits(self.readers)

    def moved(self, moves: Moves) -> None:
        """Take what a transaction moved: aborts go to their workers. Never blocks."""
        self.imports.moved(moves)
        self._something_ended()
        for abort in moves.aborts:
            worker = self.scheduler.pool.holder(abort.job_id)
            if worker is not None and worker.id in self._open:
                self._open[worker.id].abort(abort.job_id, abort.reason)

    async def serve(self, link: Link) -> None:
        """Handle one link until it ends. Raises WireError for what its peer did."""
        registrar = Registrar(self.readers, self.scheduler.pool)
        try:
            established = await greet(link, registrar, Capabilities(), accepting=not self.scheduler.draining)
        except DATABASE_ERRORS as error:
            log.warning("worker turned away: the database does not answer", error=str(error))
            await link.close(TRY_AGAIN_LATER, "the database does not answer, try again later")
            return
        worker = self._worker(registrar, established)
        if not self.scheduler.pool.add(worker):
            await link.close(1008, "a worker with this id is connected already")
            return
        session = self._session(link, worker)
        self._open[worker.id] = session
        log.info("worker connected", worker=worker.name, peer=link.peer)
        try:
            await session.run()
        finally:
            del self._open[worker.id]
            self.scheduler.pool.remove(worker)
            self.scheduler.pool_changed()
            self._something_ended()

    def _something_ended(self) -> None:
        self._ended.set()
        self._ended = trio.Event()

    def _worker(self, registrar: Registrar, established: Established) -> Worker:
        proven, asked = registrar.proven, established.capabilities
        return Worker(
            id=UUID(established.worker_id),
            name=self._name(established),
            projects=frozenset(established.authorized_peers),
            capabilities=Capabilities(
                fetch=asked.fetch and any(r.enable_fetch for r in proven),
                eval=asked.eval and any(r.enable_eval for r in proven),
                build=asked.build and any(r.enable_build for r in proven),
            ),
            connected_at=self.clock(),
        )

    def _name(self, established: Established) -> str:
        """What people call a worker, with the head of its id where that alone does not tell it apart."""
        head = established.worker_id[:8]
        taken = any(worker.name == established.name for worker in self.scheduler.pool)
        return f"{established.name} ({head})" if taken else established.name or head

    def _session(self, link: Link, worker: Worker) -> Session:
        logs = LogLane(self.readers, self.hub.publish_log)
        applier = ReportApplier(worker, self.writer, self.hub, logs, self.scheduler.limits)
        queries = Queries(self.readers, self.writer.submit, self.side, worker.name)
        return Session(link, worker, self.scheduler, self.writer, queries, self.imports, applier, logs)

    async def drain(self) -> None:
        """Tell every worker that the server stops, and wait until their jobs have ended, at most
        DRAIN_LIMIT; then close the sessions."""
        for session in self._open.values():
            session.tell(Draining())
        with trio.move_on_after(DRAIN_LIMIT):
            while any(session.worker.jobs for session in self._open.values()):
                await self._ended.wait()
        async with trio.open_nursery() as nursery:
            for session in self._open.values():
                nursery.start_soon(session.link.close, GOING_AWAY, "the server stops")
        # Each still applies what it received.
        with trio.move_on_after(CLOSE_LIMIT):
            while self._open:
                await self._ended.wait()

    def waiting_for(self) -> str:
        """What a drain still waits for, in words."""
        jobs = sum(len(session.worker.jobs) for session in self._open.values())
        return f"{jobs} jobs on {len(self._open)} workers"
