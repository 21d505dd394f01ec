"""Steps of repair: a person aborts and retries builds, what is stuck is healed, what is old is collected, and
the consistency check finds nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from gradient.graph.consistency import ConsistencyReport, graph_consistency_report
from gradient.graph.derivation_gc import CollectDerivations
from gradient.graph.drv_recovery import RecoverDrv
from gradient.graph.evaluation_build import AbortBuild, BuildRefused, RetryBuild
from gradient.graph.evaluation_gc import CollectEvaluations
from gradient.graph.heal import Repair
from gradient.graph.moves import Moves
from gradient.graph.pg import execute
from gradient.graph.transaction import Message
from gradient.model import BuildStatus, FailureKind
from tests.model import invariants, rules, stored
from tests.model.cache_steps import AGE, PICKS
from tests.model.evaluation_steps import STREAMS, EvaluationSteps
from tests.model.graph import TASKS
from tests.model.pair import PICK, SELDOM
from tests.model.script import step

# Maintained columns: their table, and its key.
FLAGS: Final = ("fetchable", "wanted")
DAMAGE: Final = {
    "unwalked_inputs": ("derivation", "id"),
    **dict.fromkeys(("missing_runtime_deps", "blocking_deps", *FLAGS), ("derivation_build", "derivation")),
    **dict.fromkeys(
        (f"{what}_shared_builds" for what in ("named", "active", "failed", "queued", "building")),
        ("evaluation", "id"),
    ),
}
SILENT: Final = "ALTER TABLE derivation_build DISABLE TRIGGER USER"
LOUD: Final = "ALTER TABLE derivation_build ENABLE TRIGGER USER"


class RepairSteps(EvaluationSteps):
    """What people and passes do about a graph that does not go on."""

    def _abortable(self) -> list[tuple[int, str]]:
        """Names of live evaluations whose build has not ended."""
        facts, stopped = self.model.facts, {BuildStatus.CREATED, BuildStatus.QUEUED, BuildStatus.BUILDING}
        return [
            (v, name)
            for v, name in sorted(facts.names)
            if rules.is_live(facts, v) and facts.builds[name].status in stopped
        ]

    def _retryable(self) -> list[tuple[int, str]]:
        """Names of evaluations that came to their builds, whose build has failed or was aborted."""
        facts, failed = self.model.facts, {*rules.FAILURE, BuildStatus.ABORTED}
        return [
            (v, name)
            for v, name in sorted(facts.names)
            if facts.evaluations[v].evaluated and facts.builds[name].status in failed
        ]

    @precondition(lambda self: self.model.facts.names)
    @step(pick=PICK, in_vain=st.integers(0, 4))
    def abort_build(self, pick: int, in_vain: int) -> None:
        """One that has not ended, or any: that is refused."""
        if names := self._abortable() if in_vain else sorted(self.model.facts.names):
            self._abort_build(*self._choose(names, pick))

    def _abort_build(self, evaluation: int, name: str) -> None:
        self._say(f"abort_build {name} in {evaluation}")
        answer = self._asked(AbortBuild(self._id(name), evaluation, "somebody"))
        failed = answer if isinstance(answer, str) else self._letters(answer.dependents)
        self._same("AbortBuild", failed, self.model.abort_build(name, evaluation))
        self._answered(answer)

    @precondition(lambda self: self.model.facts.names)
    @step(pick=PICK, in_vain=st.integers(0, 4))
    def retry_build(self, pick: int, in_vain: int) -> None:
        """One that has failed, or any: that is refused."""
        if not self._retryable() and (self._jobs() or self._queued()):
            self._fail(self._some_job(pick), FailureKind.PERMANENT)
        if names := self._retryable() if in_vain else sorted(self.model.facts.names):
            self._retry_build(*self._choose(names, pick))

    def _retry_build(self, evaluation: int, name: str) -> None:
        self._say(f"retry_build {name} in {evaluation}")
        answer = self._asked(RetryBuild(self._id(name), evaluation, "somebody"))
        thawed = answer if isinstance(answer, str) else self._letters(answer.builds)
        self._same("RetryBuild", thawed, self.model.retry_build(name, evaluation))
        self._answered(answer)

    @precondition(lambda self: self._jobs() or self._queued())
    @step(pick=PICK)
    def retry_too_early(self, pick: int) -> None:
        """While its worker still stops it."""
        job = self.model.facts.assignments[self._some_job(pick)]
        if names := [(v, name) for v, name in self._abortable() if name == job.derivation]:
            self._abort_build(*names[0])
            self._retry_build(*names[0])

    @step(pick=PICK, tops=st.lists(PICK, min_size=1, max_size=3))
    def retry_too_late(self, pick: int, tops: list[int]) -> None:
        """Its task has a newer evaluation."""
        idle = list(filter(self.model.may_create, TASKS))
        if not self._of_tasks() and idle:
            evaluation = self._evaluate(tops, self._choose(idle, pick))
            if evaluation in self._live():
                self._abort_evaluation(evaluation)
        if self._of_tasks():
            evaluation, name = self._choose(self._of_tasks(), pick)
            task = self.model.facts.evaluations[evaluation].task
            if self.model.may_create(task):
                self._evaluate(tops, task)
            self._retry_build(evaluation, name)

    def _of_tasks(self) -> list[tuple[int, str]]:
        """Those that may be retried in evaluations of tasks which have ended."""
        facts = self.model.facts
        tried = self._retryable()
        return [(v, n) for v, n in tried if facts.evaluations[v].task and not rules.is_live(facts, v)]

    def _answered(self, answer: Any) -> None:
        if isinstance(answer, str):
            self._refused(answer)
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
    @step(pick=PICK, after_failure=st.booleans())
    def heal(self, pick: int, after_failure: bool) -> None:
        """What was stuck; perhaps because of something that may be tried again."""
        if after_failure and (self._jobs() or self._queued()):
            self._fail(self._some_job(pick), FailureKind.TIMEOUT)
        waiting = sorted(set(self._live()) & set(self._past()))
        hurt = [v for v in waiting if rules.counters(self.model.facts, v).failed]
        if some := hurt or waiting or self._live():
            self._heal(self._choose(some, pick))

    def _heal(self, evaluation: int) -> None:
        self._say(f"heal {evaluation}")
        self._apply(Repair(evaluation))
        self.model.heal(evaluation)
        self._check()
        self._repaired(evaluation)

    def _stuck(self) -> list[int]:
        return [v for v, row in self.model.facts.evaluations.items() if row.stuck_since is not None]

    def _waiting_for(self, evaluation: int) -> list[str]:
        """Its builds that nobody has taken yet."""
        return sorted(set(rules.named_by(self.model.facts, evaluation)) & set(self._queued()))

    def _losable(self) -> list[int]:
        """Those that a `.drv` can be lost for."""
        return list(filter(self._waiting_for, self._building()))

    @precondition(lambda self: self._live())
    @step(pick=PICK, lost=st.booleans(), minutes=st.sampled_from([0, 2]))
    def recover_drv(self, pick: int, lost: bool, minutes: int) -> None:
        """It may be stuck over a `.drv`, which perhaps is lost now."""
        evaluation = self._choose(self._stuck() or self._losable() or self._live(), pick)
        if lost:
            self._lose_drv(evaluation, pick)
        self._park(evaluation, stuck=True)
        self._recover_drv(evaluation, minutes)

    @precondition(lambda self: not self.graph.in_shared and len(self.streams) < STREAMS)
    @precondition(lambda self: self._losable())
    @step(pick=PICK, walks=st.booleans())
    def recover_in_vain(self, pick: int, walks: bool) -> None:
        """What is to bring the `.drv` fails, or is stuck over it when it has walked all."""
        evaluation = self._choose(self._losable(), pick)
        self._lose_drv(evaluation, pick)
        self._park(evaluation, stuck=True)
        recovery = self._recover_drv(evaluation, minutes=2)
        if recovery is not None:
            self._recover_drv(evaluation, minutes=2)
            if walks:
                self._walk_in_vain(recovery)
            else:
                self._fail_evaluation(recovery)
            self._recover_drv(evaluation, minutes=2)

    def _lose_drv(self, evaluation: int, pick: int) -> None:
        if names := self._waiting_for(evaluation):
            self._lose([f"{self._choose(names, pick)}.drv"])

    def _walk_in_vain(self, recovery: int) -> None:
        self._start(recovery, False, 0)
        stream = self.streams[recovery]
        self._send_batch(recovery, stream, len(stream.left), drvs=False, entries=True)
        self._end_stream(recovery, stream, all_sent=True)
        self._park(recovery, stuck=True)
        self._recover_drv(recovery, minutes=2)

    def _recover_drv(self, evaluation: int, minutes: int) -> int | None:
        self.graph.pass_time(timedelta(minutes=minutes))
        self._say(f"recover_drv of {evaluation} {minutes} minutes later")
        recovery: int | None = self._apply(RecoverDrv(evaluation))
        self._same("RecoverDrv", recovery is not None, self.model.may_recover(evaluation))
        self.model.recover_drv(evaluation, recovery)
        if recovery is not None:
            self._say(f"recovery {recovery} of {evaluation}")
            self.tops[recovery] = self.tops[evaluation]
        self._check()
        return recovery

    @precondition(lambda self: self.model.facts.evaluations)
    @SELDOM
    @step(picks=PICKS)
    def collect_evaluations(self, picks: list[int]) -> None:
        some = self._ended() or list(self.model.facts.evaluations)
        self._collect_evaluations(sorted({self._choose(some, pick) for pick in picks}))

    def _ended(self) -> list[int]:
        return sorted(set(self.model.facts.evaluations) - set(self._live()))

    def _collect_evaluations(self, evaluations: list[int]) -> None:
        self._say(f"collect_evaluations {evaluations}")
        gone = set(self._apply(CollectEvaluations(tuple(evaluations))))
        self._same("CollectEvaluations", gone, self.model.collect_evaluations(evaluations))
        self.streams = {v: stream for v, stream in self.streams.items() if v not in gone}
        self._check()

    @precondition(lambda self: self.model.facts.derivations)
    @step(picks=st.lists(PICK, min_size=1, max_size=8))
    def collect_derivations(self, picks: list[int]) -> None:
        known = sorted(self.model.facts.derivations)
        if all(rules.is_named(self.model.facts, name) for name in known):
            self._collect_evaluations(self._ended())
        unnamed = [name for name in known if not rules.is_named(self.model.facts, name)]
        names = self._some(unnamed or known, picks)
        self._say(f"collect_derivations {', '.join(names)}")
        later = self.graph.now + AGE
        gone = self._apply(CollectDerivations(tuple(map(self._id, names)), later, later))
        self._same("CollectDerivations", gone, self.model.collect_derivations(names))
        self._check()

    @precondition(lambda self: not self.graph.in_shared and not self.doing.startswith("check"))
    @SELDOM
    @step()
    def check_consistency(self) -> None:
        """Invariant 30: a second pass corrects nothing. The first gives names that nobody else gave."""
        self._say("check_consistency")
        self.graph.pass_time()
        self.model.now = self.graph.now
        report = self.portal(self._consistency)
        adopted = self.model.adopt_pending_closures()
        self._same("check", report, ConsistencyReport(adopted=adopted))
        self._checked()

    def _checked(self) -> None:
        """The consistency check has run: all is as the model has it, and a second one finds nothing."""
        self._check(moved=False)
        lines = invariants.violations(self.last, invariants.ADOPTED)
        if lines:
            self._diverge(lines)
        before = self.last
        self._same("30 second check", self.portal(self._consistency), ConsistencyReport())
        self._check(moved=False)
        self._unchanged("30 second check", before)

    @precondition(lambda self: not self.graph.in_shared)
    @precondition(lambda self: self.model.facts.builds and self.model.facts.evaluations)
    @step(
        damage=st.lists(
            st.tuples(st.sampled_from(sorted(DAMAGE)), PICK, st.integers(0, 2)), min_size=1, max_size=4
        )
    )
    def check_damaged(self, damage: list[tuple[str, int, int]]) -> None:
        """Somebody has written to maintained columns: the check puts all of them right."""
        self._say(f"check_damaged {', '.join(self._damage(*one) for one in damage)}")
        self.graph.pass_time()
        self.model.now = self.graph.now
        wrong = stored.differences(self.model.facts, self._read())
        report = self.portal(self._consistency)
        adopted = self.model.adopt_pending_closures()
        self._same("check", report != ConsistencyReport(), bool(wrong or adopted))
        self._checked()

    def _damage(self, column: str, pick: int, value: int) -> str:
        """Write to one row, behind the backs of the triggers; what was written."""
        table, key = DAMAGE[column]
        rows = sorted(self.model.facts.evaluations if table == "evaluation" else self._built())
        row = self._choose(rows, pick)
        new = f"NOT {column}" if column in FLAGS else str(value)
        self.portal(self._behind_triggers, f"UPDATE {table} SET {column} = {new} WHERE {key} = {row}")
        return f"{column} of {row} = {new}"

    def _built(self) -> list[int]:
        """The ids of what has a shared build."""
        return [i for i, name in self.last.derivation_ids.items() if name in self.last.facts.builds]

    async def _behind_triggers(self, statement: str) -> None:
        async with self.graph.connection.transaction():
            for part in (SILENT, statement, LOUD):
                await execute(self.graph.connection, part)

    async def _consistency(self) -> Any:
        async def submit(message: Message[Any]) -> Any:
            return await self.graph.apply(message, _unheard)

        return await graph_consistency_report(self.graph.connection, submit)


def _unheard(moves: Moves) -> None:
    """Nobody listens."""
