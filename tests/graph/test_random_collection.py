"""The random walk with a cache that loses things and a collector at work: every column is right after every
step, and in the end nothing waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from gradient.graph.build_failures import BuildFailed
from gradient.graph.consistency import graph_consistency_report
from gradient.graph.demote import DemoteMissingNar, unwalk_unsourced
from gradient.graph.derivation_gc import CollectDerivations
from gradient.graph.evaluation_gc import CollectEvaluations
from gradient.graph.pg import Connection
from gradient.graph.retire import retire_cached_paths
from gradient.graph.transaction import Transaction
from gradient.model import EvaluationStatus, FailureKind
from gradient.nix.store_path import StorePath
from tests.graph.test_random_walk import STEPS, Walk, play
from tests.graph.world import LIMITS, World, hash_part


@attrs.frozen
class Retire:
    hashes: tuple[str, ...]

    async def apply(self, tx: Transaction) -> None:
        await retire_cached_paths(tx, self.hashes)


@attrs.frozen
class Unsource:
    """As after the loss of an input source."""

    hash_part: str

    async def apply(self, tx: Transaction) -> None:
        await unwalk_unsourced(tx, [self.hash_part])


class LossyWalk(Walk):
    """Steps of the collection and of losses, beside all others."""

    async def step(self) -> str:
        if self.dice.random() < 0.7:
            return await super().step()
        steps: list[tuple[int, Callable[[], Any]]] = [
            (6, self.retire_outputs),
            (1, self.retire_drv),
            (3, self.lose_object),
            (4, self.miss_input),
            (3, self.collect_evaluations),
            (4, self.collect_derivations),
            (2, self.lose_source),
        ]
        chosen = self.dice.choices([s for _, s in steps], [weight for weight, _ in steps])[0]
        await chosen()
        return chosen.__name__

    def some_outputs(self) -> tuple[str, ...]:
        paths = self.dice.sample(sorted(self.universe.references), self.dice.choice((1, 1, 2, 3)))
        return tuple(StorePath.parse(path).hash_part for path in paths)

    async def retire_outputs(self) -> None:
        await self.world.apply(Retire(self.some_outputs()))

    async def retire_drv(self) -> None:
        await self.world.apply(Retire((hash_part(self.dice.choice(list(self.universe.inputs)) + ".drv"),)))

    async def lose_object(self) -> None:
        await self.world.apply(DemoteMissingNar(self.some_outputs()))

    async def miss_input(self) -> None:
        if self.jobs:
            assignment = self.dice.choice(list(self.jobs))
            inputs = self.universe.inputs[self.jobs.pop(assignment)]
            paths = [output.path for name in inputs for output in self.universe.outputs[name]]
            missing = tuple(StorePath.parse(path).hash_part for path in paths[:1])
            kind = FailureKind.INPUTS_UNAVAILABLE
            message = BuildFailed(assignment, kind, "not there", LIMITS, missing_paths=missing)
            await self.world.apply(message)

    async def collect_evaluations(self) -> None:
        evaluations = await self.world.value("SELECT coalesce(array_agg(id), '{}') FROM evaluation")
        chosen = self.dice.sample(sorted(evaluations), min(len(evaluations), 2))
        await self.world.apply(CollectEvaluations(tuple(chosen)))

    async def collect_derivations(self) -> None:
        found = await self.world.value("SELECT coalesce(array_agg(id), '{}') FROM derivation")
        chosen = self.dice.sample(sorted(found), min(len(found), self.dice.choice((1, 3, 20))))
        now = self.world.now
        await self.world.apply(CollectDerivations(tuple(chosen), now, now))

    async def lose_source(self) -> None:
        """A derivation of the universe had a source once, and the cache has it no more."""
        name = self.dice.choice(list(self.universe.inputs))
        source = hash_part(name + " source")
        await self.world.connection.execute(
            "INSERT INTO derivation_input_source SELECT id, %s, %s FROM derivation WHERE name = %s"
            " ON CONFLICT DO NOTHING",
            (source, source, name),
        )
        await self.world.apply(Unsource(source))

    async def end_stream(self) -> None:
        before = set(self.running)
        await super().end_stream()
        for evaluation in before - set(self.running):
            # Overtaken: it walks once more.
            if await self.world.evaluation_status(evaluation) is EvaluationStatus.QUEUED:
                await self.world.start_evaluation(evaluation)
                await self.begin(evaluation)

    async def finish(self) -> None:
        """The next walk brings what was lost."""
        evaluation = await self.world.evaluation()
        self.tops[evaluation] = list(self.universe.inputs)
        await self.begin(evaluation)
        await super().finish()


SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(12, 120))]


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_column_is_right_after_every_step(connection: Connection, seed: int) -> None:
    world = World(connection)
    await world.setup()
    await play(LossyWalk(world, random.Random(seed)), STEPS + 15)
    # The consistency check says the same, by its own means.
    report = await graph_consistency_report(connection, world.apply)
    assert attrs.evolve(report, adopted=0).clean
