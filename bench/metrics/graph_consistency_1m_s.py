"""`graph.consistency_1m_s`: the consistency check on 1,000,000 derivations, while builds go on beside it.

A tenth of them is wanted by running evaluations, and some columns have drifted. The same on half as many says
how the time grows; and nobody holds row locks for long: what is measured is how long transactions go on,
those of the check's messages by themselves, and those of anybody: imports of thousands of derivations too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Generic, TypeVar

import attrs
import trio

from bench.graph.database import Cluster, on_cluster
from bench.graph.evaluation import Server, reported, serving
from bench.graph.population import State, populate
from bench.graph.shape import made_up
from bench.harness import Figure, Options, Result, say
from bench.product import BenchFailed
from gradient.graph.consistency import graph_consistency_report
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.transaction import Alone, Message, Submit, Transaction

T = TypeVar("T")

LIMIT: Final = 180.0
GROWTH: Final = 2.3
LOCK_LIMIT: Final = 1.0  # seconds
SIZES: Final = (500_000, 1_000_000)
# Builds beside the check: one caller, who waits for every reply.
BESIDE: Final = 2_000
SAMPLE_EVERY: Final = 0.02  # seconds

WRITING: Final = """
    SELECT pid, backend_xid::text FROM pg_stat_activity
    WHERE backend_xid IS NOT NULL AND datname = current_database()
"""
# What the check has to find, on rows that nobody works on.
DRIFT: Final = (
    "UPDATE derivation_build SET blocking_deps = blocking_deps + 1 WHERE derivation %% 1000 = 7",
    "UPDATE derivation SET unwalked_inputs = 1 WHERE id %% 1000 = 11",
    "UPDATE derivation_build SET fetchable = false WHERE derivation %% 1000 = 13 AND fetchable",
)


@attrs.define(eq=False)
class Timed(Alone, Generic[T]):
    """A message of the check, and when it was its turn: it goes alone, so its transaction began then."""

    message: Message[T]
    begun: float = 0.0

    async def apply(self, tx: Transaction) -> T:
        self.begun = time.perf_counter()
        return await self.message.apply(tx)


@attrs.define(eq=False)
class OwnLocks:
    """How long the transactions of the check's messages went on; the longest counts."""

    writer: Submit
    longest: float = 0.0

    async def submit(self, message: Message[T]) -> T:
        timed = Timed(message)
        answer = await self.writer(timed)
        self.longest = max(self.longest, time.perf_counter() - timed.begun)
        return answer


@attrs.define
class AllLocks:
    """How long writing transactions went on, whoever's, as samples saw them; the longest counts."""

    longest: float = 0.0
    _seen: dict[tuple[int, str], float] = attrs.field(factory=dict)

    async def watch(self, url: str) -> None:
        """Look again and again, until cancelled."""
        async with await Connection.connect(url) as connection:
            while True:
                now = time.perf_counter()
                writing = [(pid, xid) for pid, xid in await fetch_all(connection, WRITING)]
                self._seen = {key: self._seen.get(key, now) for key in writing}
                self.longest = max([self.longest, *(now - since for since in self._seen.values())])
                await trio.sleep(SAMPLE_EVERY)


@asynccontextmanager
async def builds_beside(server: Server) -> AsyncIterator[None]:
    """Evaluations of a small package set, reported and built one after the other."""

    async def build() -> None:
        for number in itertools.count():
            graph = made_up(BESIDE, f"beside{number}-")
            await reported(server, graph)
            await server.build(graph, 1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(build)
        yield
        nursery.cancel_scope.cancel()


async def check(cluster: Cluster, size: int) -> tuple[float, float, float]:
    """The seconds of the check, of the longest transaction of its messages, and of anybody's meanwhile."""
    url = await cluster.fresh()
    locks = AllLocks()
    async with await Connection.connect(url) as connection:
        say(f"{size:,} derivations are written")
        await populate(connection, size // 10 * 9, State.DONE)
        await populate(connection, size // 10, State.WAITING)
        for statement in DRIFT:
            await connection.execute(statement.replace("%%", "%").encode())
        await connection.execute("VACUUM ANALYZE")
        # What making the graph up has left to be written would be written beside the check.
        await connection.execute("CHECKPOINT")
        async with serving(url) as server, trio.open_nursery() as nursery:
            nursery.start_soon(locks.watch, url)
            own = OwnLocks(server.writer.submit)
            say("they are checked")
            async with builds_beside(server):
                start = time.perf_counter()
                found = await graph_consistency_report(connection, own.submit)
                seconds = time.perf_counter() - start
            nursery.cancel_scope.cancel()
            if found.clean:
                raise BenchFailed("the check found nothing of what had drifted")
            say("they are checked again")
            if not (again := await graph_consistency_report(connection, server.writer.submit)).clean:
                raise BenchFailed(f"a second check found {again}")
    return seconds, own.longest, locks.longest


def run(name: str, folder: Path, options: Options) -> Result:
    async def measure(cluster: Cluster) -> list[tuple[float, float, float]]:
        return [await check(cluster, size) for size in SIZES]

    (half, *_), (seconds, own, anybody) = on_cluster(folder, measure)
    return Result(
        name,
        round(seconds, 2),
        "s",
        limit=f"at most {LIMIT:.0f} s and {GROWTH} times that of half, no row locked above {LOCK_LIMIT} s",
        kept=seconds <= LIMIT and seconds <= GROWTH * half and max(own, anybody) <= LOCK_LIMIT,
        details={
            "half_s": round(half, 2),
            "growth": round(seconds / half, 2),
            "lock_s": round(own, 3),
            "longest_beside_s": round(anybody, 3),
        },
    )


METRIC: Final = Figure("graph.consistency_1m_s", run, scale=True)
