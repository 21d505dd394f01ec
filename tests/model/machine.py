"""The state machine: random messages to the real graph and to the model, and both compared after each.

A rule that cannot be made now does nothing. Numbers choose from what there is, so that an example stays the
same when a step before it is left out; its story tells what each step was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from gradient.graph.counters import fold_shared_build_deltas, recount_evaluations
from gradient.graph.evaluation_reports import EvalFailed
from gradient.graph.moves import Moves
from gradient.graph.recovery import recover_interrupted_work
from gradient.model import BuildStatus, FailureKind, JobKind
from tests.model import invariants
from tests.model.graph import Graph
from tests.model.pair import LIMITS, PICK, SELDOM, Portal, Tally
from tests.model.repair_steps import RepairSteps
from tests.model.script import first_step, step
from tests.model.universe import Universe, universes
from tests.model.watch import Watch

# Rounds in which everybody makes a step, until nothing moves.
END: Final = 300
# What a build fails of, day by day.
FAILURES: Final = (FailureKind.TRANSIENT, FailureKind.PERMANENT, FailureKind.TIMEOUT)


class GraphMachine(RepairSteps):
    """Everything that can happen, and the end of it."""

    @first_step(
        universe=universes(),
        upstream=st.booleans(),
        tops=st.lists(PICK, min_size=1, max_size=2),
        walked=st.booleans(),
    )
    def begin(self, universe: Universe, upstream: bool, tops: list[int], walked: bool) -> None:
        """With one evaluation, which has perhaps come to its builds already."""
        self._begin(universe, upstream)
        evaluation = self._new_evaluation(tops, None, prune=False, order=0)
        if walked:
            self._end_stream(evaluation, self.streams[evaluation], all_sent=True)

    # Hypothesis leaves out some rules of each example. These go where a healthy server goes, whatever else
    # happens, so that every example gets somewhere.

    @step(picks=st.lists(PICK, min_size=1, max_size=3))
    def go_on(self, picks: list[int]) -> None:
        for pick in picks:
            self._go_on(pick)

    @step(pick=PICK)
    def go_on_a_little(self, pick: int) -> None:
        self._go_on(pick)

    def _go_on(self, pick: int) -> None:
        steps: list[Callable[[], None]] = []
        if self.streams:
            evaluation, stream = self._choose(sorted(self.streams.items()), pick // 3)
            if stream.left:
                steps.append(lambda: self._send_batch(evaluation, stream, 2, drvs=True, entries=True))
            else:
                steps.append(lambda: self._end_stream(evaluation, stream, all_sent=True))
        if self._queued():
            name = self._choose(self._queued(), pick // 3)
            steps.append(lambda: self._report(self._claim(name), self._start_build))
        if self._jobs():
            job = self._choose(self._jobs(), pick // 3)
            steps.append(lambda: self._complete(job, substituted=pick % 3 == 0))
            # Not everything that a healthy server does succeeds.
            if pick > 8:
                steps.append(lambda: self._fail(job, self._choose(FAILURES, pick)))
        if self._parked():
            steps.append(lambda: self._unpark(self._choose(self._parked(), pick)))
        if self._queued_evaluations():
            steps.append(lambda: self._start(self._queued_evaluations()[0], False, 0))
        unasked = sorted(name for name, build in self.model.facts.builds.items() if not build.probed)
        if unasked:
            steps.append(lambda: self._answer_probe(unasked[:3], served=False))
        if not steps:
            steps.append(lambda: self._evaluate([pick, pick + 1], None))
        self._choose(steps, pick)()

    @precondition(lambda self: not self.graph.in_shared)
    @SELDOM
    @step()
    def share_a_transaction(self) -> None:
        """What waits in the writer's channel is applied together."""
        self._say("share_a_transaction")
        self.graph.pass_time()
        self.moves = Moves()
        self.portal(self.graph.open_shared)

    @precondition(lambda self: self.graph.in_shared)
    @step()
    def commit_transaction(self) -> None:
        self._commit_transaction()

    def _commit_transaction(self) -> None:
        self._say("commit_transaction")
        self.portal(self.graph.commit, self._saw)
        self._check()

    @precondition(lambda self: not self.graph.in_shared)
    @precondition(lambda self: self.last.ledger)
    @step(recount=st.booleans())
    def fold(self, recount: bool) -> None:
        self._say("recount" if recount else "fold")
        connection = self.graph.connection
        if recount:
            self.portal(recount_evaluations, connection, list(self.model.facts.evaluations))
        else:
            assert self.portal(fold_shared_build_deltas, connection)
        self._check(moved=False)
        if not recount:
            self._same("ledger", self.last.ledger, 0)

    @precondition(lambda self: not self.graph.in_shared)
    @precondition(lambda self: self._on_workers())
    @step()
    def restart(self) -> None:
        self._say("restart")
        self.graph.pass_time()
        self.model.now = self.graph.now
        self.portal(recover_interrupted_work, self.graph.connection, self.graph.now)
        self.model.restart()
        self.streams.clear()
        self._check(moved=False)

    # --- the end --------------------------------------------------------------------------------

    def end(self) -> None:
        """Let everything run to its end: then nothing waits for anything."""
        if self.graph.in_shared:
            self._commit_transaction()
        for _ in range(END):
            if not (self._let_all_go_on() or self._heal_all() or self._recover_all()):
                break
        else:
            self._diverge(["it comes to no end"])
        self._check(moved=False)
        lines = invariants.violations(self.last, invariants.QUIET)
        if lines:
            self._diverge([*lines, *map(str, self.model.facts.builds.items())])

    def _heal_all(self) -> bool:
        """As the waiting pass does it once nothing can be handed out; whether that changed anything. What
        was a passthrough until a moment ago may stand above what had failed before."""
        before = self.last
        for evaluation in self._live():
            self._heal(evaluation)
        return self.last != before

    def _recover_all(self) -> bool:
        """As the pass does it about what is stuck in spite of that; whether any has ended or begun."""
        before = self._live()
        for evaluation in self._building():
            self._park(evaluation, stuck=True)
        for evaluation in self._stuck():
            self._recover_drv(evaluation, minutes=2)
        return self._live() != before

    def _let_all_go_on(self) -> bool:
        """One step of everybody who can make one."""
        facts = self.model.facts
        for evaluation in self._parked():
            self._unpark(evaluation)
        for evaluation, stream in list(self.streams.items()):
            self._end_stream(evaluation, stream, all_sent=True)
        for evaluation in self._queued_evaluations():
            self._start(evaluation, False, 0)
            return True
        for assignment, job in list(facts.assignments.items()):
            if job.outcome is None and job.kind is JobKind.EVAL:
                self._apply(EvalFailed(assignment, FailureKind.ABORTED, "aborted", LIMITS.max_attempts))
                self.model.fail_stream(assignment, FailureKind.ABORTED)
                self._check()
        unasked = sorted(name for name, build in facts.builds.items() if not build.probed)
        if unasked:
            self._answer_probe(unasked, served=False)
        for assignment in self._jobs():
            self._complete(assignment)
        if any(build.status is BuildStatus.FAILED_TRANSIENT for build in facts.builds.values()):
            self._retry_transient(100)
        queued = self._queued()
        for name in queued:
            if self.model.may_claim(name, facts.builds[name].cache_available):
                self._complete(self._claim(name))
        return bool(queued or self._jobs())


def machine_on(
    graph: Graph, portal: Portal, tally: Tally, watch: Watch, base: type[GraphMachine] = GraphMachine
) -> type[GraphMachine]:
    """The machine for one database; `portal` runs an async function where its connection lives."""
    own = {"graph": graph, "portal": staticmethod(portal), "tally": tally, "watch": watch}
    return type(base.__name__, (base,), own)
