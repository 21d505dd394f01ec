"""Steps of evaluations: asked for, streamed, failed, aborted, and asked for again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gradient.graph.assignments import ClaimEvaluation
from gradient.graph.evaluations import (
    AbortEvaluation,
    CreateEvaluation,
    EvalFailed,
    EvalStreamCompleted,
    EvaluationPhase,
    FailEvaluation,
    FinishEvaluation,
    UnparkEvaluation,
)
from gradient.graph.record import Record
from gradient.graph.transaction import Rejected
from gradient.model import (
    EVALUATION_ACTIVE,
    DiscoveredDerivation,
    EntryPoint,
    EvaluationStatus,
    FailureKind,
    JobKind,
    Repository,
)
from tests.graph.world import drv
from tests.model import rules
from tests.model.cache_steps import CacheSteps
from tests.model.model import Found
from tests.model.pair import LIMITS, PICK, WORKERS, Stream
from tests.model.universe import discovered

# Evaluations on a worker at the same time.
STREAMS: Final = 3


class InOrder:
    """In place of a random order."""

    def shuffle(self, left: list[str]) -> None:
        left.sort()


class EvaluationSteps(CacheSteps):
    """What happens to evaluations."""

    def _evaluations(self, *statuses: EvaluationStatus) -> list[int]:
        return [v for v, row in self.model.facts.evaluations.items() if row.status in statuses]

    def _live(self) -> list[int]:
        return self._evaluations(*EVALUATION_ACTIVE)

    def _past(self) -> list[int]:
        return [v for v, row in self.model.facts.evaluations.items() if row.evaluated]

    def _unfinished(self) -> list[int]:
        """Live ones whose stream has not ended."""
        return sorted(set(self._live()) - set(self._past()))

    def _parked(self) -> list[int]:
        return self._evaluations(EvaluationStatus.WAITING)

    def _queued_evaluations(self) -> list[int]:
        jobs = self.model.facts.assignments.values()
        taken = {job.evaluation for job in jobs if job.kind is JobKind.EVAL and job.outcome is None}
        return [v for v in self._evaluations(EvaluationStatus.QUEUED) if v not in taken]

    @precondition(lambda self: len(self.streams) < STREAMS)
    @rule(
        tops=st.lists(PICK, min_size=1, max_size=3),
        for_task=st.booleans(),
        prune=st.booleans(),
        order=st.randoms(),
    )
    def new_evaluation(self, tops: list[int], for_task: bool, prune: bool, order: Any) -> None:
        self._new_evaluation(tops, for_task=for_task, prune=prune, order=order)

    def _new_evaluation(self, tops: list[int], *, for_task: bool, prune: bool, order: Any) -> None:
        task = self.portal(self._new_task) if for_task else None
        source = Repository("git+https://example.org/x")
        evaluation = self._apply(CreateEvaluation("main", source, task=task))
        self.model.create_evaluation(evaluation, for_task=for_task)
        self.tops[evaluation] = sorted({self.letters[top % len(self.letters)] for top in tops})
        asked = "a task" if for_task else "a person"
        self._say(f"new_evaluation {evaluation} of {self.tops[evaluation]} by {asked}")
        self._check()
        self._start(evaluation, prune, order)

    async def _new_task(self) -> int:
        cursor = await self.graph.connection.execute(
            "INSERT INTO task (project, name, repository, created_at)"
            " SELECT p.id, 't' || (SELECT count(*) FROM task), 'u', now() FROM project p RETURNING id"
        )
        (task,) = await cursor.fetchone()  # type: ignore[misc]
        return int(task)

    @precondition(lambda self: self._queued_evaluations() and len(self.streams) < STREAMS)
    @rule(pick=PICK, prune=st.booleans(), order=st.randoms())
    def start_evaluation(self, pick: int, prune: bool, order: Any) -> None:
        self._start(self._choose(self._queued_evaluations(), pick), prune, order)

    def _start(self, evaluation: int, prune: bool, order: Any) -> None:
        """A worker takes it, and finds a closure, in some order, perhaps without what the graph knows."""
        worker = WORKERS[evaluation % 2]
        assignment = self._apply(ClaimEvaluation(evaluation, worker, "w"))
        assert assignment is not None
        self.model.claim_evaluation(evaluation, assignment, worker)
        self._check()
        self._same(
            "EvaluationPhase",
            self._apply(EvaluationPhase(assignment, EvaluationStatus.EVALUATING_DERIVATION)),
            self.model.evaluation_phase(assignment, EvaluationStatus.EVALUATING_DERIVATION),
        )
        tops = self.tops[evaluation]
        known = rules.recorded(self.model.facts) & {
            n for n, d in self.model.facts.derivations.items() if d.walked
        }
        left = self.universe.closure(tops, known if prune else ())
        order.shuffle(left)
        self.streams[evaluation] = Stream(assignment, left, {f"attr.{top}": top for top in tops})
        self._say(f"start {evaluation}, which will send {left}")
        self._check()

    def _stream(self, pick: int) -> tuple[int, Stream]:
        return self._choose(sorted(self.streams.items()), pick)

    @precondition(lambda self: self.streams)
    @rule(
        pick=PICK, size=st.integers(1, 4), drvs=st.booleans(), entries=st.booleans(), error=st.integers(0, 9)
    )
    def send_batch(self, pick: int, size: int, drvs: bool, entries: bool, error: int) -> None:
        evaluation, stream = self._stream(pick)
        self._send_batch(evaluation, stream, size, drvs=drvs, entries=entries, error=error == 0)

    def _send_batch(
        self, evaluation: int, stream: Stream, size: int, *, drvs: bool, entries: bool, error: bool = False
    ) -> None:
        batch, stream.left = stream.left[:size], stream.left[size:]
        if drvs and batch:
            self._commit({f"{name}.drv": () for name in batch})
        points = self._points(stream, batch) if entries else {}
        found = [self.universe.found[name] for name in batch]
        stream.sent.append(found)
        self._record(evaluation, found, points, error=error)

    def _points(self, stream: Stream, batch: Collection[str]) -> dict[str, str]:
        """Its entry points that the graph knows: one that was known and is collected is never sent."""
        known = {*self.model.facts.derivations, *batch}
        return {attr: name for attr, name in stream.entries.items() if name in known}

    @precondition(lambda self: any(stream.sent for stream in self.streams.values()))
    @rule(pick=PICK, which=PICK)
    def send_again(self, pick: int, which: int) -> None:
        """Invariant 22: replaying a batch changes nothing, neither rows nor counters nor names."""
        sending = [(v, stream) for v, stream in sorted(self.streams.items()) if stream.sent]
        evaluation, stream = self._choose(sending, pick)
        before = self.last
        self._record(evaluation, self._choose(stream.sent, which), {})
        self._unchanged("22 a batch again", before)

    def _record(
        self, evaluation: int, batch: Sequence[Found], points: dict[str, str], *, error: bool = False
    ) -> None:
        derivations: tuple[DiscoveredDerivation, ...] = tuple(map(discovered, batch))
        entries = tuple(EntryPoint(attr, drv(name)) for attr, name in points.items())
        errors = ("it did not evaluate",) if error else ()
        letters = "".join(found.name for found in batch)
        self._say(f"record {letters or 'nothing'} for {evaluation}, entry points {sorted(points.values())}")
        dropped = self._apply(Record(evaluation, derivations, entries, (), errors)).dropped
        self._same("dropped", dropped, not self.model.record(evaluation, batch, points, error=error))
        self._check()

    @precondition(lambda self: self.streams)
    @rule(pick=PICK)
    def send_nonsense(self, pick: int) -> None:
        """Refused, and nothing of it stays."""
        evaluation, _ = self._stream(pick)
        before = self.last
        good = discovered(self.universe.found[self.letters[-1]])
        bad = attrs.evolve(good, drv_path=drv("nonsense"), outputs=())
        self._say(f"nonsense for {evaluation}")
        try:
            self.portal(self.graph.apply, Record(evaluation, (good, bad)), self._saw)
        except Rejected:
            pass
        else:
            if self.model.facts.evaluations[evaluation].status is EvaluationStatus.EVALUATING_DERIVATION:
                self._diverge(["nonsense was not refused"])
        self._check(moved=False)
        self._unchanged("nonsense", before)

    @precondition(lambda self: self.streams)
    @rule(pick=PICK, all_sent=st.integers(0, 9))
    def end_stream(self, pick: int, all_sent: int) -> None:
        """Once in a while a worker ends its job though records are missing."""
        evaluation, stream = self._stream(pick)
        self._end_stream(evaluation, stream, all_sent=all_sent > 0)

    def _end_stream(self, evaluation: int, stream: Stream, *, all_sent: bool) -> None:
        if all_sent:
            self._commit({f"{name}.drv": () for name in stream.left})
            points = self._points(stream, stream.left)
            self._record(evaluation, [self.universe.found[name] for name in stream.left], points)
        del self.streams[evaluation]
        self._say(f"end_stream {evaluation}")
        self._apply(EvalStreamCompleted(stream.assignment))
        self.model.end_stream(stream.assignment)
        self._check()

    @precondition(lambda self: self.streams)
    @rule(pick=PICK, kind=st.sampled_from(FailureKind))
    def fail_stream(self, pick: int, kind: FailureKind) -> None:
        evaluation, stream = self._stream(pick)
        del self.streams[evaluation]
        self._say(f"fail_stream {evaluation}: {kind.name}")
        self._apply(EvalFailed(stream.assignment, kind, "broken", LIMITS.max_attempts))
        self.model.fail_stream(stream.assignment, kind)
        self._check()

    @precondition(lambda self: self._live())
    @rule(pick=PICK)
    def abort_evaluation(self, pick: int) -> None:
        """Invariant 34: what another live evaluation wants does not change."""
        facts = self.model.facts
        evaluation = self._choose(self._live(), pick)
        before = self.last
        sent = len(self.moves.aborts) if self.graph.in_shared else 0
        self._say(f"abort_evaluation {evaluation}")
        self._same("AbortEvaluation", self._apply(AbortEvaluation(evaluation, "by a person")), True)
        stopped = self.model.abort_evaluation(evaluation)
        told = {self._job(abort.job_id) for abort in self.moves.aborts[sent:]}
        self._same("AbortJob", told, stopped)
        others = {v for v in facts.evaluations if v != evaluation and rules.is_live(facts, v)}
        wanted = rules.open_walk(before.facts, rules.wanting_entry_points(before.facts, others))
        self._check()
        lines = [
            f"34 abort changed {name}, wanted by another: {before.facts.builds[name].status.name}"
            for name in sorted(wanted)
            if before.facts.builds[name].status is not self.last.facts.builds[name].status
        ]
        if lines:
            self._diverge(lines)

    def _job(self, job_id: str) -> str:
        kind, _, number = job_id.partition(":")
        return job_id if kind == "eval" else f"build:{self.last.derivation_ids[int(number)]}"

    @precondition(lambda self: self._unfinished())
    @rule(pick=PICK)
    def fail_evaluation(self, pick: int) -> None:
        """From the server's side."""
        evaluation = self._choose(self._unfinished(), pick)
        self._say(f"fail_evaluation {evaluation}")
        self._apply(FailEvaluation(evaluation, "source", "it cannot go on"))
        self.model.fail_evaluation(evaluation)
        self._check()

    @precondition(lambda self: self._parked())
    @rule(pick=PICK)
    def unpark(self, pick: int) -> None:
        self._unpark(self._choose(self._parked(), pick))

    def _unpark(self, evaluation: int) -> None:
        self._say(f"unpark {evaluation}")
        self._apply(UnparkEvaluation(evaluation, EvaluationStatus.QUEUED))
        self.model.unpark(evaluation)
        self._check()

    @precondition(lambda self: self.model.facts.evaluations and not self.graph.in_shared)
    @rule(pick=PICK)
    def finish_evaluation(self, pick: int) -> None:
        """The waiting pass asks; whoever may end has ended already."""
        evaluation = self._choose(list(self.model.facts.evaluations), pick)
        self._say(f"finish_evaluation {evaluation}")
        self._same("FinishEvaluation", self._apply(FinishEvaluation(evaluation)), False)
        self._check()
