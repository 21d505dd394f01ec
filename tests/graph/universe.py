"""Random derivations for tests of the graph: what they need, what they make, what their NARs refer to."""

from __future__ import annotations

import random
from collections.abc import Iterable

import attrs

from gradient.model import DiscoveredDerivation, OutputPath
from tests.graph.world import derivation, out


@attrs.frozen
class Universe:
    """Derivations by name: some have two outputs, two make one path, some outputs refer to themselves."""

    inputs: dict[str, tuple[str, ...]]
    outputs: dict[str, tuple[OutputPath, ...]]
    references: dict[str, tuple[str, ...]]  # by output path

    @classmethod
    def of(cls, dice: random.Random, size: int) -> Universe:
        names = [f"n{i}" for i in range(size)]
        inputs = {
            name: tuple(dice.sample(names[:i], min(i, dice.choice((0, 1, 1, 2, 3)))))
            for i, name in enumerate(names)
        }
        outputs = {name: (OutputPath("out", out(name)),) for name in names}
        # Two derivations that make one path, as fixed outputs do; others have two outputs.
        one, other, *several = dice.sample(names, 4)
        outputs[other] = outputs[one]
        for name in several:
            outputs[name] += (OutputPath("dev", out(name, "dev")),)
        paths = [output.path for name in names for output in outputs[name]]
        references = {}
        for i, name in enumerate(names):
            below = [o.path for lower in names[:i] for o in outputs[lower]]
            for output in outputs[name]:
                refs = dice.sample(below, min(len(below), dice.choice((0, 0, 1, 2))))
                references[output.path] = (*refs, *dice.choices([output.path], k=dice.choice((0, 1))))
        assert set(references) == set(paths)
        universe = cls(inputs, outputs, references)
        # A fixed output refers to nothing, and only what had it among its inputs refers to it.
        shared = outputs[one][0].path
        references[shared] = ()
        for name in names:
            if not {one, other} & set(universe.closure([name])):
                for output in outputs[name]:
                    references[output.path] = tuple(r for r in references[output.path] if r != shared)
        return universe

    def record(self, name: str) -> DiscoveredDerivation:
        return derivation(name, self.inputs[name], outputs=self.outputs[name])

    def closure(self, tops: Iterable[str]) -> list[str]:
        found: list[str] = []
        due = list(tops)
        while due:
            name = due.pop()
            if name not in found:
                found.append(name)
                due += self.inputs[name]
        return found
