"""The scheduler: pending jobs against connected workers. Layer: passes.

It holds no truth: what is pending is what the database says is Queued, kept up by the graph writer's
`Moves` and re-read in a resync. A job is handed out by a claim through the graph writer alone.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from typing import Final, TypeVar

import attrs
import structlog

from gradient.graph.assignments import ClaimBuild, ClaimEvaluation
from gradient.graph.candidate_reads import (
    BuildCandidate,
    InFlight,
    blocking_kinds,
    build_candidates,
    evaluation_candidates,
    evaluations_in_flight,
    queued_builds,
)
from gradient.graph.counters import fold_shared_build_deltas, recount_evaluations
from gradient.graph.drv_recovery import RecoverDrv
from gradient.graph.evaluation_end import AbortEvaluation, FinishEvaluation
from gradient.graph.evaluations import ParkEvaluation, UnparkEvaluation
from gradient.graph.failure import RetryLimits
from gradient.graph.heal import Repair
from gradient.graph.moves import Moves
from gradient.graph.pg_errors import is_content_error
from gradient.graph.pg_pool import Pool
from gradient.graph.requeue import RetryTransient
from gradient.graph.unconfirmed import AbandonUnconfirmed
from gradient.graph.writer import GraphWriter
from gradient.model import EvaluationStatus, JobKind
from gradient.nursery.kick import Kick
from gradient.passes.candidates import Candidates, JobCandidate, visible_to
from gradient.passes.job_specs import build_spec, flake_job
from gradient.passes.pool import ActiveJob, Worker, WorkerPool
from gradient.passes.scoring import Scored, rank
from gradient.passes.waiting import (
    AbortUnbuildable,
    Finish,
    Park,
    PoolView,
    ReadBlocking,
    Unpark,
    Verdict,
    building_verdict,
    phase_from_counters,
    unstick_due,
)
from gradient.settings.tables import Build
from gradient.wire.messages import AssignJob

log = structlog.get_logger()
T = TypeVar("T")

# Claims one request may lose to others before the worker is left hungry for the next wake-up.
MAX_CLAIMS: Final = 3
# Queued builds read at a time: a restart with 140,000 of them must not hold everything in one query.
LOAD_SLICE: Final = 2000


@attrs.define(eq=False)
class Scheduler:
    """Pending jobs, the pool, and the passes over them. `clock` gives wall time."""

    writer: GraphWriter
    readers: Pool
    settings: Build
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    pool: WorkerPool = attrs.field(factory=WorkerPool)
    candidates: Candidates = attrs.field(factory=Candidates)
    # Queued builds whose candidate is still to be read, in order of arrival.
    _unread: dict[int, None] = attrs.field(factory=dict)
    # Wakes the pass that reads candidates, the one that assigns evaluations, and the waiting pass.
    builds_moved: Kick = attrs.field(factory=Kick)
    evaluations_moved: Kick = attrs.field(factory=Kick)
    waiting_moved: Kick = attrs.field(factory=Kick)
    # While the server drains, nothing is assigned any more.
    draining: bool = False

    @property
    def limits(self) -> RetryLimits:
        """The `[build]` settings as decisions need them."""
        return RetryLimits(
            self.settings.max_attempts,
            self.settings.retry_backoff_secs,
            self.settings.substitute_miss_escalation_threshold,
            self.settings.inputs_unavailable_max_loops,
        )

    # --- what the graph writer tells ---------------------------------------------------------------

    def moved(self, moves: Moves) -> None:
        """Take what a transaction moved. Never blocks."""
        self.pool.drop(moves.dropped)
        for derivation in moves.unqueued:
            self._drop(f"build:{derivation}")
        returned = [int(key.removeprefix("build:")) for key in moves.returned if key.startswith("build:")]
        for derivation in (*moves.queued, *returned):
            self._unread[derivation] = None
        if self._unread:
            self.builds_moved.set()
        for evaluation, status in moves.evaluations.items():
            if status is not EvaluationStatus.QUEUED:
                self._drop(f"eval:{evaluation}")
        if moves.evaluations or any(key.startswith("eval:") for key in moves.returned):
            self.evaluations_moved.set()
        if moves.evaluations:
            self.waiting_moved.set()

    def pool_changed(self) -> None:
        """A worker came, went or changed what it can do."""
        self.evaluations_moved.set()
        self.builds_moved.set()
        self.waiting_moved.set()

    def _drop(self, job_id: str) -> None:
        self.candidates.leave(job_id)
        self.pool.forget_candidate(job_id)
        if job_id.startswith("build:"):
            self._unread.pop(int(job_id.removeprefix("build:")), None)

    # --- passes ------------------------------------------------------------------------------------

    async def assign_builds(self) -> None:
        """Read newly queued builds into memory and wake the workers that may want them."""
        while self._unread:
            slice_ = list(islice(self._unread, LOAD_SLICE))
            # Out before the read: what moves while it goes on must be read once more.
            for derivation in slice_:
                del self._unread[derivation]
            try:
                async with self.readers.connection() as connection:
                    read = await build_candidates(connection, slice_)
            except BaseException:
                self._unread |= dict.fromkeys(slice_)
                raise
            for candidate in read:
                self.candidates.enter(candidate)
        # Also without news: a worker whose claim was lost or failed looks again.
        if self.candidates:
            self.pool.wake_all()

    async def assign_queued_evals(self) -> None:
        """Read queued evaluations into memory and wake the workers."""
        async with self.readers.connection() as connection:
            read = await evaluation_candidates(connection)
        for candidate in read:
            if candidate.job_id not in self.candidates:
                self.candidates.enter(candidate)
        if read:
            self.pool.wake_all()

    async def retry_transient(self) -> None:
        """Queue the transient failures whose backoff is over."""
        await self.writer.submit(RetryTransient(self.limits))

    async def abandon_unconfirmed(self) -> None:
        """Close what workers were told to stop and never confirmed."""
        await self.writer.submit(AbandonUnconfirmed())

    async def resync(self) -> None:
        """Re-read what is Queued: moves nothing, catches what memory lost."""
        async with self.readers.connection() as connection:
            queued = await queued_builds(connection)
        for derivation in queued:
            if f"build:{derivation}" not in self.candidates:
                self._unread[derivation] = None
        if self._unread:
            self.builds_moved.set()

    async def refresh_waiting_state(self) -> None:
        """Fold the counters, then park, unpark or finish every evaluation that is due."""
        async with self.readers.connection() as connection:
            await fold_shared_build_deltas(connection)
            in_flight = await evaluations_in_flight(connection)
        pool = self._pool_view()
        for evaluation in in_flight:
            verdict = await self._assess(evaluation, pool)
            if unstick_due(evaluation, verdict):
                await self._attempt_graph_unstick(evaluation.evaluation, pool)
            else:
                await self._apply(evaluation, verdict)

    async def reheal_stuck(self) -> None:
        """Heal every evaluation that waits in `graph_stuck` once more, then look at them again."""
        stuck = await self._stuck()
        for evaluation in stuck:
            await self._heal(evaluation)
        if stuck:
            self.waiting_moved.set()

    async def recover_drv_stuck_evals(self) -> None:
        """Have a lost `.drv` brought again that an evaluation in `graph_stuck` has waited for too long."""
        for evaluation in await self._stuck():
            if recovery := await self.writer.submit(RecoverDrv(evaluation)):
                log.warning(".drv is gone from the cache", evaluation=evaluation, recovery=recovery)

    async def _stuck(self) -> list[int]:
        async with self.readers.connection() as connection:
            in_flight = await evaluations_in_flight(connection)
        return [v.evaluation for v in in_flight if (v.reason or {}).get("kind") == "graph_stuck"]

    async def _attempt_graph_unstick(self, evaluation: int, pool: PoolView) -> None:
        """Heal its closure, then judge it by what it is now."""
        await self._heal(evaluation)
        async with self.readers.connection() as connection:
            in_flight = await evaluations_in_flight(connection)
        for healed in in_flight:
            if healed.evaluation == evaluation:
                await self._apply(healed, await self._assess(healed, pool))

    async def _heal(self, evaluation: int) -> None:
        """A step that fails takes the whole repair back: then the evaluation stays parked."""
        try:
            await self.writer.submit(Repair(evaluation))
        except Exception as error:
            if not is_content_error(error):
                raise
            log.warning("graph not healed", evaluation=evaluation, error=str(error))

    async def _assess(self, evaluation: InFlight, pool: PoolView) -> Verdict:
        verdict = phase_from_counters(evaluation, pool)
        return await self._look_closer(evaluation, pool) if isinstance(verdict, ReadBlocking) else verdict

    async def _look_closer(self, evaluation: InFlight, pool: PoolView) -> Verdict:
        async with self.readers.connection() as connection:
            blocking = await blocking_kinds(connection, evaluation.evaluation)
            if not blocking:
                # The counters said otherwise: they have drifted, and would keep it from finishing.
                await recount_evaluations(connection, [evaluation.evaluation])
        return building_verdict(evaluation, blocking, pool, self.clock())

    async def _apply(self, in_flight: InFlight, verdict: Verdict) -> None:
        evaluation = in_flight.evaluation
        match verdict:
            case Park(reason, goes_on):
                if reason != in_flight.reason:
                    await self.writer.submit(ParkEvaluation(evaluation, in_flight.status, reason, goes_on))
            case Unpark(status):
                await self.writer.submit(UnparkEvaluation(evaluation, status))
            case Finish():
                await self.writer.submit(FinishEvaluation(evaluation))
            case AbortUnbuildable(warning):
                await self.writer.submit(AbortEvaluation(evaluation, "no worker can build it", warning))
            case _:
                pass

    def _pool_view(self) -> PoolView:
        workers = list(self.pool)
        return PoolView(
            connected_workers=len(workers),
            can_fetch=any(worker.capabilities.fetch for worker in workers),
            can_evaluate=any(worker.can_evaluate() for worker in workers),
            available_architectures=self.pool.available_architectures,
            can_build=lambda architecture, features: any(
                worker.can_build(architecture, features) for worker in workers
            ),
        )

    # --- handing out -------------------------------------------------------------------------------

    async def next_job(self, worker: Worker, kind: JobKind) -> AssignJob | None:
        """Claim the best pending job of a kind for a worker; None when there is none for it.

        The claimed job is in `worker.jobs` when this returns. Raises what the claim raises: after a
        database error the job is pending again.
        """
        pending = [c for c in self.candidates.of_kind(kind) if visible_to(worker, c)]
        for scored in rank(pending, worker.scores, self.clock())[:MAX_CLAIMS]:
            if self.draining or not worker.assignable(kind):
                return None
            if scored.candidate.job_id not in self.candidates:
                continue
            self._drop(scored.candidate.job_id)
            try:
                assignment = await self._claim(worker, scored)
            except BaseException:
                self.candidates.enter(scored.candidate)
                raise
            if assignment is not None:
                return self._assigned(worker, scored.candidate, assignment)
        return None

    async def _claim(self, worker: Worker, scored: Scored) -> int | None:
        candidate = scored.candidate
        if isinstance(candidate, BuildCandidate):
            return await self.writer.submit(
                ClaimBuild(
                    candidate.derivation, candidate.cache_available, worker.id, worker.name, scored.total
                )
            )
        return await self.writer.submit(
            ClaimEvaluation(candidate.evaluation, worker.id, worker.name, score=scored.total)
        )

    def _assigned(self, worker: Worker, candidate: JobCandidate, assignment: int) -> AssignJob:
        job_id, now = candidate.job_id, self.clock()
        if isinstance(candidate, BuildCandidate):
            job = ActiveJob(job_id, assignment, JobKind.BUILD, candidate.derivation, candidate.name, now)
            message = AssignJob(job_id, assignment, build=build_spec(candidate, self.settings))
        else:
            name = f"evaluation {candidate.evaluation}"
            job = ActiveJob(job_id, assignment, JobKind.EVAL, candidate.evaluation, name, now)
            message = AssignJob(job_id, assignment, flake=flake_job(candidate))
        worker.jobs[job_id] = job
        if worker.free_slots(job.kind) < 1:
            worker.hungry.discard(job.kind)
        return message
