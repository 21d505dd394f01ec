"""`graph.abort_10k_s`: the abort of an evaluation of 10,000 builds, half of them shared with a live one.

Among its details, without a limit, that of one whose builds an ended one wants too, all of them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from bench.graph.database import Cluster, on_cluster
from bench.graph.evaluation import serving
from bench.graph.population import State, populate, write_untriggered
from bench.harness import Figure, Options, Result, say
from bench.product import BenchFailed
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.pg import Connection, fetch_all
from gradient.model import BuildStatus, EvaluationStatus
from tests.graph.world import World

LIMIT: Final = 2.0
BUILDS: Final = 10_000
SHARED: Final = BUILDS // 2


def _another(status: EvaluationStatus, shared: int) -> tuple[str, ...]:
    """Another evaluation of the first builds of a block, which need nothing of the others."""
    return (
        f"""
        INSERT INTO evaluation (id, project, status, repository, concurrent, named_shared_builds,
            active_shared_builds, queued_shared_builds, created_at, updated_at, building_started_at)
        OVERRIDING SYSTEM VALUE
        SELECT %(evaluation)s + 1, project, {status:d}, repository, true, {shared}, {shared}, 1, now(), now(),
               now()
        FROM evaluation WHERE id = %(evaluation)s
        """,
        f"""
        INSERT INTO build_job (evaluation, derivation, created_at)
        SELECT %(evaluation)s + 1, derivation, now() FROM build_job WHERE derivation < %(first)s + {shared}
        """,
        f"""
        INSERT INTO entry_point (evaluation, eval, derivation)
        SELECT %(evaluation)s + 1, 'packages.p' || derivation, derivation FROM build_job j
        WHERE evaluation = %(evaluation)s AND derivation < %(first)s + {shared} AND NOT EXISTS (
            SELECT FROM derivation_dependency e
            WHERE e.dependency = j.derivation AND e.derivation < %(first)s + {shared})
        """,
    )


async def abort(cluster: Cluster, status: EvaluationStatus, shared: int, aborted: int) -> float:
    """The seconds until the writer has answered, beside another evaluation in that status; so many of the
    builds are to be stopped."""
    url = await cluster.fresh()
    async with await Connection.connect(url) as connection:
        written = await populate(connection, BUILDS, State.WAITING)
        evaluation = written.evaluations[0]
        parameters = {"evaluation": evaluation, "first": written.derivations[0]}
        await write_untriggered(connection, _another(status, shared), parameters)
        world = World(connection)
        await world.check()
        async with serving(url) as server:
            start = time.perf_counter()
            await server.writer.submit(AbortEvaluation(evaluation, "aborted by the user"))
            seconds = time.perf_counter() - start
        await world.check()
        rows = dict(await fetch_all(connection, "SELECT status, count(*) FROM derivation_build GROUP BY 1"))
    if rows.get(BuildStatus.ABORTED) != aborted:
        raise BenchFailed(f"builds by status: {rows}")
    return seconds


def run(name: str, folder: Path, options: Options) -> Result:
    async def measure(cluster: Cluster) -> tuple[float, float]:
        say("beside a live one")
        live = await abort(cluster, EvaluationStatus.BUILDING, SHARED, BUILDS - SHARED)
        say("beside an ended one")
        return live, await abort(cluster, EvaluationStatus.COMPLETED, BUILDS, BUILDS)

    seconds, beside_ended = on_cluster(folder, measure)
    return Result(
        name,
        round(seconds, 3),
        "s",
        limit=f"at most {LIMIT} s",
        kept=seconds <= LIMIT,
        details={"builds": BUILDS, "shared": SHARED, "beside_ended_s": round(beside_ended, 3)},
    )


METRIC: Final = Figure("graph.abort_10k_s", run)
