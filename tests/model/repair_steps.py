"""Steps of repair: a person aborts and retries builds, what is stuck is healed, what is old is collected, and
the consistency check finds nothing."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gradient.graph.consistency import ConsistencyReport, graph_consistency_report
from gradient.graph.derivation_gc import CollectDerivations
from gradient.graph.evaluation_build import AbortBuild, BuildRefused, RetryBuild
from gradient.graph.evaluation_gc import CollectEvaluations
from gradient.graph.heal import Repair
from gradient.graph.moves import Moves
from gradient.graph.transaction import Message
from gradient.model import BuildStatus
from tests.model import invariants, rules
from tests.model.cache_steps import AGE, PICKS
from tests.model.evaluation_steps import EvaluationSteps
from tests.model.pair import PICK


class RepairSteps(EvaluationSteps):
    """What people and passes do about a graph that does not go on."""

    def _named(self, *, live: bool, statuses: set[BuildStatus]) -> list[tuple[int, str]]:
        """Names with such a build, of a live evaluation or of any; others too, when there is none."""
        facts = self.model.facts
        names = sorted(facts.names)
        fitting = [
            (v, name)
            for v, name in names
            if facts.builds[name].status in statuses and (rules.is_live(facts, v) or not live)
        ]
        return fitting or names

    @precondition(lambda self: self.model.facts.names)
    @rule(pick=PICK)
    def abort_build(self, pick: int) -> None:
        stopped = {BuildStatus.CREATED, BuildStatus.QUEUED, BuildStatus.BUILDING}
        evaluation, name = self._choose(self._named(live=True, statuses=stopped), pick)
        self._say(f"abort_build {name} in {evaluation}")
        answer = self._asked(AbortBuild(self._id(name), evaluation, "somebody"))
        failed = answer if isinstance(answer, str) else self._letters(answer.dependents)
        self._same("AbortBuild", failed, self.model.abort_build(name, evaluation))
        self._check(moved=not isinstance(answer, str))

    @precondition(lambda self: self.model.facts.names)
    @rule(pick=PICK)
    def retry_build(self, pick: int) -> None:
        failed = {*rules.FAILURE, BuildStatus.ABORTED}
        evaluation, name = self._choose(self._named(live=False, statuses=failed), pick)
        self._say(f"retry_build {name} in {evaluation}")
        answer = self._asked(RetryBuild(self._id(name), evaluation, "somebody"))
        thawed = answer if isinstance(answer, str) else self._letters(answer.builds)
        self._same("RetryBuild", thawed, self.model.retry_build(name, evaluation))
        self._check(moved=not isinstance(answer, str))

    def _asked(self, message: Message[Any]) -> Any:
        """The answer, or the name of the refusal."""
        self.graph.pass_time()
        self.model.now = self.graph.now
        try:
            return self.portal(self.graph.apply, message, self._saw)
        except BuildRefused as refused:
            return refused.refusal.name

    def _letters(self, ids: tuple[int, ...]) -> set[str]:
        return {self.last.derivation_ids[i] for i in ids}

    @precondition(lambda self: self._live())
    @rule(pick=PICK)
    def heal(self, pick: int) -> None:
        self._heal(self._choose(self._live(), pick))

    def _heal(self, evaluation: int) -> None:
        self._say(f"heal {evaluation}")
        self._apply(Repair(evaluation))
        self.model.heal(evaluation)
        self._check()

    @precondition(lambda self: self.model.facts.evaluations)
    @rule(picks=PICKS)
    def collect_evaluations(self, picks: list[int]) -> None:
        evaluations = sorted({self._choose(list(self.model.facts.evaluations), pick) for pick in picks})
        self._say(f"collect_evaluations {evaluations}")
        gone = set(self._apply(CollectEvaluations(tuple(evaluations))))
        self._same("CollectEvaluations", gone, self.model.collect_evaluations(evaluations))
        self.streams = {v: stream for v, stream in self.streams.items() if v not in gone}
        self._check()

    @precondition(lambda self: self.model.facts.derivations)
    @rule(picks=st.lists(PICK, min_size=1, max_size=8))
    def collect_derivations(self, picks: list[int]) -> None:
        names = self._some(sorted(self.model.facts.derivations), picks)
        self._say(f"collect_derivations {', '.join(names)}")
        later = self.graph.now + AGE
        gone = self._apply(CollectDerivations(tuple(map(self._id, names)), later, later))
        self._same("CollectDerivations", gone, self.model.collect_derivations(names))
        self._check()

    @precondition(lambda self: not self.graph.in_shared and self.trail[-1] != "check_consistency")
    @rule()
    def check_consistency(self) -> None:
        """Invariant 30: a second pass corrects nothing. The first gives names that nobody else gave."""
        self._say("check_consistency")
        self.graph.pass_time()
        self.model.now = self.graph.now
        report = self.portal(self._consistency)
        adopted = self.model.adopt_pending_closures()
        self._same("check", report, ConsistencyReport(adopted=adopted))
        self._check(moved=False)
        lines = invariants.violations(self.last, invariants.ADOPTED)
        if lines:
            self._diverge(lines)
        before = self.last
        self._same("30 second check", self.portal(self._consistency), ConsistencyReport())
        self._check(moved=False)
        self._unchanged("30 second check", before)

    async def _consistency(self) -> Any:
        async def submit(message: Message[Any]) -> Any:
            return await self.graph.apply(message, _unheard)

        return await graph_consistency_report(self.graph.connection, submit)


def _unheard(moves: Moves) -> None:
    """Nobody listens."""
