"""The worker pool: who is connected, what they can do, what they run. Layer: passes, in memory.

Plain objects with synchronous methods: between two checkpoints trio runs nothing else, so no locks.
A worker's session owns its `Worker`; the passes read it and wake it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from uuid import UUID

import attrs

from gradient.model import BuildStage, JobKind, free_build_slots
from gradient.nursery.kick import Kick
from gradient.wire.messages import CandidateScore, Capabilities, WorkerCapabilities, WorkerMetrics

# Nix's name for a derivation any machine can run: nothing of the store is executed.
BUILTIN = "builtin"


# What a worker says of itself goes into waiting reasons and messages: a few systems and features.
MAX_WORDS = 256
MAX_WORD = 256  # characters


def fault_of(info: WorkerCapabilities) -> str | None:
    """What is wrong with a worker's description of itself, None when nothing is."""
    for what, words in (("systems", info.architectures), ("features", info.system_features)):
        if len(words) > MAX_WORDS:
            return f"more than {MAX_WORDS} {what}"
        if any(not 0 < len(word) <= MAX_WORD or not word.isprintable() for word in words):
            return f"one of its {what} is empty, longer than {MAX_WORD} characters or not printable"
    return None


@attrs.define
class ActiveJob:
    """A job on a worker, under its assignment. `subject` is the evaluation's or the derivation's id."""

    job_id: str
    assignment: int
    kind: JobKind
    subject: int
    name: str
    since: datetime
    # Where a build is, as its worker said last.
    stage: BuildStage | None = None


@attrs.define(eq=False)
class Worker:
    """A connected worker.

    `wake` is kicked when there may be something to offer or to assign; its session waits on it.
    """

    id: UUID
    name: str
    projects: frozenset[str]
    capabilities: Capabilities
    connected_at: datetime
    info: WorkerCapabilities | None = None
    metrics: WorkerMetrics | None = None
    draining: bool = False
    # Kinds the worker has asked a job for and not been given one yet.
    hungry: set[JobKind] = attrs.field(factory=set)
    # Invariant: each has an open assignment of this worker in the database.
    jobs: dict[str, ActiveJob] = attrs.field(factory=dict)
    # What the worker answered to offers that are still pending.
    scores: dict[str, CandidateScore] = attrs.field(factory=dict)
    # The generation of the newest candidate it was offered (candidates.py).
    offered: int = 0
    wake: Kick = attrs.field(factory=Kick)

    def can_build(self, architecture: str, features: Iterable[str]) -> bool:
        """Whether this worker could ever hold a build of this system and these features."""
        if self.info is None or not self.capabilities.build or self.info.max_concurrent_builds < 1:
            return False
        fits = architecture == BUILTIN or architecture in self.info.architectures
        return fits and set(features) <= set(self.info.system_features)

    def can_evaluate(self) -> bool:
        """Whether this worker could ever hold a flake job with all its steps."""
        able = self.capabilities.fetch and self.capabilities.eval
        return self.info is not None and able and self.info.max_concurrent_evals > 0

    def free_slots(self, kind: JobKind) -> int:
        """How many more jobs of this kind it can take."""
        if self.info is None or self.draining:
            return 0
        stages = [job.stage for job in self.jobs.values() if job.kind is kind]
        if kind is JobKind.EVAL:
            return self.info.max_concurrent_evals - len(stages)
        uploading = stages.count(BuildStage.UPLOAD)
        return free_build_slots(self.info.max_concurrent_builds, len(stages) - uploading, uploading)

    def entered(self, job: ActiveJob, stage: BuildStage) -> None:
        """A build of this worker has come to its next stage; the last one frees its slot."""
        job.stage = stage
        self.wake.set()

    def assignable(self, kind: JobKind) -> bool:
        """It asked for a job of this kind and has room for one."""
        return kind in self.hungry and self.free_slots(kind) > 0


@attrs.define(eq=False)
class WorkerPool:
    """Every connected worker, by id."""

    _workers: dict[UUID, Worker] = attrs.field(factory=dict)

    def add(self, worker: Worker) -> bool:
        """Take a worker in; False when one with this id is connected already."""
        if worker.id in self._workers:
            return False
        self._workers[worker.id] = worker
        return True

    def remove(self, worker: Worker) -> None:
        """Its session has ended."""
        if self._workers.get(worker.id) is worker:
            del self._workers[worker.id]

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def wake_all(self) -> None:
        """Something changed that any worker may care about."""
        for worker in self._workers.values():
            worker.wake.set()

    def holder(self, job_id: str) -> Worker | None:
        """The worker that runs a job."""
        return next((worker for worker in self if job_id in worker.jobs), None)

    def drop(self, assignments: Collection[int]) -> None:
        """These assignments are closed, whatever their workers still do: their slots are free."""
        for worker in self:
            for job in [job for job in worker.jobs.values() if job.assignment in assignments]:
                del worker.jobs[job.job_id]
                worker.wake.set()

    def forget_candidate(self, job_id: str) -> None:
        """A job is pending no more: nobody's answer about it counts."""
        for worker in self._workers.values():
            worker.scores.pop(job_id, None)

    @property
    def available_architectures(self) -> tuple[str, ...]:
        """Every system some connected worker builds for."""
        found = {
            a
            for worker in self
            if worker.info and worker.can_build(BUILTIN, ())
            for a in worker.info.architectures
        }
        return tuple(sorted(found))
