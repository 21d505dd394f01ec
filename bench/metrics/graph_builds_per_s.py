"""`graph.builds_per_s`: a package set built in the order of its dependencies, by 32 callers at once.

Each caller claims what was queued, commits the NAR of every output, stores the build output and completes
the build: each a message of its own to the graph writer, and the next one after its reply.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.graph.database import Cluster, on_cluster
from bench.graph.evaluation import built, reported, serving
from bench.graph.shape import load
from bench.harness import Figure, Options, Result, say

LIMIT: Final = 800.0


def run(name: str, folder: Path, options: Options) -> Result:
    graph = load(options.graph)

    async def measure(cluster: Cluster) -> float:
        async with serving(await cluster.fresh()) as server:
            say("it is reported")
            await reported(server, graph)
            say("it is built")
            return await built(server, graph)

    seconds = on_cluster(folder, measure)
    rate = len(graph.derivations) / seconds
    return Result(
        name,
        round(rate, 1),
        "builds/s",
        limit=f"at least {LIMIT:.0f}",
        kept=rate >= LIMIT,
        details={"derivations": len(graph.derivations), "seconds": round(seconds, 2)},
    )


METRIC: Final = Figure("graph.builds_per_s", run)
