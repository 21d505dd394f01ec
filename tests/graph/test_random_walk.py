"""A seeded random walk over everything that can happen to the graph: after each step every maintained
column equals its recount, and once nothing more can happen every evaluation has ended."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import attrs
import pytest

from gradient.graph.build_failures import BuildFailed
from gradient.graph.build_outputs import StoreBuildOutput
from gradient.graph.builds import BuildCompleted, BuildStarted
from gradient.graph.consistency import ConsistencyReport, graph_consistency_report
from gradient.graph.counters import fold_shared_build_deltas, recount_evaluations
from gradient.graph.evaluation_build import BuildRefused, Refusal
from gradient.graph.evaluation_end import FailEvaluation, FinishEvaluation
from gradient.graph.evaluation_reports import EvalFailed, EvalStreamCompleted
from gradient.graph.evaluations import UnparkEvaluation
from gradient.graph.heal import Repair
from gradient.graph.pg import Connection
from gradient.graph.record import Record
from gradient.graph.recovery import recover_interrupted_work
from gradient.graph.requeue import LoseWorker, RetryTransient, ReturnAssignment
from gradient.graph.unconfirmed import AbandonUnconfirmed
from gradient.model import (
    EVALUATION_TERMINAL,
    BuildStatus,
    EntryPoint,
    EvaluationStatus,
    FailureKind,
)
from tests.graph.universe import Universe
from tests.graph.world import LIMITS, WORKER, World, drv, hash_part, nar

STEPS = 45
LIVE = 3


@attrs.define
class Running:
    """An evaluation on a worker: what it has still to send."""

    assignment: int
    left: list[str]
    entries: list[str]


class Walk:
    """One walk. Steps that cannot be made now do nothing."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world = world
        self.dice = dice
        self.universe = Universe.of(dice, 9)
        self.running: dict[int, Running] = {}
        self.jobs: dict[int, str] = {}  # assignment -> name
        self.tops: dict[int, list[str]] = {}

    # --- steps ----------------------------------------------------------------------------------

    async def step(self) -> str:
        steps: list[tuple[int, Callable[[], Any]]] = [
            (4, self.new_evaluation),
            (12, self.send_batch),
            (5, self.end_stream),
            (1, self.fail_stream),
            (3, self.abort),
            (2, self.fail_evaluation),
            (3, self.abort_build),
            (3, self.retry_build),
            (1, self.heal),
            (1, self.abandon),
            (8, self.commit_drv),
            (3, self.commit_output),
            (12, self.claim),
            (4, self.report_building),
            (14, self.complete),
            (6, self.fail),
            (2, self.decline),
            (2, self.lose_worker),
            (2, self.retry),
            (1, self.fold),
            (1, self.restart),
            (1, self.find_no_drift),
        ]
        chosen = self.dice.choices([s for _, s in steps], [weight for weight, _ in steps])[0]
        await chosen()
        return chosen.__name__

    async def new_evaluation(self) -> None:
        if len(self.running) < LIVE:
            evaluation = await self.world.evaluation()
            await self.begin(evaluation)

    async def begin(self, evaluation: int) -> None:
        """What a worker finds in it: a closure, sent in some order, perhaps pruned."""
        if evaluation not in self.tops:
            self.tops[evaluation] = self.dice.sample(list(self.universe.inputs), self.dice.choice((1, 2, 3)))
        tops = self.tops[evaluation]
        left = self.universe.closure(tops)
        self.dice.shuffle(left)
        assignment = self.world.open.pop(f"eval:{evaluation}")
        self.running[evaluation] = Running(assignment, left, tops)

    async def send_batch(self) -> None:
        if not self.running:
            return
        evaluation = self.dice.choice(list(self.running))
        run = self.running[evaluation]
        batch, run.left = run.left[:3], run.left[3:]
        if self.dice.random() < 0.5:
            await self.world.commit(*(nar(drv(name)) for name in batch))
        known = [name for name in run.entries if name not in run.left and await self.walked(name, batch)]
        points = tuple(EntryPoint(name, drv(name)) for name in known)
        await self.world.apply(Record(evaluation, tuple(map(self.universe.record, batch)), points))

    async def walked(self, name: str, batch: list[str]) -> bool:
        query = "SELECT walked FROM derivation WHERE hash = %s"
        return name in batch or bool(await self.world.value(query, hash_part(name + ".drv")))

    async def end_stream(self) -> None:
        if not self.running:
            return
        evaluation = self.dice.choice(list(self.running))
        while self.running[evaluation].left:
            await self.send_rest(evaluation)
        run = self.running.pop(evaluation)
        points = tuple(EntryPoint(name, drv(name)) for name in run.entries)
        await self.world.apply(Record(evaluation, (), points))
        await self.world.apply(EvalStreamCompleted(run.assignment))

    async def send_rest(self, evaluation: int) -> None:
        run = self.running[evaluation]
        batch, run.left = run.left[:4], run.left[4:]
        await self.world.commit(*(nar(drv(name)) for name in batch))
        await self.world.apply(Record(evaluation, tuple(map(self.universe.record, batch)), ()))

    async def fail_stream(self) -> None:
        if self.running:
            evaluation = self.dice.choice(list(self.running))
            kind = self.dice.choice([FailureKind.PERMANENT, FailureKind.TRANSIENT, FailureKind.CANCELED])
            await self.world.apply(EvalFailed(self.running[evaluation].assignment, kind, "broken", 3))
            await self.begin_again(evaluation)

    async def begin_again(self, evaluation: int) -> None:
        del self.running[evaluation]
        await self.world.apply(UnparkEvaluation(evaluation, EvaluationStatus.QUEUED))
        if await self.world.evaluation_status(evaluation) is EvaluationStatus.QUEUED:
            await self.world.start_evaluation(evaluation)
            await self.begin(evaluation)

    async def abort(self) -> None:
        evaluation = await self.some_live()
        if evaluation is not None:
            await self.world.abort(evaluation)
            await self.stop_stream(evaluation)

    async def fail_evaluation(self) -> None:
        """From the server's side: it wants its closure still."""
        evaluation = await self.some_live()
        if evaluation is not None:
            await self.world.apply(FailEvaluation(evaluation, "test", "over"))
            await self.stop_stream(evaluation)

    async def some_live(self) -> int | None:
        ids = "SELECT coalesce(array_agg(id ORDER BY id), '{}') FROM evaluation"
        live = await self.world.value(f"{ids} WHERE status IN (0, 1, 2, 3, 4, 8)")
        return self.dice.choice(live) if live else None

    async def stop_stream(self, evaluation: int) -> None:
        """The worker of an evaluation that has ended hears of it, and perhaps says so."""
        run = self.running.pop(evaluation, None)
        if run is not None and self.dice.random() < 0.7:
            await self.world.apply(EvalFailed(run.assignment, FailureKind.ABORTED, "aborted", 3))

    async def abort_build(self) -> None:
        with suppress(BuildRefused):
            await self.world.abort_build(await self.some_build())

    async def retry_build(self) -> None:
        with suppress(BuildRefused):
            await self.world.retry_build(await self.some_build())

    async def some_build(self) -> str:
        """Of the graph if there is any: a refusal is no change either."""
        known = sorted(await self.world.statuses())
        if not known:
            raise BuildRefused(Refusal.NOT_NAMED, "nothing is recorded yet")
        return self.dice.choice(known)

    async def abandon(self) -> None:
        """Aborts that nobody confirmed. Some of those workers report all the same, later."""
        await self.world.apply(AbandonUnconfirmed(timedelta(0)))
        for assignment in self.world.moves.dropped & set(self.jobs):
            if self.dice.random() < 0.5:
                del self.jobs[assignment]

    async def commit_drv(self) -> None:
        await self.world.commit(nar(drv(self.dice.choice(list(self.universe.inputs)))))

    async def commit_output(self) -> None:
        path = self.dice.choice(list(self.universe.references))
        await self.world.commit(nar(path, self.universe.references[path]))

    async def claim(self) -> None:
        queued = [
            name for name, status in (await self.world.statuses()).items() if status is BuildStatus.QUEUED
        ]
        if queued:
            name = self.dice.choice(sorted(queued))
            assignment = await self.world.claim(name)
            if assignment is not None:
                self.jobs[assignment] = name

    async def report_building(self) -> None:
        if self.jobs:
            await self.world.apply(BuildStarted(self.dice.choice(list(self.jobs))))

    async def complete(self) -> None:
        if not self.jobs:
            return
        assignment = self.dice.choice(list(self.jobs))
        name = self.jobs.pop(assignment)
        outputs = list(self.universe.outputs[name])
        if self.dice.random() < 0.1:
            outputs.pop()  # the worker claims more than it uploaded
        await self.world.commit(*(nar(o.path, self.universe.references[o.path]) for o in outputs))
        if self.dice.random() < 0.5:
            await self.world.apply(StoreBuildOutput(assignment, (), self.dice.random() < 0.5))
        await self.world.apply(BuildCompleted(assignment, LIMITS))

    async def fail(self) -> None:
        if self.jobs:
            assignment = self.dice.choice(list(self.jobs))
            del self.jobs[assignment]
            kind = self.dice.choice(list(FailureKind))
            await self.world.apply(BuildFailed(assignment, kind, "broken", LIMITS))

    async def decline(self) -> None:
        if self.jobs:
            assignment = self.dice.choice(list(self.jobs))
            del self.jobs[assignment]
            await self.world.apply(ReturnAssignment(assignment))

    async def lose_worker(self) -> None:
        await self.world.apply(LoseWorker(WORKER))
        self.jobs.clear()
        await self.all_begin_again()

    async def all_begin_again(self) -> None:
        for evaluation in list(self.running):
            await self.begin_again(evaluation)

    async def retry(self) -> None:
        self.world.now += timedelta(minutes=self.dice.choice((0, 10)))
        await self.world.apply(RetryTransient(LIMITS))

    async def fold(self) -> None:
        assert await fold_shared_build_deltas(self.world.connection)

    async def restart(self) -> None:
        await recover_interrupted_work(self.world.connection, self.world.now)
        self.jobs.clear()
        await self.all_begin_again()

    async def find_no_drift(self) -> None:
        report = await graph_consistency_report(self.world.connection, self.world.apply)
        assert attrs.evolve(report, adopted=0) == ConsistencyReport()

    # --- the end --------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Let everything run to its end."""
        await self.world.commit(*(nar(drv(name)) for name in self.universe.inputs))
        while self.running:
            await self.end_stream()
        for _ in range(200):
            await self.claim()
            await self.retry()
            if not self.jobs and not await self.work_left() and not await self.heal():
                return
            await self.complete()
        raise AssertionError(f"no end: {await self.world.statuses()}")

    async def heal(self) -> bool:
        """What the waiting pass does for an evaluation whose builds cannot be handed out: it may want what
        was aborted in another one without naming it yet."""
        waiting = "SELECT coalesce(array_agg(id ORDER BY id), '{}') FROM evaluation WHERE status IN (3, 4)"
        for evaluation in await self.world.value(waiting):
            await self.world.apply(Repair(evaluation))
        return await self.work_left()

    async def work_left(self) -> bool:
        query = "SELECT EXISTS (SELECT FROM derivation_build WHERE status IN (1, 2, 8))"
        return bool(await self.world.value(query))


