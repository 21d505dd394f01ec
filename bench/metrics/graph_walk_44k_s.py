"""`graph.walk_44k_s`: the open-closure walk from the entry points of an evaluation of 44,000 derivations.

None of them is wanted yet: the statement is the one with which the graph writer finds out that all are.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Final

from bench.graph.database import Cluster, on_cluster
from bench.graph.population import State, populate
from bench.harness import Figure, Options, Result
from bench.product import BenchFailed
from gradient.graph.need import READ_GAINED_NEED
from gradient.graph.pg import Connection, fetch_all

LIMIT: Final = 1.0
NODES: Final = 44_000
RUNS: Final = 5


async def walk(cluster: Cluster) -> float:
    """The median of the seconds."""
    async with await Connection.connect(await cluster.fresh()) as connection:
        await populate(connection, NODES, State.RECORDED, size=NODES)
        roots = [row[0] for row in await fetch_all(connection, "SELECT derivation FROM entry_point")]
        seconds = []
        for _ in range(RUNS):
            start = time.perf_counter()
            reached = await fetch_all(connection, READ_GAINED_NEED, {"roots": roots})
            seconds.append(time.perf_counter() - start)
            if len(reached) != NODES:
                raise BenchFailed(f"the walk reached {len(reached)} derivations of {NODES}")
        return median(seconds)


def run(name: str, folder: Path, options: Options) -> Result:
    seconds = on_cluster(folder, walk)
    return Result(
        name,
        round(seconds, 3),
        "s",
        limit=f"at most {LIMIT} s",
        kept=seconds <= LIMIT,
        details={"nodes": NODES},
    )


METRIC: Final = Figure("graph.walk_44k_s", run)
