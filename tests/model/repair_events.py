"""Repair, and what a person does about one build.

Sources: seeds "Waiting and Recovery" (Graph-Stuck Heal), "Queueing and Counters" (Dependency Failure, Build
Abort and Retry).
"""

from __future__ import annotations

import copy
from collections.abc import Collection

from gradient.model import (
    BuildStatus,
    EvaluationStatus,
)
from tests.model import rules
from tests.model.graph import RETRYING_TASK
from tests.model.settling import CASCADE, Settling

S = BuildStatus
V = EvaluationStatus


class RepairEvents(Settling):
    """The repair pass in its three scopes, dependency failure, aborts and retries."""

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
            if not self.check_evaluation_done(evaluation) and self._lost_record(evaluation):
                self.fail_evaluation(evaluation)

    def _lost_record(self, evaluation: int) -> bool:
        """It waits for what is not walked any more, nothing of it moves, and nobody is about to walk that."""
        facts, named = self.facts, set(rules.named_by(self.facts, evaluation))
        lost = {n for n in named & rules.blocking_builds(facts) if not facts.derivations[n].walked}
        walks = any(rules.is_live(facts, v) and not row.evaluated for v, row in facts.evaluations.items())
        return bool(lost) and not walks and not named & self._in(S.QUEUED, S.BUILDING, S.FAILED_TRANSIENT)

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
        evaluation, or if its builder has failed it and a task asks that does not try such again."""
        facts, row = self.facts, self.facts.evaluations[evaluation]
        failed = closure & self._in(*rules.FAILURE)
        by_builder = {name for name in failed if rules.failed_by_its_builder(facts, name)}
        if scope == "unstick":
            lasting = by_builder
        else:
            lasting = {name for name in failed if facts.builds[name].updated_at >= row.created_at}
            lasting |= by_builder if row.task not in {None, RETRYING_TASK} else set()
        lasting = lasting - self._in(S.DEPENDENCY_FAILED) | self._aborted_by(evaluation)
        lasting |= self._all_above(lasting, failed & self._in(S.DEPENDENCY_FAILED))
        self.thaw_failed(failed - lasting)

    def thaw_failed(self, names: Collection[str]) -> None:
        """Requeueable -> Created, attempt = 0."""
        thawed = set(names) & self._in(*rules.FAILURE, S.ABORTED)
        for name in thawed:
            self.facts.builds[name].attempt = 0
        self._move(thawed, S.CREATED)
        # What of it the cache holds is completed by the next step.
        self.settle(spare=thawed)

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

    def _skip_aborted(self, names: set[str]) -> None:
        """What an earlier evaluation aborted, and this one does not need, is no failure of this one."""
        aborted = (names & self._in(S.ABORTED)) - rules.wanted(self.facts)
        self._move((name for name in aborted if not rules.is_marked_in_live(self.facts, name)), S.SKIPPED)
        self.settle()

    def adopt_pending_closures(self) -> int:
        """For every live evaluation, once something wanted that no live one names stands below what one of
        them names. Answers how many names are new."""
        facts, before = self.facts, len(self.facts.names)
        live = [v for v in facts.evaluations if rules.is_live(facts, v)]
        named = {name for v in live for name in rules.named_by(facts, v)}
        if rules.open_walk(facts, named & rules.wanted(facts)) - named:
            for evaluation in live:
                self.adopt_pending_closure(evaluation)
        self.settle()
        return len(facts.names) - before

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
        if not live and self._superseded(evaluation):
            return "NEWER_EVALUATION"
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
            for named in rules.named_by(facts, evaluation):
                facts.names[evaluation, named] &= row.status is not V.ABORTED
            row.turn(V.BUILDING)
            self.settle()
            self._skip_aborted(set(rules.named_by(facts, evaluation)) - self._aborted_by(evaluation))
        self.repair(evaluation, "retry", thawed)
        self.check_evaluation_done(evaluation)
        return thawed

    def _superseded(self, evaluation: int) -> bool:
        """Newer or still active evaluations of the same task keep the evaluation closed."""
        rows = self.facts.evaluations
        task = rows[evaluation].task
        others = [v for v in rows if v != evaluation and task is not None and rows[v].task == task]
        return any(v > evaluation or rules.is_live(self.facts, v) for v in others)

    def _causes(self, name: str) -> set[str]:
        """The failed builds below it, down through DependencyFailed ones alone; itself, if it is none."""
        causes: set[str] = set()
        passed: set[str] = set()
        due = {name}
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
