"""A small world for graph tests: derivations by letter, messages applied as the writer applies them.

`check()` recounts every column from scratch and compares: it is what each test ends with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from gradient.graph.assignments import ClaimBuild, ClaimEvaluation
from gradient.graph.build_failures import BuildFailed
from gradient.graph.builds import BuildCompleted, BuildStarted
from gradient.graph.evaluation_build import AbortBuild, Aborted, Retried, RetryBuild
from gradient.graph.evaluation_end import AbortEvaluation, finish_evaluations
from gradient.graph.evaluation_reports import EvalStreamCompleted, EvaluationPhase
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.failure import RetryLimits
from gradient.graph.moves import Moves
from gradient.graph.nar import CommitNars, Signed
from gradient.graph.pg import Connection
from gradient.graph.record import Record
from gradient.graph.transaction import Message, graph_transaction
from gradient.model import (
    BuildStatus,
    DiscoveredDerivation,
    EntryPoint,
    EvaluationStatus,
    FailureKind,
    NarRecord,
    OutputPath,
    Repository,
)
from gradient.nix import base32
from gradient.nix.store_path import StorePath

T = TypeVar("T")
START = datetime(2026, 1, 1, tzinfo=UTC)
WORKER = UUID(int=1)
LIMITS = RetryLimits()


def hash_part(text: str) -> str:
    """A legal hash part that stands for `text`."""
    return base32.encode(hashlib.sha256(text.encode()).digest()[:20])


def drv(name: str) -> str:
    """The `.drv` path of the derivation called `name`."""
    return f"/nix/store/{hash_part(name + '.drv')}-{name}.drv"


def out(name: str, output: str = "out") -> str:
    """The path of one of its outputs."""
    suffix = "" if output == "out" else f"-{output}"
    return f"/nix/store/{hash_part(name + suffix)}-{name}{suffix}"


def derivation(name: str, inputs: Iterable[str] = (), **facts: Any) -> DiscoveredDerivation:
    """A walked derivation with one output."""
    facts = {"architecture": "x86_64-linux", **facts}
    outputs = facts.pop("outputs", (OutputPath("out", out(name)),))
    return DiscoveredDerivation(drv(name), outputs, tuple(map(drv, inputs)), (), **facts)


def nar(path: str, references: Iterable[str] = ()) -> Signed:
    """A committed NAR with these references (full paths)."""
    refs = tuple(reference.removeprefix("/nix/store/") for reference in references)
    record = NarRecord(path, "sha256:" + "0" * 52, 120, "sha256:" + "1" * 52, 100, refs)
    return Signed(record, "key:signature")


class World:
    """Messages in, status out; time moves one second a message."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.now = START
        self.moves = Moves()
        self.open: dict[str, int] = {}

    async def setup(self) -> None:
        await self.connection.execute("INSERT INTO project (name, created_at) VALUES ('main', now())")
        await self.connection.execute("INSERT INTO cache (name, created_at) VALUES ('main', now())")

    async def apply(self, message: Message[T]) -> T:
        self.now += timedelta(seconds=1)
        async with graph_transaction(self.connection, self.now) as tx:
            answer = await message.apply(tx)
            await finish_evaluations(tx)
        self.moves = tx.moves
        return answer

    async def evaluation(self) -> int:
        """A new evaluation that is evaluating on a worker."""
        evaluation = await self.apply(CreateEvaluation("main", Repository("git+https://example.org/x")))
        await self.start_evaluation(evaluation)
        return evaluation

    async def start_evaluation(self, evaluation: int) -> None:
        assignment = await self.apply(ClaimEvaluation(evaluation, WORKER, "w"))
        assert assignment is not None
        self.open[f"eval:{evaluation}"] = assignment
        assert await self.apply(EvaluationPhase(assignment, EvaluationStatus.EVALUATING_DERIVATION))

    async def record(
        self, evaluation: int, graph: Mapping[str, Iterable[str]], entries: Iterable[str] = (), **facts: Any
    ) -> None:
        """Record `graph` (name -> input names) in one batch, and the `.drv` NARs before it."""
        await self.commit(*(nar(drv(name)) for name in graph))
        derivations = tuple(derivation(name, inputs, **facts) for name, inputs in graph.items())
        points = tuple(EntryPoint(name, drv(name)) for name in entries)
        await self.apply(Record(evaluation, derivations, points))

    async def end_stream(self, evaluation: int) -> None:
        await self.apply(EvalStreamCompleted(self.open.pop(f"eval:{evaluation}")))

    async def building(self, graph: Mapping[str, Iterable[str]], *entries: str) -> int:
        """An evaluation of `graph` whose stream has ended."""
        evaluation = await self.evaluation()
        await self.record(evaluation, graph, entries=entries)
        await self.end_stream(evaluation)
        return evaluation

    async def commit(self, *nars: Signed) -> None:
        await self.apply(CommitNars(1, nars))

    async def claim(self, name: str) -> int | None:
        assignment = await self.apply(ClaimBuild(await self.id(name), False, WORKER, "w"))
        if assignment is not None:
            self.open[name] = assignment
        return assignment

    async def start(self, name: str) -> None:
        assert await self.claim(name) is not None, f"{name} could not be claimed: {await self.status(name)}"
        assert await self.apply(BuildStarted(self.open[name]))

    async def build(self, name: str, references: Iterable[str] = ()) -> None:
        """Claim, build, upload, complete."""
        await self.start(name)
        await self.commit(nar(out(name), map(out, references)))
        await self.complete(name)

    async def complete(self, name: str) -> None:
        """The job of a build whose outputs are committed ends."""
        assert await self.apply(BuildCompleted(self.open.pop(name), LIMITS))

    async def fail(
        self, name: str, kind: FailureKind = FailureKind.PERMANENT, missing: Iterable[str] = ()
    ) -> None:
        """Claim and fail, for want of the paths `missing`."""
        await self.start(name)
        parts = tuple(StorePath.parse(path).hash_part for path in missing)
        message = BuildFailed(self.open.pop(name), kind, "it broke", LIMITS, missing_paths=parts)
        await self.apply(message)

    async def abort_build(self, name: str, evaluation: int | None = None) -> Aborted:
        return await self.apply(AbortBuild(await self.id(name), evaluation, "a person"))

    async def retry_build(self, name: str, evaluation: int | None = None) -> Retried:
        return await self.apply(RetryBuild(await self.id(name), evaluation, "a person"))

    async def abort(self, evaluation: int) -> None:
        """Abort an evaluation that runs: nothing goes on that it names and no live one asks for."""
        assert await self.apply(AbortEvaluation(evaluation, "by a person"))
        cursor = await self.connection.execute(GOES_ON, (evaluation,))
        assert await cursor.fetchall() == []

    async def confirm_abort(self, name: str) -> None:
        """The worker has stopped it."""
        await self.apply(BuildFailed(self.open.pop(name), FailureKind.ABORTED, "aborted", LIMITS))

    async def id(self, name: str) -> int:
        return int(await self.value("SELECT id FROM derivation WHERE hash = %s", hash_part(name + ".drv")))

    async def status(self, name: str) -> BuildStatus:
        query = "SELECT status FROM derivation_build WHERE derivation = %s"
        return BuildStatus(await self.value(query, await self.id(name)))

    async def statuses(self) -> dict[str, BuildStatus]:
        cursor = await self.connection.execute(
            "SELECT d.name, b.status FROM derivation d JOIN derivation_build b ON b.derivation = d.id"
        )
        return {name: BuildStatus(status) for name, status in await cursor.fetchall()}

    async def evaluation_status(self, evaluation: int) -> EvaluationStatus:
        query = "SELECT status FROM evaluation WHERE id = %s"
        return EvaluationStatus(await self.value(query, evaluation))

    async def value(self, query: str, *params: Any) -> Any:
        cursor = await self.connection.execute(query, params)
        row = await cursor.fetchone()
        return None if row is None else row[0]

    async def picture(self) -> str:
        """Every shared build with what keeps it where it is: for a test that failed."""
        cursor = await self.connection.execute(PICTURE)
        return "\n".join(" ".join(map(str, row)) for row in await cursor.fetchall())

    async def check(self) -> None:
        """Every maintained column equals its recount; the queue invariants hold."""
        for what, query in RECOUNTS.items():
            cursor = await self.connection.execute(query)
            wrong = await cursor.fetchall()
            assert wrong == [], f"{what}: {wrong}"


