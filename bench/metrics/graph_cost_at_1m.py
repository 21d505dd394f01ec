"""`graph.cost_at_1m`: what a build costs with a million other derivations in the database.

Against the same builds, made as for `graph.builds_per_s`, in a database without them: the median of pairs.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Final

from bench.graph.database import Cluster, on_cluster
from bench.graph.evaluation import built, reported, serving
from bench.graph.population import State, populate
from bench.graph.shape import Graph, load
from bench.harness import Figure, Options, Result, say
from gradient.graph.pg import Connection

LIMIT: Final = 1.5
PAIRS: Final = 3
OTHERS: Final = 1_000_000
# Of others, those whose evaluations still run.
WAITING: Final = 100_000


async def seconds_for(url: str, graph: Graph) -> float:
    """The seconds that the builds of a graph take in a database."""
    async with serving(url) as server:
        await reported(server, graph)
        return await built(server, graph)


async def crowd(cluster: Cluster) -> str:
    """The URL of a database that has the others."""
    url = await cluster.fresh()
    async with await Connection.connect(url) as connection:
        await populate(connection, OTHERS - WAITING, State.DONE)
        await populate(connection, WAITING, State.WAITING)
    return url


def run(name: str, folder: Path, options: Options) -> Result:
    graph = load(options.graph)

    async def measure(cluster: Cluster) -> list[tuple[float, float]]:
        say(f"{OTHERS:,} others are written")
        others = await crowd(cluster)
        pairs = []
        for number in range(1, PAIRS + 1):
            say(f"pair {number} of {PAIRS}: the builds alone, and among the others")
            # Copied before either is measured: a copy ends with a checkpoint, and leaves no vacuum to do.
            among, alone = await cluster.copy(others), await cluster.fresh()
            pairs.append((await seconds_for(alone, graph), await seconds_for(among, graph)))
            await cluster.drop(among)
        return pairs

    pairs = on_cluster(folder, measure)
    count = len(graph.derivations)
    ratio = median(among / alone for alone, among in pairs)
    return Result(
        name,
        round(median(among for _, among in pairs) / count * 1000, 3),
        "ms/build",
        "the same builds in a database without other derivations",
        round(median(alone for alone, _ in pairs) / count * 1000, 3),
        round(ratio, 3),
        f"at most {LIMIT} times the baseline",
        ratio <= LIMIT,
        {"others": OTHERS, "ratios": [round(among / alone, 3) for alone, among in pairs]},
    )


METRIC: Final = Figure("graph.cost_at_1m", run, scale=True)
