"""`build.example_500`: 500 derivations evaluated, built and put into an empty cache.

Ours is the whole job with a fresh data directory, database included, from creating the evaluation of all
500 attributes until it is Completed, `build.maxConcurrent` its default: the cores. Theirs is asked for the
top layer only, which needs all the others: to evaluate 500 arguments one by one would cost Nix seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.harness import Metric, Sides, timed
from bench.layers import GIVEN_NIX, LAYERS, NIX, NIX_OPTIONS, SYSTEM, WIDTH, fresh_copy, in_shell
from bench.product import running
from gradient.model import EvaluationStatus

BASELINE: Final = (
    f'TOP=$(printf "path:$FLAKE#packages.{SYSTEM}.layer{LAYERS - 1}-%s " $(seq 0 {WIDTH - 1}));'
    f" {NIX} build -j$(nproc) --no-link {NIX_OPTIONS} $TOP"
    f' && {NIX} copy --to "file://$CACHE?compression=zstd" {NIX_OPTIONS} $TOP'
)


@contextmanager
def prepare(folder: Path) -> Iterator[Sides]:
    numbers = itertools.count()

    def ours() -> float:
        with running(folder / f"data-{next(numbers)}", GIVEN_NIX) as product:
            return product.evaluate(fresh_copy(folder), EvaluationStatus.COMPLETED)

    def theirs() -> float:
        flake = fresh_copy(folder)
        return timed(lambda: in_shell(BASELINE, FLAKE=flake, CACHE=folder / f"cache-{next(numbers)}"))

    yield Sides(ours, theirs, BASELINE)


METRIC: Final = Metric("build.example_500", prepare)