_PRESENT = """(EXISTS (SELECT FROM derivation_output o WHERE o.derivation = {0})
    AND NOT EXISTS (SELECT FROM derivation_output o WHERE o.derivation = {0} AND NOT o.is_cached))"""
_COMPLETE = "({0}.missing_runtime_deps = 0 AND " + _PRESENT.format("{0}.derivation") + ")"
_OPEN = "(NOT {0}.fetchable AND {0}.status NOT IN (4, 6, 9))"
_BUILDER = "({1}.walked AND {0}.probed AND NOT {0}.cache_available AND {0}.status IN (0, 1, 2, 8))"
# What the entry points of some evaluations (`v`) want.
_WANTED_BY = f"""
    WITH RECURSIVE reached (id) AS (
        SELECT t.derivation FROM entry_point t JOIN evaluation v ON v.id = t.evaluation
        LEFT JOIN build_job j ON j.evaluation = t.evaluation AND j.derivation = t.derivation
        JOIN derivation_build b ON b.derivation = t.derivation
        WHERE {{0}} AND NOT coalesce(j.aborted, false) AND {_OPEN.format("b")}
      UNION
        SELECT e.dependency FROM reached r
        JOIN derivation_build x ON x.derivation = r.id JOIN derivation xd ON xd.id = r.id
        JOIN derivation_dependency e ON e.derivation = r.id
        JOIN derivation_build b ON b.derivation = e.dependency AND {_OPEN.format("b")}
        WHERE e.kind IN (1, 2) OR {_BUILDER.format("x", "xd")}
    )
"""

