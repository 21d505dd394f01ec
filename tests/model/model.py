"""The naive model: what each message of the graph writer does, in the seed's words.

An event writes its facts and then lets `settle` do what the seed says happens by itself. The real graph
moves counters from row to row to come to the same end; here everything is looked at again after each event.
Sources: seeds "Queueing and Counters", "Jobs" (Failures, Abort and Lost Workers), "Waiting and Recovery".
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import attrs

from gradient.model import (
    AttemptOutcome,
    AttemptReason,
    BuildStatus,
    DispatchOutcome,
    EdgeKind,
    EvaluationStatus,
    FailureKind,
    JobKind,
)
from tests.model import rules
from tests.model.facts import Assignment, Attempt, Build, Derivation, Evaluation, Facts

S = BuildStatus
V = EvaluationStatus
EVALUATING: Final = {V.EVALUATING_FLAKE, V.EVALUATING_DERIVATION}
RUNNING: Final = EVALUATING | {V.FETCHING}
# What becomes DependencyFailed when something below it fails: never what runs, never a success.
CASCADE: Final = {S.CREATED, S.QUEUED, S.FAILED_TRANSIENT}
FAILED: Final = (AttemptOutcome.FAILED, DispatchOutcome.FAILED)
STOPPED: Final = (AttemptOutcome.ABORTED, DispatchOutcome.ABANDONED)

MAX_ATTEMPTS: Final = 3
MISS_THRESHOLD: Final = 2
MAX_LOOPS: Final = 3
BACKOFF: Final = timedelta(seconds=30)
MAX_LOST: Final = 10


@attrs.frozen
class Found:
    """One derivation as a worker's walk finds it."""

    name: str
    inputs: tuple[str, ...]
    outputs: Mapping[str, str]