async def play(walk: Walk, steps: int) -> list[int]:
    """Make the steps, and then whatever is left to do; the evaluations there are in the end."""
    trail: list[str] = []
    try:
        for _ in range(steps):
            trail.append(await walk.step())
            await walk.world.check()
        trail.append("finish")
        await walk.finish()
        await walk.world.check()
        return await all_ended(walk.world)
    except BaseException as error:
        error.add_note(" ".join(trail))
        raise


async def all_ended(world: World) -> list[int]:
    """Nothing runs and nothing is queued: then nothing waits either."""
    cursor = await world.connection.execute("SELECT id, status FROM evaluation ORDER BY id")
    statuses = {i: EvaluationStatus(status) for i, status in await cursor.fetchall()}
    stuck = {i: s for i, s in statuses.items() if s not in EVALUATION_TERMINAL}
    assert stuck == {}, f"{stuck}\n{await world.picture()}"
    for evaluation in statuses:
        assert not await world.apply(FinishEvaluation(evaluation))
    return list(statuses)


SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 100))]


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_column_is_right_after_every_step(connection: Connection, seed: int) -> None:
    world = World(connection)
    await world.setup()
    evaluations = await play(Walk(world, random.Random(seed)), STEPS)
    await recount_evaluations(connection, evaluations)
    await world.check()
    assert await graph_consistency_report(connection, world.apply) == ConsistencyReport()