# Counters of evaluations, with what is not folded yet.
COUNTERS = """
    SELECT v.id, v.status, v.named_shared_builds + coalesce(sum(l.named), 0),
           v.active_shared_builds + coalesce(sum(l.active), 0),
           v.failed_shared_builds + coalesce(sum(l.failed), 0),
           v.queued_shared_builds + coalesce(sum(l.queued), 0),
           v.building_shared_builds + coalesce(sum(l.building), 0)
    FROM evaluation v LEFT JOIN evaluation_shared_build_delta l ON l.evaluation = v.id
    GROUP BY v.id ORDER BY v.id
"""
PICTURE = """
    SELECT d.name, b.status, CASE WHEN b.wanted THEN 'wanted' ELSE '-' END,
           CASE WHEN b.fetchable THEN 'fetchable' ELSE '-' END,
           'blocking', b.blocking_deps, 'missing', b.missing_runtime_deps,
           CASE WHEN d.walked THEN 'walked' ELSE 'stub' END,
           'drv', EXISTS (SELECT FROM cached_path p WHERE p.hash = d.hash),
           'outputs', ARRAY(SELECT o.is_cached FROM derivation_output o WHERE o.derivation = d.id),
           'below', ARRAY(SELECT i.name || ':' || e.kind FROM derivation_dependency e
                          JOIN derivation i ON i.id = e.dependency WHERE e.derivation = d.id),
           'named', ARRAY(SELECT j.evaluation FROM build_job j WHERE j.derivation = d.id),
           'entry', ARRAY(SELECT t.evaluation FROM entry_point t WHERE t.derivation = d.id)
    FROM derivation d JOIN derivation_build b ON b.derivation = d.id ORDER BY d.name
"""

