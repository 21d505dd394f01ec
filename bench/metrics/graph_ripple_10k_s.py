"""`graph.ripple_10k_s`: the bottom of a chain of 10,000 becomes complete, and all above it: one round trip.

The slower of both transitive spreads, and how it grows: a chain of 20,000 may take 2.2 times as long.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Final

from bench.graph.database import Cluster, on_cluster
from bench.graph.population import write_untriggered
from bench.harness import Figure, Options, Result
from bench.product import BenchFailed
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.runtime_can_start import RIPPLE_MISSING_RUNTIME_DEPS
from gradient.graph.statements import Statement
from gradient.graph.walk_completeness import RIPPLE_UNWALKED_INPUTS
from gradient.model import BuildStatus, EdgeKind

LIMIT: Final = 1.5
GROWTH: Final = 2.2
LENGTH: Final = 10_000
RUNS: Final = 3

# Each refers to the one before it and is complete but for that.
_CHAIN: Final = (
    """
    INSERT INTO derivation (id, hash, name, walked, unwalked_inputs, created_at) OVERRIDING SYSTEM VALUE
    SELECT i, translate(md5('drv' || i), 'e', 'g'), 'c' || i, true, (i > 1)::integer, now()
    FROM generate_series(1, %(last)s::bigint) AS i
    """,
    """
    INSERT INTO derivation_output (derivation, name, hash, package, is_cached)
    SELECT id, 'out', translate(md5('out' || id), 'e', 'g'), name, true FROM derivation
    """,
    f"""
    INSERT INTO derivation_dependency (derivation, dependency, kind)
    SELECT id, id - 1, {EdgeKind.BOTH:d} FROM derivation WHERE id > 1
    """,
    f"""
    INSERT INTO derivation_build (derivation, status, missing_runtime_deps, created_at, updated_at)
    SELECT id, {BuildStatus.COMPLETED:d}, (id > 1)::integer, now(), now() FROM derivation
    """,
)


async def ripple(connection: Connection, statement: Statement, length: int) -> float:
    """The seconds of a spread from the bottom to the top; the way back does not count."""
    start = time.perf_counter()
    flipped = await fetch_all(connection, statement, {"frontier": [1], "direction": -1})
    seconds = time.perf_counter() - start
    if len(flipped) != length - 1:
        raise BenchFailed(f"{statement.name} moved {len(flipped)} of {length - 1}")
    await fetch_all(connection, statement, {"frontier": [1], "direction": 1})
    return seconds


async def chain(cluster: Cluster, length: int) -> float:
    """The median of the slower spread's seconds."""
    async with await Connection.connect(await cluster.fresh()) as connection:
        await write_untriggered(connection, _CHAIN, {"last": length})
        return max(
            [
                median([await ripple(connection, statement, length) for _ in range(RUNS)])
                for statement in (RIPPLE_MISSING_RUNTIME_DEPS, RIPPLE_UNWALKED_INPUTS)
            ]
        )


def run(name: str, folder: Path, options: Options) -> Result:
    async def measure(cluster: Cluster) -> tuple[float, float]:
        return await chain(cluster, LENGTH), await chain(cluster, 2 * LENGTH)

    seconds, twice = on_cluster(folder, measure)
    return Result(
        name,
        round(seconds, 3),
        "s",
        limit=f"at most {LIMIT} s, and {GROWTH} times that for twice the length",
        kept=seconds <= LIMIT and twice <= GROWTH * seconds,
        details={"length": LENGTH, "twice_s": round(twice, 3), "growth": round(twice / seconds, 2)},
    )


METRIC: Final = Figure("graph.ripple_10k_s", run)
