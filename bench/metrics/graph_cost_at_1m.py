"""`graph.cost_at_1m`: what a build costs with a million other derivations in the database.

Against the same builds, made as for `graph.builds_per_s`, in a database without them, in the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.graph.database import Cluster, on_cluster
from bench.graph.evaluation import built, reported, serving
from bench.graph.population import State, populate
from bench.graph.shape import Graph, load
from bench.harness import Figure, Options, Result, say
from gradient.graph.pg import Connection

LIMIT: Final = 1.5
OTHERS: Final = 1_000_000
# Of others, those whose evaluations still run.
WAITING: Final = 100_000


async def seconds_for(url: str, graph: Graph) -> float:
    """The seconds that the builds of a graph take in a database."""
    async with serving(url) as server:
        await reported(server, graph)
        return await built(server, graph)


def run(name: str, folder: Path, options: Options) -> Result:
    graph = load(options.graph)

    async def measure(cluster: Cluster) -> tuple[float, float]:
        say("the builds alone")
        alone = await seconds_for(await cluster.fresh(), graph)
        crowded = await cluster.fresh()
        say(f"{OTHERS:,} others are written")
        async with await Connection.connect(crowded) as connection:
            await populate(connection, OTHERS - WAITING, State.DONE)
            await populate(connection, WAITING, State.WAITING)
        say("the builds among them")
        return alone, await seconds_for(crowded, graph)

    alone, crowded = on_cluster(folder, measure)
    count = len(graph.derivations)
    return Result(
        name,
        round(crowded / count * 1000, 3),
        "ms/build",
        "the same builds in a database without other derivations",
        round(alone / count * 1000, 3),
        round(crowded / alone, 3),
        f"at most {LIMIT} times the baseline",
        crowded <= LIMIT * alone,
        {"others": OTHERS},
    )


METRIC: Final = Figure("graph.cost_at_1m", run, scale=True)
