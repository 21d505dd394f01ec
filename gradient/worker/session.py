"""One session with the server, from the ack to the end of the link. Layer: worker.

    reader ── offers ──> scoring ── scores, RequestJob ──> server
       ├───── AssignJob ──> a job in its slot (own cancel scope)
       ├───── AbortJob ───> that scope
       └───── answers ────> whoever asked

The reader waits for nothing but the next message. When the link ends, every job of the session is
cancelled: the server has given them to others already, or will.
"""

from __future__ import annotations

from typing import Final, Protocol

import structlog
import trio

from gradient.model import JobKind
from gradient.nix.daemon.pool import DaemonPool
from gradient.nursery.stop_window import StopWindow
from gradient.wire.codec import Message
from gradient.wire.messages import (
    AbortJob,
    AssignJob,
    AssignJobResponse,
    CacheError,
    CacheStatus,
    Draining,
    ImportResult,
    JobListChunk,
    JobOffer,
    KnownDerivations,
    Reject,
    RequestJob,
    RequestJobList,
    WorkerCapabilities,
)
from gradient.wire.transport import Link
from gradient.worker.job import Job
from gradient.worker.metrics import Metrics
from gradient.worker.offers import Offers
from gradient.worker.queries import Queries
from gradient.worker.slots import Declined, Renewed, Slots

HEARTBEAT: Final = 10.0  # seconds

log = structlog.get_logger(__name__)


class Executor(Protocol):
    """Does the work of jobs; `jobs.execute` is the real one."""

    async def __call__(self, job: Job, assign: AssignJob, builds: int) -> None:
        """Run the job to its end; `builds` is how many builds hold a slot now, this one included."""


class Session:
    """A session that stands. `capabilities` is what the server is told; it also sizes the slots. `base_url`
    is the server's over HTTP."""

    def __init__(
        self,
        link: Link,
        base_url: str,
        capabilities: WorkerCapabilities,
        store: DaemonPool,
        execute: Executor,
    ) -> None:
        self._link = link
        self._capabilities = capabilities
        self._execute = execute
        self._window = StopWindow()
        self._queries = Queries(link.send, base_url)
        self._offers = Offers(store, link.send, self._request_jobs)
        limits = {
            JobKind.BUILD: capabilities.max_concurrent_builds,
            JobKind.EVAL: capabilities.max_concurrent_evals,
        }
        self._slots = Slots(limits, self._window, link.send, self._queries, self._slot_free)
        self._metrics = Metrics()
        # Kinds asked for since the slots of that kind were last full: the server remembers.
        self._hungry: set[JobKind] = set()
        # The server takes leave: nothing more will be assigned.
        self.server_drains = False

    async def run(self) -> None:
        """Serve until the link ends; raises LinkClosed or RemoteProtocolError, in a group."""
        async with trio.open_nursery() as nursery:
            await self._link.send(self._capabilities)
            await self._link.send(RequestJobList())
            await self._request_jobs()
            nursery.start_soon(self._beat)
            nursery.start_soon(self._offers.run)
            async for message in self._link:
                self._receive(message, nursery)

    async def stop(self) -> tuple[str, ...]:
        """Say that the worker stops, abort every job and wait for the reports: at most five seconds, exactly.

        Returns the jobs that did not report; they end with the session. Raises LinkClosed, in a group."""
        async with trio.open_nursery() as nursery:
            # Beside, because it may have to wait for its turn; it is control, so it goes before the reports.
            nursery.start_soon(self._link.send, Draining())
            late = await self._window.close()
            nursery.cancel_scope.cancel()
        return late

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs that have not reported yet."""
        return self._window.running

    # --- what comes ---------------------------------------------------------------------------------

    def _receive(self, message: Message, nursery: trio.Nursery) -> None:
        match message:
            case JobOffer(candidates) | JobListChunk(candidates=candidates):
                self._offers.offered(candidates)
            case AssignJob():
                self._assigned(message, nursery)
            case AbortJob(job_id, reason):
                self._slots.abort(job_id, reason)
            case CacheStatus() | CacheError() | KnownDerivations() | ImportResult():
                self._queries.answered(message)
            case Draining():
                log.info("the server is stopping")
                self.server_drains = True
            case Reject(code, reason):
                log.warning("rejected", code=code, reason=reason)
            case _:
                log.warning("message out of place", message=type(message).__name__)

    def _assigned(self, assign: AssignJob, nursery: trio.Nursery) -> None:
        placed = self._slots.place(assign)
        match placed:
            case Job():
                if not self._slots.has_room(placed.kind):
                    self._hungry.discard(placed.kind)
                nursery.start_soon(self._run_job, placed, assign)
            case Renewed():
                nursery.start_soon(self._answer, assign, True, None)
            case Declined(reason):
                nursery.start_soon(self._answer, assign, False, reason)

    async def _answer(self, assign: AssignJob, accepted: bool, reason: str | None) -> None:
        await self._link.send(AssignJobResponse(assign.job_id, assign.assignment_id, accepted, reason))

    async def _run_job(self, job: Job, assign: AssignJob) -> None:
        await self._slots.run(job, assign, self._work)
        log.debug("job ended", job=job.job_id, elapsed_ms=job.timeline.elapsed_ms)

    async def _work(self, job: Job, assign: AssignJob) -> None:
        await self._execute(job, assign, self._slots.running(JobKind.BUILD))

    async def _slot_free(self, kind: JobKind) -> None:
        # In any case: when the server handed out the last job it may have counted this slot as taken.
        self._hungry.discard(kind)
        await self._request_jobs()

    # --- what goes ----------------------------------------------------------------------------------

    async def _request_jobs(self) -> None:
        """Ask for a job of each kind that has room, unless the server knows."""
        for kind in JobKind:
            if kind not in self._hungry and self._slots.has_room(kind):
                self._hungry.add(kind)
                await self._link.send(RequestJob(kind))

    async def _beat(self) -> None:
        while True:
            await trio.sleep(HEARTBEAT)
            await self._link.send(self._metrics.take())
            # Once more, should the server have forgotten.
            self._hungry.clear()
            await self._request_jobs()