@attrs.define
class Model:
    """The facts, and the time of the message that is applied."""

    now: datetime
    # An upstream cache is configured: it is asked for every shared build.
    upstream: bool = False
    facts: Facts = attrs.field(factory=Facts)

    def status(self, name: str, status: BuildStatus) -> None:
        """Move a shared build."""
        build = self.facts.builds[name]
        if build.status is not status:
            build.status, build.updated_at = status, self.now

    # --- what happens by itself -------------------------------------------------------------------

    def settle(self, *, held: bool = True) -> None:
        """One rule at a time, each over everything, until none applies. Without `held` what the cache holds
        is left alone."""
        while (
            (held and self.substitute_held())
            or self.thaw_wanted()
            or self.unpromote_ungated()
            or self.skip_unwanted()
            or self.promote()
        ):
            pass

    def _move(self, names: Iterable[str], status: BuildStatus) -> bool:
        moved = sorted(names)
        for name in moved:
            self.status(name, status)
        return bool(moved)

    def _in(self, *statuses: BuildStatus) -> set[str]:
        return {name for name, build in self.facts.builds.items() if build.status in statuses}

    def substitute_held(self) -> bool:
        """What the cache holds with its closure is not built again; a job that is out ends undisturbed."""
        held = self._in(*CASCADE, S.SKIPPED) & rules.complete(self.facts)
        held = {name for name in held if not rules.is_assigned(self.facts, name)}
        for name in held:
            self.facts.builds[name].substituted = True
        return self._move(held, S.SUBSTITUTED)

    def thaw_wanted(self) -> bool:
        """Skipped/Aborted -> Created, attempt = 0, but for what a person's abort holds."""
        frozen = self._in(S.SKIPPED, S.ABORTED) & rules.wanted(self.facts)
        frozen = {name for name in frozen if not rules.is_held(self.facts, name)}
        for name in frozen:
            self.facts.builds[name].attempt = 0
        return self._move(frozen, S.CREATED)

    def unpromote_ungated(self) -> bool:
        """Only Queued rows without an open assignment."""
        regressed = self._in(S.QUEUED) - rules.gated(self.facts)
        return self._move((n for n in regressed if not rules.is_assigned(self.facts, n)), S.CREATED)

    def skip_unwanted(self) -> bool:
        """Created, not needed, no entry point -> Skipped."""
        unwanted = self._in(S.CREATED) - rules.wanted(self.facts) - rules.wanting_entry_points(self.facts)
        return self._move(unwanted, S.SKIPPED)

    def promote(self) -> bool:
        """Created with every queue condition -> Queued."""
        return self._move(self._in(S.CREATED) & rules.gated(self.facts), S.QUEUED)

    def finish(self) -> None:
        """A verdict for each evaluation past its stream that no named build blocks any more."""
        for evaluation in list(self.facts.evaluations):
            self.check_evaluation_done(evaluation)

    def check_evaluation_done(self, evaluation: int) -> bool:
        """Failed when any named shared build is Requeueable or an error message is present."""
        row = self.facts.evaluations[evaluation]
        counted = rules.counters(self.facts, evaluation)
        if not row.evaluated or row.status not in {V.BUILDING, V.WAITING} or counted.active:
            return False
        row.status = V.FAILED if counted.failed or row.has_error else V.COMPLETED
        return True

    # --- evaluations ------------------------------------------------------------------------------

    def create_evaluation(self, evaluation: int, *, for_task: bool) -> None:
        """A new one, Queued."""
        self.facts.evaluations[evaluation] = Evaluation(V.QUEUED, self.now, for_task)

    def claim_evaluation(self, evaluation: int, assignment: int, worker: UUID) -> None:
        """It stays Queued until its worker reports."""
        self.facts.assignments[assignment] = Assignment(JobKind.EVAL, worker, evaluation, None, self.now)

    def evaluation_phase(self, assignment: int, status: EvaluationStatus) -> bool:
        """A worker's report of its phase; False tells it to stop."""
        job = self.facts.assignments[assignment]
        if job.outcome is not None or job.evaluation is None:
            return False
        row = self.facts.evaluations[job.evaluation]
        order = [V.QUEUED, V.FETCHING, V.EVALUATING_FLAKE, V.EVALUATING_DERIVATION]
        if row.status in order and order.index(row.status) < order.index(status):
            row.status = status
        return rules.is_live(self.facts, job.evaluation)

    def record(
        self,
        evaluation: int,
        batch: Collection[Found] = (),
        entry_points: Mapping[str, str] | None = None,
        *,
        error: bool = False,
    ) -> bool:
        """A batch of walked derivations; False when it came too late and is dropped."""
        facts, row, entries = self.facts, self.facts.evaluations[evaluation], dict(entry_points or {})
        if row.status not in RUNNING:
            return False
        row.has_error = row.has_error or error
        for found in batch:
            for name in (found.name, *found.inputs):
                facts.derivations.setdefault(name, Derivation())
        for found in batch:
            derivation = facts.derivations[found.name]
            derivation.walked = True
            derivation.outputs = derivation.outputs or dict(found.outputs)
            for low in found.inputs:
                self._edge(found.name, low, EdgeKind.BUILD)
        named = {name for found in batch for name in (found.name, *found.inputs)} | set(entries.values())
        newly_named = {name for name in named if (evaluation, name) not in facts.names}
        for name in named:
            facts.builds.setdefault(name, Build(S.CREATED, self.now, probed=not self.upstream))
            facts.names.setdefault((evaluation, name), False)
        for attr, name in entries.items():
            facts.entry_points.setdefault((evaluation, attr), name)
        self.adopt_references()
        self.settle()
        self._skip_aborted(newly_named)
        return True

    def _skip_aborted(self, names: set[str]) -> None:
        """What an earlier evaluation aborted, and this one does not need, is no failure of this one."""
        aborted = (names & self._in(S.ABORTED)) - rules.wanted(self.facts)
        self._move((name for name in aborted if not rules.is_marked(self.facts, name)), S.SKIPPED)
        self.settle()

    def _edge(self, high: str, low: str, kind: EdgeKind) -> None:
        known = self.facts.edges.get((high, low), kind)
        self.facts.edges[high, low] = kind if known is kind else EdgeKind.BOTH

    def adopt_references(self) -> None:
        """An edge from each derivation that makes a path in the cache to each that makes what the path
        refers to; but none between two derivations that make one path (ADR 10)."""
        paths = {name: set(d.outputs.values()) for name, d in self.facts.derivations.items()}
        for high, own in paths.items():
            referred = {ref for path in own & set(self.facts.cached) for ref in self.facts.cached[path]}
            for low, made in paths.items():
                if made & referred and not made & own:
                    self._edge(high, low, EdgeKind.RUNTIME)

    def end_stream(self, assignment: int) -> None:
        """JobCompleted of a flake job: Building, after the repair of its closure; or a gap in the walk."""
        job = self.close(assignment, DispatchOutcome.COMPLETED)
        if job is None or job.evaluation is None:
            return
        row = self.facts.evaluations[job.evaluation]
        names = rules.named_by(self.facts, job.evaluation)
        gap = not set(names) <= rules.recorded(self.facts)
        if gap and row.walk_lost:
            # The gap is ours: somebody un-walked what this walk had stopped at.
            row.walk_lost = False
            self._requeue_evaluation(job.evaluation)
        elif gap:
            self.fail_evaluation(job.evaluation)
        elif row.status in EVALUATING:
            row.status, row.evaluated = V.BUILDING, True
            self.repair(job.evaluation, "eval")
            self.check_evaluation_done(job.evaluation)
        elif row.status in {V.QUEUED, V.FETCHING}:
            self.fail_evaluation(job.evaluation)

    def fail_stream(self, assignment: int, kind: FailureKind) -> set[str]:
        """JobFailed of a flake job. Answers the jobs that get an AbortJob."""
        outcome = STOPPED if kind in {FailureKind.CANCELED, FailureKind.ABORTED} else FAILED
        job = self.close(assignment, outcome[1])
        if job is None or job.evaluation is None:
            return set()
        tries = sum(
            a.kind is JobKind.EVAL
            and a.evaluation == job.evaluation
            and a.outcome in {DispatchOutcome.COMPLETED, DispatchOutcome.FAILED}
            for a in self.facts.assignments.values()
        )
        if kind is FailureKind.ABORTED:
            return self.abort_evaluation(job.evaluation) or set()
        if kind is FailureKind.CANCELED or (kind is FailureKind.TRANSIENT and tries < MAX_ATTEMPTS):
            self._requeue_evaluation(job.evaluation)
        else:
            self.fail_evaluation(job.evaluation)
        return set()

    def _requeue_evaluation(self, evaluation: int) -> None:
        row = self.facts.evaluations[evaluation]
        if row.status in RUNNING:
            row.status = V.QUEUED

    def unpark(self, evaluation: int) -> None:
        """Its workers are back."""
        row = self.facts.evaluations[evaluation]
        if row.status is V.WAITING:
            row.status = V.QUEUED

    def fail_evaluation(self, evaluation: int) -> None:
        """End it with an error. Its entry points still want what is below them."""
        if rules.is_live(self.facts, evaluation):
            row = self.facts.evaluations[evaluation]
            row.status, row.has_error = V.FAILED, True

    def abort_evaluation(self, evaluation: int) -> set[str] | None:
        """Abort it and what it named or wanted that nobody wants any more, except what has not begun and
        another live evaluation names. Answers the jobs that get an AbortJob; None when it had ended."""
        facts = self.facts
        if not rules.is_live(facts, evaluation):
            return None
        before = rules.wanted(facts)
        facts.evaluations[evaluation].status = V.ABORTED
        after = rules.wanted(facts)
        doomed = (before - after) | (set(rules.named_by(facts, evaluation)) - after)
        doomed &= self._in(S.CREATED, S.QUEUED, S.BUILDING)
        live = {name for named_by, name in facts.names if rules.is_live(facts, named_by)}
        not_begun = {n for n in self._in(S.CREATED, S.QUEUED) if not rules.is_assigned(facts, n)}
        doomed -= live & not_begun
        self._move(doomed, S.ABORTED)
        self.settle()
        stopped = {f"eval:{evaluation}", *(f"build:{name}" for name in doomed)}
        return stopped & {a.job_id for a in facts.assignments.values() if a.outcome is None}

    # --- repair -----------------------------------------------------------------------------------

    def repair(self, evaluation: int, scope: str, retried: Collection[str] = ()) -> None:
        """The steps of the repair pass over the closure of one evaluation: at the end of its stream (eval),
        when it is stuck (unstick), and when a person asks for failed builds again (retry)."""
        closure = self.unfetchable_closure(evaluation)
        if not closure:
            return
        if scope == "retry":
            self.thaw_failed(retried)
        else:
            self.requeue_failed_closure(evaluation, closure, scope)
        self.complete_cached(closure)
        self.repair_dependency_failed(evaluation, closure)
        self.adopt_pending_closure(evaluation)
        self.settle()

    def heal(self, evaluation: int) -> None:
        """The graph-stuck heal."""
        row = self.facts.evaluations[evaluation]
        if row.evaluated and row.status in {V.BUILDING, V.WAITING}:
            self.repair(evaluation, "unstick")
            self.check_evaluation_done(evaluation)

    def unfetchable_closure(self, evaluation: int) -> set[str]:
        """What it names and all below that is not fetchable; below a passthrough what that refers to."""
        facts, done = self.facts, rules.fetchable(self.facts)
        due = [name for name in rules.named_by(facts, evaluation) if name not in done]
        closure: set[str] = set()
        while due:
            name = due.pop()
            closure.add(name)
            for low, kind in rules.below(facts, name):
                steps = rules.is_runtime(kind) or not facts.builds[name].cache_available
                if steps and low in facts.builds and low not in done | closure:
                    due.append(low)
        return closure

    def requeue_failed_closure(self, evaluation: int, closure: set[str], scope: str) -> None:
        """Back to Created. What stays: what was aborted here, lasting failures, and all above either. When
        stuck, a failure lasts if its builder has failed it; at the end of a stream, if it is newer than the
        evaluation, or if its builder has failed it and a task asks."""
        facts, row = self.facts, self.facts.evaluations[evaluation]
        failed = closure & self._in(*rules.FAILURE)
        by_builder = {name for name in failed if rules.failed_by_its_builder(facts, name)}
        if scope == "unstick":
            lasting = by_builder
        else:
            lasting = {name for name in failed if facts.builds[name].updated_at >= row.created_at}
            lasting |= by_builder if row.for_task else set()
        lasting = lasting - self._in(S.DEPENDENCY_FAILED) | self._aborted_by(evaluation)
        lasting |= self._all_above(lasting, failed & self._in(S.DEPENDENCY_FAILED))
        self.thaw_failed(failed - lasting)

    def thaw_failed(self, names: Collection[str]) -> None:
        """Requeueable -> Created, attempt = 0."""
        thawed = set(names) & self._in(*rules.FAILURE, S.ABORTED)
        for name in thawed:
            self.facts.builds[name].attempt = 0
        self._move(thawed, S.CREATED)
        self.settle(held=False)

    def _aborted_by(self, evaluation: int) -> set[str]:
        return {name for (v, name), aborted in self.facts.names.items() if v == evaluation and aborted}

    def _all_above(self, names: set[str], within: set[str]) -> set[str]:
        """Everything above `names`, going up through `within` alone."""
        found: set[str] = set()
        due = set(names)
        while due:
            name = due.pop()
            due |= (set(rules.above(self.facts, name)) & within) - found
            found |= set(rules.above(self.facts, name)) & within
        return found

    def complete_cached(self, closure: set[str]) -> None:
        """Completed with what waits though every output is in the cache."""
        held = closure & self._in(*CASCADE, S.SKIPPED)
        held = {n for n in held if rules.present(self.facts, n) and not rules.is_assigned(self.facts, n)}
        self._move(held, S.COMPLETED)
        self.settle()

    def repair_dependency_failed(self, evaluation: int, closure: set[str]) -> set[str]:
        """Fail what wants a lasting failure, or a build that the evaluation aborted; answers what failed."""
        aborted = self._aborted_by(evaluation) & self._in(S.ABORTED)
        failed = self._cascade(closure & (self._in(*rules.FAILURE) | aborted), closure)
        self.settle()
        return failed

    def _cascade(self, failed: set[str], within: Collection[str]) -> set[str]:
        """DependencyFailed with everything above that waits; never through what an upstream serves. A success
        that lacks the failed one at run time does not fail, but what waits for it does."""
        facts = self.facts
        builds = {name for name in within if not facts.builds[name].cache_available}
        lacking = (builds & self._in(*rules.SUCCESS)) - rules.fetchable(facts)
        doomed, due = set(failed), set(failed)
        while due:
            low = due.pop()
            for high in rules.above(facts, low):
                waits = high in builds & self._in(*CASCADE)
                lacks = high in lacking and rules.is_runtime(facts.edges[high, low])
                if (waits or lacks) and high not in doomed:
                    doomed.add(high)
                    due.add(high)
        doomed &= self._in(*CASCADE)
        self._move(doomed, S.DEPENDENCY_FAILED)
        return doomed

    def adopt_pending_closure(self, evaluation: int) -> None:
        """Name for the evaluation every wanted shared build that its names still wait for."""
        names = set(rules.named_by(self.facts, evaluation)) & rules.wanted(self.facts)
        for name in rules.open_walk(self.facts, names):
            self.facts.names.setdefault((evaluation, name), False)

    # --- build abort and retry --------------------------------------------------------------------

    def abort_build(self, name: str, evaluation: int) -> set[str] | str:
        """A person stops a build for an evaluation: what failed with it, or why that is refused."""
        facts = self.facts
        if not rules.is_live(facts, evaluation):
            return "EVALUATION_FINISHED"
        if facts.builds[name].status not in {S.CREATED, S.QUEUED, S.BUILDING}:
            return "WRONG_STATUS"
        before = copy.deepcopy(facts)
        facts.names[evaluation, name] = True
        self.status(name, S.ABORTED)
        failed = self.repair_dependency_failed(evaluation, self.unfetchable_closure(evaluation))
        for (other, named), aborted in facts.names.items():
            elsewhere = other != evaluation and not aborted and rules.is_live(facts, other)
            if elsewhere and named in {name, *failed}:
                self.facts = before
                return "NEEDED_BY_OTHER_EVALUATION"
        return failed

    def retry_build(self, name: str, evaluation: int) -> set[str] | str:
        """A person asks for a failed build again: what waits again for it, or why that is refused."""
        facts, row = self.facts, self.facts.evaluations[evaluation]
        live = rules.is_live(facts, evaluation)
        if not live and not (row.evaluated and row.status in {V.FAILED, V.ABORTED}):
            return "EVALUATION_FINISHED"
        if facts.builds[name].status not in rules.FAILURE | {S.ABORTED}:
            return "WRONG_STATUS"
        causes = self._causes(name)
        if not causes:
            return "NO_FAILED_DEPENDENCY"
        within = self.unfetchable_closure(evaluation) & self._in(S.DEPENDENCY_FAILED)
        thawed = causes | self._all_above(causes, within)
        if any(rules.is_assigned(facts, one) for one in thawed):
            return "WORKER_STILL_STOPPING"
        for named_for, named in facts.names:
            if named in causes:
                facts.names[named_for, named] = False
        if not live:
            row.status = V.BUILDING
            self.settle()
            self._skip_aborted(set(rules.named_by(facts, evaluation)) - self._aborted_by(evaluation))
        self.repair(evaluation, "retry", thawed)
        self.check_evaluation_done(evaluation)
        return thawed

    def _causes(self, name: str) -> set[str]:
        """The failed builds below it, down through DependencyFailed ones alone; itself, if it is none."""
        causes, passed, due = set(), set(), {name}
        while due:
            one = due.pop()
            build = self.facts.builds[one]
            if build.status is S.DEPENDENCY_FAILED and not build.cache_available:
                passed.add(one)
                lows = {low for low, _ in rules.below(self.facts, one)}
                due |= (lows & self._in(*rules.FAILURE, S.ABORTED)) - passed - causes
            else:
                causes.add(one)
        return causes

    # --- the cache --------------------------------------------------------------------------------

    def commit(self, nars: Mapping[str, tuple[str, ...]]) -> None:
        """NARs land. What is there already stays as it is."""
        for path, references in nars.items():
            self.facts.cached.setdefault(path, references)
            self.facts.cached_at.setdefault(path, self.now)
        self.adopt_references()
        self.settle()

    def retire(self, paths: Collection[str], *, distrusted: bool = False) -> set[str]:
        """Paths leave the cache, and who made them is to make them again. What somebody could not use is
        `distrusted`: no upstream is believed about it, and a maker that failed is tried again, unless its
        builder failed it. Answers the makers."""
        facts = self.facts
        gone = set(paths) & set(facts.cached)
        makers = {
            n for n, d in facts.derivations.items() if n in facts.builds and set(d.outputs.values()) & gone
        }
        for path in gone:
            del facts.cached[path], facts.cached_at[path]
        for name in makers:
            build = facts.builds[name]
            if distrusted and not rules.is_assigned(facts, name):
                build.cache_available = False
            again = build.status in {S.FAILED_PERMANENT, S.FAILED_TIMEOUT} and distrusted
            if build.status in rules.SUCCESS or (again and not rules.failed_by_its_builder(facts, name)):
                build.attempt, build.substituted = 0, False
                self.status(name, S.CREATED)
        self.settle()
        return makers

    def made(self, path: str) -> bool:
        """Some derivation makes the path."""
        return any(path in d.outputs.values() for d in self.facts.derivations.values())

    def demote_missing_nar(self, paths: Collection[str]) -> None:
        """Objects are gone. What nobody makes takes along the outputs that refer to it."""
        orphans = {path for path in paths if not self.made(path)}
        referring = {
            path
            for path, refs in self.facts.cached.items()
            if self.made(path) and orphans & set(refs) - {path}
        }
        self.retire({*paths, *referring}, distrusted=True)

    def demote_path(self, paths: Collection[str], seen_at: datetime) -> set[str]:
        """Somebody could not use these: those that are made are made again, unless they came since."""
        since = {path for path, at in self.facts.cached_at.items() if at >= seen_at}
        return self.retire({path for path in paths if self.made(path)} - since, distrusted=True)

    def demote_cache_claim(self, names: Iterable[str]) -> None:
        """No upstream has them after all."""
        for name in names:
            if not rules.is_assigned(self.facts, name):
                self.facts.builds[name].cache_available = False
        self.settle()

    def heal_missing_inputs(self, name: str, paths: Collection[str], seen_at: datetime) -> None:
        """A build failed for want of these paths. Makers that no evaluation names are found by the next walk,
        which must not stop above them."""
        facts = self.facts
        makers = self.demote_path(paths, seen_at)
        if makers:
            for evaluation, named in list(facts.names):
                if named == name and rules.is_live(facts, evaluation):
                    self.adopt_pending_closure(evaluation)
            self.settle()
        unnamed = {maker for maker in makers if not rules.is_named(facts, maker)}
        self.unwalk({h for (h, low), kind in facts.edges.items() if low in unnamed and rules.is_build(kind)})

    def unwalk(self, names: Collection[str]) -> None:
        """Forget that they were walked; whoever is walking may have stopped there."""
        walked = {name for name in names if self.facts.derivations[name].walked}
        for name in walked:
            self.facts.derivations[name].walked = False
        for row in self.facts.evaluations.values():
            if walked and row.status in RUNNING:
                row.walk_lost = True
        self.settle()

    def collect_paths(self, paths: Collection[str]) -> None:
        """Those that no derivation makes, is or needs, and no other path refers to."""
        facts = self.facts
        known = {f"{name}.drv" for name in facts.derivations}
        referred = {
            ref for path, refs in facts.cached.items() if path[-4:] != ".drv" for ref in refs if ref != path
        }
        self.retire({path for path in paths if path not in known | referred and not self.made(path)})

    def collect_evaluations(self, evaluations: Iterable[int]) -> set[int]:
        """Ended ones go with what they named. Who still waits for that names it. Answers which went."""
        facts = self.facts
        gone = {v for v in evaluations if not rules.is_live(facts, v)}
        opened = rules.open_builds(facts) & {name for v, name in facts.names if v in gone}
        facts.evaluations = {v: row for v, row in facts.evaluations.items() if v not in gone}
        facts.names = {key: mark for key, mark in facts.names.items() if key[0] not in gone}
        facts.entry_points = {key: name for key, name in facts.entry_points.items() if key[0] not in gone}
        for row in [*facts.assignments.values(), *facts.attempts]:
            row.evaluation = None if row.evaluation in gone else row.evaluation
        self.settle()
        if opened:
            for evaluation in facts.evaluations:
                if rules.is_live(facts, evaluation):
                    self.adopt_pending_closure(evaluation)
            self.settle()
        return gone

    def collect_derivations(self, candidates: Iterable[str]) -> int:
        """Those that nothing reaches from a name, an entry point or a job on a worker. What needs one of them
        and stays is to be walked again. Answers how many went."""
        facts = self.facts
        kept = {name for _, name in facts.names} | set(facts.entry_points.values())
        kept |= {name for name in facts.builds if rules.is_assigned(facts, name)}
        due = set(kept)
        while due:
            lows = {low for low, _ in rules.below(facts, due.pop())}
            due |= lows - kept
            kept |= lows
        gone = set(candidates) - kept
        stay = {
            high for (high, low), kind in facts.edges.items() if low in gone and rules.is_build(kind)
        } - gone
        self.unwalk(stay)
        facts.derivations = {name: d for name, d in facts.derivations.items() if name not in gone}
        facts.builds = {name: build for name, build in facts.builds.items() if name not in gone}
        facts.edges = {pair: kind for pair, kind in facts.edges.items() if not gone & set(pair)}
        facts.assignments = {i: a for i, a in facts.assignments.items() if a.derivation not in gone}
        facts.attempts = [attempt for attempt in facts.attempts if attempt.derivation not in gone]
        self.settle()
        return len(gone)

    def answer_probe(self, names: Iterable[str], *, served: bool) -> None:
        """The upstream caches answered. What one serves is fetched instead of built, a failure too; a success
        is neither."""
        for name in names:
            build = self.facts.builds[name]
            build.probed = True
            if served and build.status not in rules.SUCCESS and not build.cache_available:
                build.cache_available = True
                if build.status in rules.FAILURE:
                    build.attempt = 0
                    self.status(name, S.CREATED)
        self.settle()

    # --- builds -----------------------------------------------------------------------------------

    def close(self, assignment: int, outcome: DispatchOutcome) -> Assignment | None:
        """None when it was closed before: the report is stale."""
        job = self.facts.assignments[assignment]
        if job.outcome is not None:
            return None
        job.outcome = outcome
        return job

    def close_attempt(
        self, assignment: int, outcome: AttemptOutcome, reason: AttemptReason | None = None
    ) -> None:
        """End the running attempt of an assignment."""
        for attempt in self.facts.attempts:
            if attempt.assignment == assignment and attempt.outcome is AttemptOutcome.RUNNING:
                attempt.outcome, attempt.reason = outcome, reason

    def may_claim(self, name: str, cache_available: bool) -> bool:
        """Only while it is still Queued with the expected cache_available, and nobody has it."""
        build = self.facts.builds[name]
        expected = build.cache_available is cache_available
        return build.status is S.QUEUED and expected and not rules.is_assigned(self.facts, name)

    def claim_build(self, name: str, assignment: int, worker: UUID) -> None:
        """An open assignment for the oldest live evaluation that names it, and a running attempt."""
        live = [e for e, named in self.facts.names if named == name and rules.is_live(self.facts, e)]
        evaluation = min(live, default=None)
        self.facts.assignments[assignment] = Assignment(JobKind.BUILD, worker, evaluation, name, self.now)
        self.facts.attempts.append(Attempt(name, assignment, evaluation))

    def start_build(self, assignment: int) -> bool:
        """A worker's Building; False tells it to stop."""
        job = self.facts.assignments[assignment]
        if job.outcome is not None or job.derivation is None:
            return False
        if self.facts.builds[job.derivation].status is S.QUEUED:
            self.status(job.derivation, S.BUILDING)
        return self.facts.builds[job.derivation].status is S.BUILDING

    def build_output(self, assignment: int, *, substituted: bool) -> None:
        """BuildOutput: of what it says only the flag concerns the graph."""
        job = self.facts.assignments[assignment]
        if job.outcome is None and job.derivation is not None:
            self.facts.builds[job.derivation].substituted = substituted

    def complete_build(self, assignment: int) -> bool:
        """JobCompleted of a build; False when an output is missing all the same."""
        job = self.facts.assignments[assignment]
        if job.outcome is not None or job.derivation is None:
            return False
        if not rules.present(self.facts, job.derivation):
            self.fail_build(assignment, FailureKind.TRANSIENT)
            return False
        build = self.facts.builds[job.derivation]
        self.close(assignment, DispatchOutcome.COMPLETED)
        outcome = AttemptOutcome.SUBSTITUTED if build.substituted else AttemptOutcome.BUILT
        self.close_attempt(assignment, outcome)
        if build.status in {S.QUEUED, S.BUILDING}:
            self.status(job.derivation, S.SUBSTITUTED if build.substituted else S.COMPLETED)
        self.settle()
        return True

    def fail_build(
        self, assignment: int, kind: FailureKind, *, oom: bool = False, missing: Collection[str] = ()
    ) -> None:
        """JobFailed of a build, by its kind (seed "Jobs", Failures)."""
        stopped = kind in {FailureKind.CANCELED, FailureKind.ABORTED}
        job = self.close(assignment, (STOPPED if stopped else FAILED)[1])
        if job is None or job.derivation is None:
            return
        name, build = job.derivation, self.facts.builds[job.derivation]
        kind = FailureKind.TRANSIENT if oom else kind
        loops = self._loops(name)
        status, outcome, reason, attempt = self._decide(job, build, kind, oom, loops)
        self.close_attempt(assignment, outcome, reason)
        if build.status in {S.QUEUED, S.BUILDING}:
            if status is S.CREATED:
                build.cache_available = False
            build.attempt, build.updated_at = attempt, self.now
            self.status(name, status)
            if status in {S.FAILED_PERMANENT, S.FAILED_TIMEOUT}:
                self._cascade({name}, self.facts.builds)
        self.settle()
        if missing and reason is AttemptReason.INPUTS_UNAVAILABLE and loops < MAX_LOOPS:
            self.heal_missing_inputs(name, missing, job.dispatched_at)

    def _loops(self, name: str) -> int:
        reasons = [a.reason for a in self.facts.attempts if a.derivation == name]
        return reasons.count(AttemptReason.INPUTS_UNAVAILABLE)

    def _decide(
        self, job: Assignment, build: Build, kind: FailureKind, oom: bool, loops: int
    ) -> tuple[BuildStatus, AttemptOutcome, AttemptReason | None, int]:
        """Status, outcome and reason of the attempt, attempts used."""
        before = [
            a
            for a in self.facts.attempts
            if a.derivation == job.derivation and a.outcome is AttemptOutcome.FAILED
        ]
        missed = AttemptReason.SUBSTITUTE_UNAVAILABLE
        misses = 1 + sum(a.reason is missed and a.evaluation == job.evaluation for a in before)
        failed, used = AttemptOutcome.FAILED, build.attempt + 1
        if kind is FailureKind.ABORTED:
            return S.ABORTED, AttemptOutcome.ABORTED, None, build.attempt
        if kind is FailureKind.CANCELED:
            return S.QUEUED, AttemptOutcome.ABORTED, None, build.attempt
        if kind is FailureKind.TIMEOUT:
            return S.FAILED_TIMEOUT, failed, AttemptReason.WALL_CLOCK_TIMEOUT, used
        if kind in {FailureKind.PERMANENT, FailureKind.CORRUPT_EVAL_CACHE}:
            return S.FAILED_PERMANENT, failed, AttemptReason.BUILDER_NONZERO, used
        reason = AttemptReason.OOM if oom else None
        looped = False
        if kind is FailureKind.INPUTS_UNAVAILABLE:
            reason, looped = AttemptReason.INPUTS_UNAVAILABLE, loops >= MAX_LOOPS
        substitute_missed = kind is FailureKind.SUBSTITUTE_UNAVAILABLE and build.cache_available
        if not substitute_missed and not looped and used < MAX_ATTEMPTS:
            return S.FAILED_TRANSIENT, failed, reason, used
        if build.cache_available and not looped:
            if misses < MISS_THRESHOLD:
                return S.QUEUED, failed, missed, build.attempt
            return S.CREATED, failed, missed, 0
        return S.FAILED_PERMANENT, failed, reason, used

    def return_assignment(self, assignment: int) -> None:
        """A worker declined: the job goes back for others."""
        job = self.close(assignment, DispatchOutcome.ABANDONED)
        if job is None:
            return
        self.close_attempt(assignment, AttemptOutcome.ABORTED)
        if job.derivation is None:
            assert job.evaluation is not None
            self._requeue_evaluation(job.evaluation)
        else:
            self._requeue_building({job.derivation})
        self.settle()

    def _requeue_building(self, names: set[str]) -> None:
        self._move(names & self._in(S.BUILDING), S.QUEUED)

    def lose_worker(self, worker: UUID) -> None:
        """Open assignments close as abandoned; ten lost workers in a row end a build, ten dispatches an
        evaluation."""
        lost = [i for i, a in self.facts.assignments.items() if a.worker == worker and a.outcome is None]
        for assignment in lost:
            self.close(assignment, DispatchOutcome.ABANDONED)
            self.close_attempt(assignment, AttemptOutcome.ABORTED, AttemptReason.WORKER_LOST)
        jobs = [self.facts.assignments[i] for i in lost]
        builds = {job.derivation for job in jobs if job.derivation is not None}
        self._requeue_building(builds)
        self.settle()
        given_up = {n for n in builds & self._in(S.CREATED, S.QUEUED) if self._always_lost(n)}
        self._move(given_up, S.FAILED_PERMANENT)
        self._cascade(given_up, self.facts.builds)
        self.settle()
        for job in jobs:
            if job.kind is JobKind.EVAL and job.evaluation is not None:
                self._lose_evaluation(job.evaluation)

    def _always_lost(self, name: str) -> bool:
        newest = [a.reason for a in self.facts.attempts if a.derivation == name][-MAX_LOST:]
        return newest == [AttemptReason.WORKER_LOST] * MAX_LOST

    def _lose_evaluation(self, evaluation: int) -> None:
        jobs = [a for a in self.facts.assignments.values() if a.kind is JobKind.EVAL]
        if sum(a.evaluation == evaluation for a in jobs) >= MAX_LOST:
            self.fail_evaluation(evaluation)
        elif self.facts.evaluations[evaluation].status in RUNNING:
            self.facts.evaluations[evaluation].status = V.WAITING

    def retry_transient(self) -> int:
        """Queued again once the backoff, which doubles, is over; out of the queue where that is due."""
        waiting = {name: self.facts.builds[name] for name in self._in(S.FAILED_TRANSIENT)}
        due = {n for n, b in waiting.items() if b.updated_at + BACKOFF * 2 ** (b.attempt - 1) <= self.now}
        self._move(due, S.QUEUED)
        self.settle()
        return len(due)

    def restart(self) -> None:
        """A killed server starts again: nothing is on a worker."""
        for assignment, job in self.facts.assignments.items():
            if job.outcome is None:
                job.outcome = DispatchOutcome.ABANDONED
                self.close_attempt(assignment, AttemptOutcome.ABORTED)
        self._requeue_building(self._in(S.BUILDING))
        for row in self.facts.evaluations.values():
            if row.status in RUNNING:
                row.status = V.QUEUED
        self.settle()
