"""`graph.import`: a package set reported in batches of 50 through a session's report queue.

Against a plain COPY of the rows that came of it into the same tables, in a database that holds the same
evaluation and the same NARs of `.drv` files before. After ours, every maintained column is recounted.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Final

from bench.graph.database import Cluster, on_cluster
from bench.graph.evaluation import serving
from bench.graph.plain_copy import copied_in, copied_out
from bench.graph.shape import Graph, load
from bench.harness import Figure, Options, Result, say
from gradient.graph.pg import Connection
from tests.graph.world import World

LIMIT: Final = 4.0
PAIRS: Final = 3


async def pair(cluster: Cluster, graph: Graph) -> tuple[float, float]:
    """The seconds of the import and of the COPY, each into a database of its own."""
    ours, theirs = await cluster.fresh(), await cluster.fresh()
    for url in (ours, theirs):
        async with serving(url) as server:
            await server.upload_derivations(graph)
            job = await server.begin()
            if url == ours:
                imported = await server.report(job, graph)
    async with await Connection.connect(ours) as connection:
        await World(connection).check()
    return imported, await copied_in(theirs, await copied_out(ours))


def run(name: str, folder: Path, options: Options) -> Result:
    graph = load(options.graph)

    async def measure(cluster: Cluster) -> list[tuple[float, float]]:
        pairs = []
        for number in range(1, PAIRS + 1):
            say(f"pair {number} of {PAIRS}")
            pairs.append(await pair(cluster, graph))
        return pairs

    pairs = on_cluster(folder, measure)
    ratio = median(ours / theirs for ours, theirs in pairs)
    return Result(
        name,
        round(median(ours for ours, _ in pairs), 3),
        "s",
        "COPY of the same rows into the same tables, with their indexes, keys and triggers",
        round(median(theirs for _, theirs in pairs), 3),
        round(ratio, 3),
        f"at most {LIMIT} times the baseline",
        ratio <= LIMIT,
        {"derivations": len(graph.derivations)},
    )


METRIC: Final = Figure("graph.import", run)
