"""Steps of builds: handed out, begun, done, failed, lost, tried again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from gradient.graph.assignments import ClaimBuild
from gradient.graph.build_failures import BuildFailed
from gradient.graph.build_outputs import StoreBuildOutput
from gradient.graph.builds import BuildCompleted, BuildStarted
from gradient.graph.requeue import LoseWorker, RetryTransient, ReturnAssignment
from gradient.graph.transaction import Message
from gradient.model import BuildStatus, FailureKind, JobKind
from tests.graph.world import hash_part
from tests.model.cache_steps import CacheSteps
from tests.model.facts import Assignment
from tests.model.pair import LIMITS, PICK, SELDOM, WORKER, WORKERS
from tests.model.script import step
from tests.model.stored import Stored


class BuildSteps(CacheSteps):
    """What happens to builds."""

    def _queued(self) -> list[str]:
        builds = self.model.facts.builds
        return [n for n in sorted(builds) if self.model.may_claim(n, builds[n].cache_available)]

    def _jobs(self) -> list[int]:
        jobs = self.model.facts.assignments
        return [i for i, job in jobs.items() if job.kind is JobKind.BUILD and job.outcome is None]

    def _claim(self, name: str, worker: UUID = WORKERS[0]) -> int:
        available = self.model.facts.builds[name].cache_available
        assignment = self._apply(ClaimBuild(self._id(name), available, worker, "w"))
        assert assignment is not None
        self._say(f"claim {name}")
        self.model.claim_build(name, assignment, worker)
        self._check()
        return assignment

    def _some_job(self, pick: int) -> int:
        """One that is on a worker; while there is none, one that is handed out now."""
        jobs = self._jobs()
        return self._choose(jobs, pick) if jobs else self._claim(self._choose(self._queued(), pick))

    def _ended_jobs(self) -> list[int]:
        jobs = self.model.facts.assignments
        return [i for i, job in jobs.items() if job.kind is JobKind.BUILD and job.outcome is not None]

    def _on_workers(self) -> bool:
        return any(job.outcome is None for job in self.model.facts.assignments.values())

    def _failed_transient(self) -> bool:
        builds = self.model.facts.builds.values()
        return any(build.status is BuildStatus.FAILED_TRANSIENT for build in builds)

    @precondition(lambda self: self._queued())
    @step(pick=PICK, worker=WORKER)
    def claim(self, pick: int, worker: int) -> None:
        self._claim(self._choose(self._queued(), pick), WORKERS[worker])

    @precondition(lambda self: self.model.facts.builds)
    @step(pick=PICK, available=st.booleans())
    def claim_in_vain(self, pick: int, available: bool) -> None:
        """Invariant 10: not Queued any more, or somebody has it, or it is of another kind by now."""
        name = self._choose(sorted(self.model.facts.builds), pick)
        if not self.model.may_claim(name, available):
            self._say(f"claim_in_vain {name}")
            message = ClaimBuild(self._id(name), available, WORKERS[0], "w")
            self._same("ClaimBuild", self._apply(message), None)
            self._check()

    @precondition(lambda self: self._jobs() or self._queued())
    @step(pick=PICK)
    def report_building(self, pick: int) -> None:
        self._report(self._some_job(pick), self._start_build)

    @precondition(lambda self: self._ended_jobs())
    @step(pick=PICK)
    def late_report(self, pick: int) -> None:
        """Invariant 36: after its assignment is closed no report changes anything."""
        assignment = self._choose(self._ended_jobs(), pick)
        before, name = self.last, self.model.facts.assignments[assignment].derivation
        late: tuple[Message[Any], ...] = (
            BuildStarted(assignment),
            StoreBuildOutput(assignment, (), True),
            BuildCompleted(assignment, LIMITS),
            BuildFailed(assignment, FailureKind.PERMANENT, "late", LIMITS),
            ReturnAssignment(assignment),
        )
        self._say(f"late_report of {name}")
        for message in late:
            self._apply(message)
        self._check()
        self._unchanged("36 a late report", before)

    def _report(self, assignment: int, report: Callable[[int, Assignment], None]) -> None:
        before = self.last
        report(assignment, self.model.facts.assignments[assignment])
        self._check()
        self._stays_aborted(assignment, before)

    def _stays_aborted(self, assignment: int, before: Stored) -> None:
        """Invariant 36: a committed Aborted is never overwritten by a late report."""
        name = self.model.facts.assignments[assignment].derivation or ""
        was, now = (stored.facts.builds[name].status for stored in (before, self.last))
        if was is BuildStatus.ABORTED and now is not was:
            self._diverge([f"36 a committed Aborted: {name} is {now.name}"])

    def _start_build(self, assignment: int, job: Assignment) -> None:
        self._say(f"building {job.derivation}")
        self._same("BuildStarted", self._apply(BuildStarted(assignment)), self.model.start_build(assignment))

    def _complete(
        self, assignment: int, *, without: int | None = None, substituted: bool | None = None
    ) -> None:
        """Upload, BuildOutput, JobCompleted; perhaps the worker claims more than it uploaded."""
        name = self.model.facts.assignments[assignment].derivation
        assert name is not None
        nars = list(self.universe.outputs(name).items())
        if without is not None:
            del nars[without % len(nars)]
        if nars:
            self._commit(dict(nars))
        if substituted is not None:
            self._say(f"build_output {name}, substituted: {substituted}")
            self._apply(StoreBuildOutput(assignment, (), substituted))
            self.model.build_output(assignment, substituted=substituted)
            self._check()
        self._say(f"complete {name}")
        before = self.last
        self._same(
            "BuildCompleted",
            self._apply(BuildCompleted(assignment, LIMITS)),
            self.model.complete_build(assignment),
        )
        self._check()
        self._stays_aborted(assignment, before)

    @precondition(lambda self: self._jobs() or self._queued())
    @step(pick=PICK, lies=st.integers(0, 7), which=PICK, substituted=st.sampled_from([None, True, False]))
    def complete(self, pick: int, lies: int, which: int, substituted: bool | None) -> None:
        without = which if lies == 0 else None
        self._complete(self._some_job(pick), without=without, substituted=substituted)

    @precondition(lambda self: self._queued())
    @step(picks=st.lists(PICK, min_size=1, max_size=4))
    def build(self, picks: list[int]) -> None:
        """Claim, build, upload, complete: several after each other, to get anywhere."""
        for pick in picks:
            if self._queued():
                assignment = self._claim(self._choose(self._queued(), pick))
                self._report(assignment, self._start_build)
                self._complete(assignment, substituted=pick % 3 == 0)

    @precondition(lambda self: self._jobs() or self._queued())
    @step(
        pick=PICK,
        kind=st.sampled_from(FailureKind).map(int),
        oom=st.integers(0, 9),
        missing=st.lists(PICK, max_size=2),
    )
    def fail(self, pick: int, kind: int, oom: int, missing: list[int]) -> None:
        self._fail(self._some_job(pick), FailureKind(kind), oom=oom == 0, missing=missing)

    @precondition(lambda self: self._jobs() or self._queued())
    @step(pick=PICK, missing=st.lists(PICK, min_size=1, max_size=2))
    def fail_for_want_of_inputs(self, pick: int, missing: list[int]) -> None:
        """The missing-input self-heal."""
        self._fail(self._some_job(pick), FailureKind.INPUTS_UNAVAILABLE, missing=missing)

    def _fail(
        self, assignment: int, kind: FailureKind, *, oom: bool = False, missing: Sequence[int] = ()
    ) -> None:
        name = self.model.facts.assignments[assignment].derivation
        assert name is not None
        found = self.universe.found[name]
        lows = {path for low in found.inputs for path in self.universe.outputs(low)}
        needed = sorted(lows.union(found.sources))
        paths = sorted({self._choose(needed, pick) for pick in missing}) if needed else []
        why = f"{kind.name}{', out of memory' if oom else ''}, missing {', '.join(paths) or 'nothing'}"
        self._say(f"fail {name}: {why}")
        hashes = tuple(map(hash_part, paths))
        self._apply(BuildFailed(assignment, kind, "broken", LIMITS, oom, missing_paths=hashes))
        self.model.fail_build(assignment, kind, oom=oom, missing=paths)
        self._check()

    @precondition(lambda self: self._jobs() or self._queued())
    @step(pick=PICK)
    def decline(self, pick: int) -> None:
        assignment = self._some_job(pick)
        self._say(f"decline {self.model.facts.assignments[assignment].derivation}")
        self._apply(ReturnAssignment(assignment))
        self.model.return_assignment(assignment)
        self._check()

    @precondition(lambda self: self._on_workers())
    @step(worker=WORKER)
    def lose_worker(self, worker: int) -> None:
        self._lose_worker(WORKERS[worker])

    def _lose_worker(self, worker: UUID) -> None:
        self._say(f"lose_worker {worker.int}")
        self._apply(LoseWorker(worker))
        self.model.lose_worker(worker)
        self._drop_streams()
        self._check()

    def _drop_streams(self) -> None:
        jobs = self.model.facts.assignments
        self.streams = {v: s for v, s in self.streams.items() if jobs[s.assignment].outcome is None}

    @precondition(lambda self: self._queued())
    @SELDOM
    @step(pick=PICK)
    def take_workers_along(self, pick: int) -> None:
        """A build that takes ten workers in a row with it."""
        name = self._choose(self._queued(), pick)
        while self.model.facts.builds[name].status is BuildStatus.QUEUED:
            self._claim(name, WORKERS[1])
            self._lose_worker(WORKERS[1])

    @precondition(lambda self: self.model.upstream and self.model.facts.builds)
    @step(picks=st.lists(PICK, min_size=1, max_size=4), served=st.booleans())
    def answer_probe(self, picks: list[int], served: bool) -> None:
        """The upstream caches have answered."""
        builds = sorted(self.model.facts.builds)
        self._answer_probe(sorted({builds[pick % len(builds)] for pick in picks}), served=served)

    @precondition(lambda self: self._failed_transient() or self._jobs() or self._queued())
    @step(minutes=st.sampled_from([0, 1, 10]), pick=PICK)
    def retry_transient(self, minutes: int, pick: int) -> None:
        if not self._failed_transient():
            self._fail(self._some_job(pick), FailureKind.TRANSIENT)
        self._retry_transient(minutes)

    def _retry_transient(self, minutes: int) -> None:
        self.graph.pass_time(timedelta(minutes=minutes))
        self._say(f"retry_transient {minutes} minutes later")
        answer = self._apply(RetryTransient(LIMITS))
        self._same("RetryTransient", answer, self.model.retry_transient())
        self._check()
