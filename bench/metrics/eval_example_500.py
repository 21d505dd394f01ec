"""`eval.example_500`: 500 attributes, each a derivation, from creating the evaluation to its status Building.

Server and worker are warm and have their defaults, so builds start while the rest still evaluates, which
`nix eval` does not have to bear. Every run has derivations of its own. What is left to build when the
time is taken is aborted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.harness import Metric, Sides, timed
from bench.layers import GIVEN_NIX, NIX, NIX_OPTIONS, SYSTEM, fresh_copy, in_shell
from bench.product import running
from gradient.model import EvaluationStatus

BASELINE: Final = f'{NIX} eval --json {NIX_OPTIONS} "path:$FLAKE#packages.{SYSTEM}"'


@contextmanager
def prepare(folder: Path) -> Iterator[Sides]:
    with running(folder / "data", GIVEN_NIX) as product:

        def ours() -> float:
            return product.evaluate(fresh_copy(folder), EvaluationStatus.BUILDING)

        def theirs() -> float:
            flake = fresh_copy(folder)
            return timed(lambda: in_shell(BASELINE, FLAKE=flake))

        yield Sides(ours, theirs, BASELINE)


METRIC: Final = Metric("eval.example_500", prepare)