# Name of the column -> a query for rows (name, stored, recounted) where the two differ. Written out
# afresh, from the seed's words and not from `predicates`: a mistake there must show here.
RECOUNTS = {
    "unwalked_inputs": """
        WITH RECURSIVE incomplete (id) AS (
            SELECT id FROM derivation WHERE NOT walked
          UNION SELECT e.derivation FROM incomplete i JOIN derivation_dependency e ON e.dependency = i.id
                WHERE e.kind IN (0, 2)
        )
        SELECT d.name, d.unwalked_inputs, n FROM derivation d, LATERAL (
            SELECT count(*) AS n FROM derivation_dependency e JOIN incomplete i ON i.id = e.dependency
            WHERE e.derivation = d.id AND e.kind IN (0, 2)) c
        WHERE d.unwalked_inputs <> n
    """,
    "missing_runtime_deps": f"""
        WITH RECURSIVE incomplete (id) AS (
            SELECT b.derivation FROM derivation_build b WHERE NOT {_PRESENT.format("b.derivation")}
          UNION SELECT e.derivation FROM incomplete i JOIN derivation_dependency e ON e.dependency = i.id
                WHERE e.kind IN (1, 2)
        )
        SELECT b.derivation, b.missing_runtime_deps, n FROM derivation_build b, LATERAL (
            SELECT count(*) AS n FROM derivation_dependency e
            WHERE e.derivation = b.derivation AND e.kind IN (1, 2)
              AND (e.dependency IN (SELECT id FROM incomplete)
                   OR NOT EXISTS (SELECT FROM derivation_build x WHERE x.derivation = e.dependency))) c
        WHERE b.missing_runtime_deps <> n
    """,
    "fetchable": f"""
        SELECT derivation, fetchable FROM derivation_build b
        WHERE fetchable <> (status IN (3, 7) AND {_COMPLETE.format("b")})
    """,
    "blocking_deps": """
        SELECT b.derivation, b.blocking_deps, n FROM derivation_build b, LATERAL (
            SELECT count(*) AS n FROM derivation_dependency e
            LEFT JOIN derivation_build x ON x.derivation = e.dependency
            WHERE e.derivation = b.derivation AND NOT coalesce(x.fetchable, false)) c
        WHERE b.blocking_deps <> n
    """,
    "wanted": f"""
        {_WANTED_BY.format("v.status <> 7")}
        SELECT d.name, b.wanted, b.status FROM derivation_build b JOIN derivation d ON d.id = b.derivation
        WHERE {_OPEN.format("b")} AND b.wanted <> (b.derivation IN (SELECT id FROM reached))
    """,
    "queued without its conditions": """
        SELECT d.name FROM derivation_build b JOIN derivation d ON d.id = b.derivation
        WHERE b.status = 1
          AND NOT EXISTS (SELECT FROM dispatched_job q WHERE q.derivation = d.id AND q.finished_at IS NULL)
          AND NOT (d.walked AND b.wanted AND EXISTS (SELECT FROM build_job j WHERE j.derivation = d.id)
                   AND (b.cache_available OR (b.probed AND b.blocking_deps = 0 AND EXISTS (
                        SELECT FROM cached_path p WHERE p.hash = d.hash AND p.file_hash IS NOT NULL))))
    """,
    "startable and not queued": """
        SELECT d.name FROM derivation_build b JOIN derivation d ON d.id = b.derivation
        WHERE b.status = 0 AND d.walked AND b.wanted
          AND EXISTS (SELECT FROM build_job j WHERE j.derivation = d.id)
          AND (b.cache_available OR (b.probed AND b.blocking_deps = 0 AND EXISTS (
               SELECT FROM cached_path p WHERE p.hash = d.hash AND p.file_hash IS NOT NULL)))
    """,
    "created and not wanted": """
        SELECT derivation FROM derivation_build b WHERE status = 0 AND NOT wanted
    """,
    "waiting though its closure is in the cache": f"""
        SELECT derivation FROM derivation_build b WHERE status IN (0, 1, 8, 10) AND {_COMPLETE.format("b")}
          AND NOT EXISTS (SELECT FROM dispatched_job q
                          WHERE q.derivation = b.derivation AND q.finished_at IS NULL)
    """,
    # But for what a person aborted, until a live evaluation asks for it again.
    "aborted or skipped, yet wanted": """
        SELECT derivation FROM derivation_build b WHERE wanted AND (status = 10 OR (status = 5 AND NOT (
            EXISTS (SELECT FROM build_job j WHERE j.derivation = b.derivation AND j.aborted)
            AND NOT EXISTS (SELECT FROM build_job j JOIN evaluation v ON v.id = j.evaluation
                            WHERE j.derivation = b.derivation AND NOT j.aborted
                              AND v.status IN (0, 1, 2, 3, 4, 8)))))
    """,
    "building without one open assignment": """
        SELECT derivation FROM derivation_build b WHERE status = 2 AND 1 <> (
            SELECT count(*) FROM dispatched_job q WHERE q.derivation = b.derivation AND q.finished_at IS NULL)
    """,
    "attempt running without an open assignment": """
        SELECT a.id FROM build_attempt a WHERE a.outcome = 0 AND NOT EXISTS (
            SELECT FROM dispatched_job q WHERE q.id = a.dispatched_job AND q.finished_at IS NULL)
    """,
    "evaluation counters": """
        SELECT v.id, stored, recount FROM evaluation v, LATERAL (
            SELECT ARRAY[v.named_shared_builds + coalesce(sum(named), 0),
                         v.active_shared_builds + coalesce(sum(active), 0),
                         v.failed_shared_builds + coalesce(sum(failed), 0),
                         v.queued_shared_builds + coalesce(sum(queued), 0),
                         v.building_shared_builds + coalesce(sum(building), 0)] AS stored
            FROM evaluation_shared_build_delta l WHERE l.evaluation = v.id) s, LATERAL (
            SELECT ARRAY[count(*), count(*) FILTER (WHERE (b.status IN (0, 1, 2, 8, 10) AND b.wanted)
                                                    OR b.status IN (1, 2)),
                         count(*) FILTER (WHERE b.status IN (4, 5, 6, 9)),
                         count(*) FILTER (WHERE b.status = 1),
                         count(*) FILTER (WHERE b.status = 2)] AS recount
            FROM build_job j JOIN derivation_build b ON b.derivation = j.derivation
            WHERE j.evaluation = v.id) r
        WHERE v.status IN (0, 1, 2, 3, 4, 8) AND stored <> recount
    """,
    "not finished": """
        SELECT v.id FROM evaluation v
        WHERE v.status IN (3, 4) AND v.building_started_at IS NOT NULL AND NOT EXISTS (
            SELECT FROM build_job j JOIN derivation_build b ON b.derivation = j.derivation
            WHERE j.evaluation = v.id AND ((b.status IN (0, 1, 2, 8, 10) AND b.wanted) OR b.status IN (1, 2)))
    """,
}
# Of what an evaluation names that was aborted a moment ago: what goes on, though no live one asks for it.
GOES_ON = f"""
    {_WANTED_BY.format("v.status IN (0, 1, 2, 3, 4, 8)")}
    SELECT d.name FROM build_job own JOIN derivation_build b ON b.derivation = own.derivation
    JOIN derivation d ON d.id = b.derivation
    WHERE own.evaluation = %s AND b.status IN (0, 1, 2) AND b.derivation NOT IN (SELECT id FROM reached)
      AND NOT EXISTS (SELECT FROM build_job j JOIN evaluation v ON v.id = j.evaluation
                      WHERE j.derivation = b.derivation AND NOT j.aborted AND v.status IN (0, 1, 2, 3, 4, 8))
"""
