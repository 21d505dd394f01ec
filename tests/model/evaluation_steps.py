"""Steps of evaluations: asked for, streamed, failed, aborted, and asked for again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Final

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from psycopg.errors import UniqueViolation

from gradient.graph.assignments import ClaimEvaluation
from gradient.graph.evaluation_end import AbortEvaluation, FailEvaluation, FinishEvaluation
from gradient.graph.evaluation_reports import EvalFailed, EvalStreamCompleted, EvaluationPhase
from gradient.graph.evaluations import CreateEvaluation, ParkEvaluation, UnparkEvaluation
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
from tests.model import invariants, rules
from tests.model.build_steps import BuildSteps
from tests.model.graph import TASKS
from tests.model.model import Found
from tests.model.pair import LIMITS, PICK, SELDOM, WORKERS, Stream
from tests.model.script import step
from tests.model.universe import discovered

# Evaluations on a worker at the same time.
STREAMS: Final = 3
SOURCE: Final = Repository("git+https://example.org/x")
# Why one waits that has come to its builds.
STUCK: Final = {"kind": "graph_stuck", "pending_shared_builds": 1}
NO_WORKERS: Final = {"kind": "workers", "unmet": []}
# In which a walk comes: 0 is what needs nothing first.
ORDER: Final = st.integers(0, 99)


class EvaluationSteps(BuildSteps):
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

    def _building(self) -> list[int]:
        return self._evaluations(EvaluationStatus.BUILDING)

    def _parked(self) -> list[int]:
        return self._evaluations(EvaluationStatus.WAITING)

    def _queued_evaluations(self) -> list[int]:
        jobs = self.model.facts.assignments.values()
        taken = {job.evaluation for job in jobs if job.kind is JobKind.EVAL and job.outcome is None}
        return [v for v in self._evaluations(EvaluationStatus.QUEUED) if v not in taken]

    @precondition(lambda self: len(self.streams) < STREAMS)
    @step(
        tops=st.lists(PICK, min_size=1, max_size=3),
        task=st.sampled_from([None, *TASKS]),
        prune=st.booleans(),
        order=ORDER,
    )
    def new_evaluation(self, tops: list[int], task: int | None, prune: bool, order: int) -> None:
        if self.model.may_create(task):
            self._new_evaluation(tops, task, prune=prune, order=order)
        else:
            self._new_evaluation_in_vain(task)

    @precondition(lambda self: len(self.streams) < STREAMS)
    @step(tops=st.lists(PICK, min_size=1, max_size=3), task=st.sampled_from([None, *TASKS]))
    def evaluate(self, tops: list[int], task: int | None) -> None:
        """A whole evaluation, down to its builds."""
        if self.model.may_create(task):
            self._evaluate(tops, task)

    def _evaluate(self, tops: list[int], task: int | None) -> int:
        evaluation = self._new_evaluation(tops, task, prune=True, order=0)
        self._end_stream(evaluation, self.streams[evaluation], all_sent=True)
        return evaluation

    def _new_evaluation(self, tops: list[int], task: int | None, *, prune: bool, order: int) -> int:
        evaluation: int = self._apply(CreateEvaluation("main", SOURCE, task=task))
        self.model.create_evaluation(evaluation, task)
        self.tops[evaluation] = sorted({self.letters[top % len(self.letters)] for top in tops})
        asked = f"task {task}" if task else "a person"
        self._say(f"new_evaluation {evaluation} of {self.tops[evaluation]} by {asked}")
        self._check()
        self._start(evaluation, prune, order)
        return evaluation

    def _new_evaluation_in_vain(self, task: int | None) -> None:
        """Nothing has more than one at a time: whoever asks first ends the one before."""
        self._say(f"new_evaluation_in_vain by task {task}")
        try:
            self._apply(CreateEvaluation("main", SOURCE, task=task))
        except UniqueViolation:
            self._check(moved=False)
        else:
            self._diverge([f"a second evaluation of task {task}"])

    @precondition(lambda self: self._queued_evaluations() and len(self.streams) < STREAMS)
    @step(pick=PICK, prune=st.booleans(), order=ORDER)
    def start_evaluation(self, pick: int, prune: bool, order: int) -> None:
        self._start(self._choose(self._queued_evaluations(), pick), prune, order)

    def _start(self, evaluation: int, prune: bool, order: int) -> None:
        """A worker takes it, and finds a closure, in some order, perhaps without what the graph knows."""
        worker = WORKERS[evaluation % 2]
        self._say(f"claim_evaluation {evaluation}")
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
        # A recovery walks all of it.
        prune = prune and not self.model.facts.evaluations[evaluation].is_recovery
        left = self.universe.closure(tops, known if prune else ())
        left.sort()
        if order:
            Random(order).shuffle(left)
        self.streams[evaluation] = Stream(assignment, left, {f"attr.{top}": top for top in tops})
        self._say(f"start {evaluation}, which will send {left}")
        self._check()

    def _stream(self, pick: int) -> tuple[int, Stream]:
        """One that is under way; while there is none, one that begins now."""
        if not self.streams:
            self._new_evaluation([pick, pick + 1], None, prune=False, order=0)
        return self._choose(sorted(self.streams.items()), pick)

    @step(
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
            self._upload(batch)
        points = self._points(stream, batch) if entries else {}
        found = [self.universe.found[name] for name in batch]
        stream.sent.append((found, points))
        self._record(evaluation, found, points, error=error)

    def _upload(self, batch: Sequence[str]) -> None:
        """The `.drv` files of a batch, and its input sources."""
        sources = {path for name in batch for path in self.universe.found[name].sources}
        self._commit(dict.fromkeys([f"{name}.drv" for name in batch] + sorted(sources), ()))

    def _points(self, stream: Stream, batch: Collection[str]) -> dict[str, str]:
        """Its entry points that the graph knows: one that was known and is collected is never sent."""
        known = {*self.model.facts.derivations, *batch}
        return {attr: name for attr, name in stream.entries.items() if name in known}

    @precondition(lambda self: any(stream.sent for stream in self.streams.values()))
    @step(pick=PICK, which=PICK)
    def send_again(self, pick: int, which: int) -> None:
        """Invariant 22: replaying a batch changes nothing, neither rows nor counters nor names. What was
        un-walked since is walked by it, though."""
        sending = [(v, stream) for v, stream in sorted(self.streams.items()) if stream.sent]
        evaluation, stream = self._choose(sending, pick)
        before = self.last
        batch, points = self._choose(stream.sent, which)
        walked = {name for name, d in self.model.facts.derivations.items() if d.walked}
        self._record(evaluation, batch, points)
        if walked.issuperset(found.name for found in batch):
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

    @step(pick=PICK)
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

    @step(pick=PICK, all_sent=st.integers(0, 9))
    def end_stream(self, pick: int, all_sent: int) -> None:
        """Once in a while a worker ends its job though records are missing."""
        evaluation, stream = self._stream(pick)
        self._end_stream(evaluation, stream, all_sent=all_sent > 0)

    def _end_stream(self, evaluation: int, stream: Stream, *, all_sent: bool) -> None:
        if all_sent:
            self._upload(stream.left)
            points = self._points(stream, stream.left)
            self._record(evaluation, [self.universe.found[name] for name in stream.left], points)
        del self.streams[evaluation]
        self._say(f"end_stream {evaluation}")
        self._apply(EvalStreamCompleted(stream.assignment))
        self.model.end_stream(stream.assignment)
        self._check()
        self._repaired(evaluation)

    def _repaired(self, evaluation: int) -> None:
        """Invariant 31: the repair pass has run over its closure."""
        if lines := invariants.nothing_waits_above_a_lasting_failure(self.last, evaluation):
            self._diverge(lines)

    @step(pick=PICK, kind=st.sampled_from(FailureKind).map(int))
    def fail_stream(self, pick: int, kind: int) -> None:
        evaluation, stream = self._stream(pick)
        del self.streams[evaluation]
        why = FailureKind(kind)
        self._say(f"fail_stream {evaluation}: {why.name}")
        self._apply(EvalFailed(stream.assignment, why, "broken", LIMITS.max_attempts))
        self.model.fail_stream(stream.assignment, why)
        self._check()

    @precondition(lambda self: self._live())
    @step(pick=PICK)
    def abort_evaluation(self, pick: int) -> None:
        """Invariant 34: what another live evaluation wants does not change."""
        self._abort_evaluation(self._choose(self._live(), pick))

    def _abort_evaluation(self, evaluation: int) -> None:
        facts = self.model.facts
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

    @SELDOM
    @step(pick=PICK)
    def fail_evaluation(self, pick: int) -> None:
        """From the server's side."""
        unfinished = self._unfinished()
        self._fail_evaluation(self._choose(unfinished, pick) if unfinished else self._stream(pick)[0])

    def _fail_evaluation(self, evaluation: int) -> None:
        self._say(f"fail_evaluation {evaluation}")
        self._apply(FailEvaluation(evaluation, "source", "it cannot go on"))
        self.model.fail_evaluation(evaluation)
        self._check()

    @precondition(lambda self: self._building())
    @step(pick=PICK, stuck=st.booleans())
    def park(self, pick: int, stuck: bool) -> None:
        """The waiting pass finds nothing of it to hand out; or it did, a moment ago."""
        self._park(self._choose(self._building(), pick), stuck=stuck)

    def _park(self, evaluation: int, *, stuck: bool) -> None:
        self._say(f"park {evaluation}, {'which is stuck' if stuck else 'for want of workers'}")
        self._apply(ParkEvaluation(evaluation, EvaluationStatus.BUILDING, STUCK if stuck else NO_WORKERS))
        self.model.park(evaluation, stuck=stuck)
        self._check()

    @step(pick=PICK)
    def unpark(self, pick: int) -> None:
        """Something of it can be handed out again."""
        if not self._parked():
            _, stream = self._stream(pick)
            self._lose_worker(self.model.facts.assignments[stream.assignment].worker)
        if self._parked():
            self._unpark(self._choose(self._parked(), pick))

    def _unpark(self, evaluation: int) -> None:
        self._say(f"unpark {evaluation}")
        evaluated = self.model.facts.evaluations[evaluation].evaluated
        status = EvaluationStatus.BUILDING if evaluated else EvaluationStatus.QUEUED
        self._apply(UnparkEvaluation(evaluation, status))
        self.model.unpark(evaluation)
        self._check()

    @precondition(lambda self: self.model.facts.evaluations and not self.graph.in_shared)
    @SELDOM
    @step(pick=PICK)
    def finish_evaluation(self, pick: int) -> None:
        """The waiting pass asks; whoever may end has ended already."""
        evaluation = self._choose(list(self.model.facts.evaluations), pick)
        self._say(f"finish_evaluation {evaluation}")
        self._same("FinishEvaluation", self._apply(FinishEvaluation(evaluation)), False)
        self._check()
