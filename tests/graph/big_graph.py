"""A database of any size for the plan gate: revisions of one package set, the newest of them half built.

Set-based SQL, the same rows on every run. Everything that is alive (pending builds, running evaluations, open
assignments) belongs to the first revision; the others are history, of the same shape. So two sizes differ in
their history alone: what a statement has to touch for one input is the same in both, and what costs more in
the larger one grows with the table.
"""

from __future__ import annotations

from typing import Final

import attrs

from gradient.graph.pg import Connection, execute, fetch_all
from gradient.graph.predicates import any_of
from gradient.model import (
    TERMINAL_SUCCESS,
    AttemptOutcome,
    BuildStatus,
    DispatchOutcome,
    EdgeKind,
    EvaluationStatus,
    JobKind,
)

# Derivations of one revision, and dependencies drawn for each: a few fall on one row, so six are left.
REVISION: Final = 12_500
DRAWS: Final = 7
# Evaluations of one revision: two name its upper half, the others a few builds each.
EVALUATIONS: Final = 22
# Below this position nothing has inputs; up to BUILT the first revision is done.
SOURCES: Final = REVISION * 8 // 100
BUILT: Final = REVISION * 60 // 100
NAMED: Final = REVISION * 50 // 100
TOP: Final = REVISION * 90 // 100

S = BuildStatus
E = EvaluationStatus


@attrs.frozen
class Size:
    """So many revisions; of the first ones much is alive, the others are history."""

    revisions: int
    alive: int = 1

    @property
    def derivations(self) -> int:
        return self.revisions * REVISION


def _position(i: str) -> str:
    return f"(({i} - 1) % {REVISION})"


def _revision(i: str) -> str:
    return f"(({i} - 1) / {REVISION})"


def _dice(*parts: str) -> str:
    """A number from 0 to 1 that depends on these small numbers alone."""
    mixed = "0"
    for part in parts:
        mixed = f"({mixed}) * 31 + ({part})::bigint"
    return f"((hashint8({mixed}) & 1048575) / 1048576.0)"


# --- the rows, table by table ---------------------------------------------------------------------

_STATUS_OF_HISTORY: Final = f"""
    CASE WHEN p % 50 = 17 THEN {int(S.FAILED_PERMANENT)} WHEN p % 50 = 18 THEN {int(S.DEPENDENCY_FAILED)}
         WHEN p % 20 = 19 THEN {int(S.SKIPPED)} WHEN p % 11 = 0 THEN {int(S.SUBSTITUTED)}
         ELSE {int(S.COMPLETED)} END
"""
_STATUS_OF_TODAY: Final = f"""
    CASE WHEN p < {BUILT} THEN {int(S.COMPLETED)} WHEN p % 200 = 18 THEN {int(S.FAILED_PERMANENT)}
         WHEN p % 20 = 18 THEN {int(S.DEPENDENCY_FAILED)} WHEN p % 20 = 19 THEN {int(S.ABORTED)}
         WHEN p % 20 = 17 THEN {int(S.FAILED_TRANSIENT)} WHEN p % 20 > 13 THEN {int(S.SKIPPED)}
         ELSE {int(S.CREATED)} END
"""
_DONE: Final = any_of("b.status", TERMINAL_SUCCESS)


def _graph(size: Size) -> list[str]:
    n = size.derivations
    p, r = _position("i"), _revision("i")
    below = f"CASE k WHEN 0 THEN p - 1 - p / 20 ELSE floor(p * {_dice('p', 'k')} ^ 2)::bigint END"
    kind = f"""
        CASE WHEN {_dice("p", "k", "7")} < 0.6 THEN {int(EdgeKind.BUILD)}
             WHEN {_dice("p", "k", "7")} < 0.8 THEN {int(EdgeKind.BOTH)} ELSE {int(EdgeKind.RUNTIME)} END
    """
    return [
        f"""
        INSERT INTO derivation (id, hash, name, architecture, pname, walked, closure_size, created_at)
        OVERRIDING SYSTEM VALUE
        SELECT i, md5('drv' || i), 'package-' || {p} || '-1.' || {r}, 'x86_64-linux', 'package-' || {p}, true,
               1000000, now() FROM generate_series(1, {n}) i
        """,
        f"""
        INSERT INTO derivation_dependency (derivation, dependency, kind)
        SELECT DISTINCT ON (i, below) i, r * {REVISION} + below + 1, {kind}
        FROM generate_series(1, {n}) i, LATERAL (SELECT {p} AS p, {r} AS r) o,
             generate_series(0, {DRAWS - 1}) k, LATERAL (SELECT {below} AS below) e
        WHERE p >= {SOURCES} ORDER BY i, below, k
        """,
        f"""
        INSERT INTO derivation_input_source (derivation, hash, store_path)
        SELECT i, md5('source' || i), '/nix/store/' || md5('source' || i) || '-builder.sh'
        FROM generate_series(1, {n}, 2) i
        """,
        f"""
        INSERT INTO derivation_build (derivation, status, probed, fetchable, wanted, created_at, updated_at)
        SELECT i, status, true, {any_of("status", TERMINAL_SUCCESS)},
               r < {size.alive} AND status IN ({int(S.CREATED)}, {int(S.FAILED_TRANSIENT)}), now(), now()
        FROM generate_series(1, {n}) i, LATERAL (SELECT {p} AS p, {r} AS r) o,
             LATERAL (SELECT CASE WHEN r < {size.alive} THEN {_STATUS_OF_TODAY}
                      ELSE {_STATUS_OF_HISTORY} END AS status) s
        """,
        f"""
        INSERT INTO derivation_output (derivation, name, hash, package, nar_size, is_cached)
        SELECT b.derivation, o.name, md5(o.name || b.derivation), 'package-' || {_position("b.derivation")},
               100000, {_DONE}
        FROM derivation_build b, LATERAL (VALUES ('out'), ('dev')) o (name)
        WHERE o.name = 'out' OR b.derivation % 4 = 0
        """,
    ]


# The counters of what is pending, and from them what is queued and building.
def _pending(size: Size) -> list[str]:
    alive = size.alive * REVISION
    return [
        f"""
    UPDATE derivation_build b SET blocking_deps = c.blocking, missing_runtime_deps = c.missing
    FROM (SELECT e.derivation, count(*) AS blocking, count(*) FILTER (WHERE e.kind <> 0) AS missing
          FROM derivation_dependency e JOIN derivation_build x ON x.derivation = e.dependency
          WHERE e.derivation <= {alive} AND NOT x.fetchable GROUP BY e.derivation) c
    WHERE b.derivation = c.derivation
    """,
        f"""
    UPDATE derivation_build SET status = {int(S.QUEUED)}, queued_at = now()
    WHERE derivation <= {alive} AND status = {int(S.CREATED)} AND wanted AND blocking_deps = 0
    """,
        f"""
    UPDATE derivation_build SET status = {int(S.BUILDING)} WHERE derivation IN (
        SELECT derivation FROM derivation_build WHERE status = {int(S.QUEUED)} ORDER BY 1 LIMIT 20)
    """,
    ]


def _evaluations(size: Size) -> list[str]:
    total = size.revisions * EVALUATIONS
    alive = f"""
        CASE CASE WHEN e <= {size.alive * EVALUATIONS} THEN (e - 1) % {EVALUATIONS} + 1 END
               WHEN 1 THEN {int(E.BUILDING)} WHEN 3 THEN {int(E.EVALUATING_DERIVATION)}
               WHEN 4 THEN {int(E.QUEUED)} WHEN 5 THEN {int(E.WAITING)} WHEN 6 THEN {int(E.FETCHING)}
               ELSE CASE WHEN e % 5 = 0 THEN {int(E.FAILED)} ELSE {int(E.COMPLETED)} END END
    """
    named = f"""
        FROM generate_series(1, {total}) e, LATERAL (SELECT (e - 1) / {EVALUATIONS} AS r, (e - 1) %
             {EVALUATIONS} AS j) o, LATERAL generate_series(
                 CASE WHEN j < 2 THEN {NAMED} ELSE {NAMED} + j * 40 END,
                 CASE WHEN j < 2 THEN {REVISION - 1} ELSE {NAMED} + j * 40 + 39 END) p
    """
    return [
        "INSERT INTO project (name, created_at) VALUES ('main', now())",
        "INSERT INTO cache (name, created_at) VALUES ('main', now())",
        f"""
        INSERT INTO evaluation (id, project, status, repository, wildcards, concurrent, building_started_at,
                                created_at, updated_at)
        OVERRIDING SYSTEM VALUE
        SELECT e, 1, {alive}, 'git+https://example.org/x', '{{packages.*.*}}', true,
               CASE WHEN e <= {size.alive * EVALUATIONS} AND (e - 1) % {EVALUATIONS} BETWEEN 2 AND 5 THEN NULL
                    ELSE now() END, now(), now()
        FROM generate_series(1, {total}) e
        """,
        f"""
        INSERT INTO build_job (evaluation, derivation, created_at)
        SELECT e, r * {REVISION} + p + 1, now() {named}
        """,
        f"""
        INSERT INTO entry_point (evaluation, eval, derivation)
        SELECT e, 'packages.x86_64-linux.p' || p, r * {REVISION} + p + 1 {named}
        WHERE p >= {TOP} OR (j >= 2 AND p % 10 = 0)
        """,
        f"""
        INSERT INTO evaluation_message (evaluation, level, source, message, created_at)
        SELECT e, 1, 'nix-eval:p' || m, 'deprecated', now()
        FROM generate_series(1, {total}) e, generate_series(1, 40) m
        """,
        f"""
        INSERT INTO phase_event (evaluation, status, at)
        SELECT e, s, now() FROM generate_series(1, {total}) e, generate_series(1, 5) s
        """,
        "INSERT INTO evaluation_metric (evaluation, attributes) SELECT id, 1 FROM evaluation",
    ]


# Assignments and attempts have the number of their derivation; those of evaluations come after them.
def _jobs(size: Size) -> list[str]:
    n = size.derivations
    open_jobs = f"b.status = {int(S.BUILDING)}"
    had_one = f"b.status IN ({int(S.COMPLETED)}, {int(S.FAILED_PERMANENT)}, {int(S.BUILDING)})"
    return [
        f"""
        INSERT INTO dispatched_job (id, kind, job_id, evaluation, derivation, worker_id, worker_name,
                                    dispatched_at, finished_at, outcome)
        OVERRIDING SYSTEM VALUE
        SELECT b.derivation, {int(JobKind.BUILD)}, 'build:' || b.derivation,
               {_revision("b.derivation")} * {EVALUATIONS} + 1, b.derivation,
               md5('worker' || b.derivation % 7)::uuid, 'w', now(),
               CASE WHEN {open_jobs} THEN NULL ELSE now() END,
               CASE WHEN {open_jobs} THEN NULL ELSE {int(DispatchOutcome.COMPLETED)} END
        FROM derivation_build b WHERE {had_one}
        """,
        f"""
        INSERT INTO dispatched_job (id, kind, job_id, evaluation, worker_id, worker_name, dispatched_at,
                                    finished_at, outcome)
        OVERRIDING SYSTEM VALUE
        SELECT {n} + e, {int(JobKind.EVAL)}, 'eval:' || e, e, md5('worker1')::uuid, 'w', now(),
               CASE WHEN e IN (3, 6) THEN NULL ELSE now() END,
               CASE WHEN e IN (3, 6) THEN NULL ELSE {int(DispatchOutcome.COMPLETED)} END
        FROM generate_series(1, {size.revisions * EVALUATIONS}) e
        """,
        f"""
        INSERT INTO build_attempt (id, derivation, evaluation, dispatched_job, outcome, created_at,
                                   build_started_at)
        OVERRIDING SYSTEM VALUE
        SELECT b.derivation, b.derivation,
               CASE WHEN {_position("b.derivation")} >= {NAMED}
                    THEN {_revision("b.derivation")} * {EVALUATIONS} + 1 END, b.derivation,
               CASE WHEN {open_jobs} THEN {int(AttemptOutcome.RUNNING)} ELSE {int(AttemptOutcome.BUILT)} END,
               now(), now()
        FROM derivation_build b WHERE {had_one}
        """,
        """
        INSERT INTO build_log_chunk (build_attempt, chunk_index, data)
        SELECT a.id, c, convert_to('a line of a log', 'UTF8') FROM build_attempt a, generate_series(0, 1) c
        WHERE a.id % 2 = 0
        """,
        """
        INSERT INTO derivation_metric (derivation, history_name, architecture, build_time_ms, created_at)
        SELECT d.id, d.pname, d.architecture, 1000, now() FROM derivation d WHERE d.id % 2 = 0
        """,
        """
        INSERT INTO build_product (derivation, output, file_type, subtype, name, path)
        SELECT derivation, 'out', 'doc', 'html', 'x', '/nix/store/x' FROM build_attempt WHERE id % 10 = 0
        """,
    ]


_CACHE: Final = [
    """
    INSERT INTO cached_path (hash, package, nar_hash, nar_size, file_hash, file_size, "references",
                             created_at)
    SELECT d.hash, d.name || '.drv', 'sha256:' || d.hash, 1000, 'sha256:' || d.hash, 500, '{}', now()
    FROM derivation d
    """,
    """
    INSERT INTO cached_path (hash, package, nar_hash, nar_size, file_hash, file_size, "references",
                             created_at)
    SELECT o.hash, o.package, 'sha256:' || o.hash, 100000, 'sha256:' || o.hash, 50000,
           ARRAY[o.hash || '-' || o.package], now()
    FROM derivation_output o WHERE o.is_cached
    """,
    """
    INSERT INTO cached_path_reference (cached_path, hash)
    SELECT p.id, md5('out' || e.dependency)
    FROM derivation_output o JOIN cached_path p ON p.hash = o.hash
    JOIN derivation_dependency e ON e.derivation = o.derivation AND e.kind <> 0
    """,
    """
    INSERT INTO cached_path_signature (cached_path, cache, signature)
    SELECT id, 1, 'key:c2ln' FROM cached_path
    """,
]
# --- filling --------------------------------------------------------------------------------------

_FOREIGN_KEYS: Final = """
    SELECT conrelid::regclass::text, quote_ident(conname), pg_get_constraintdef(oid) FROM pg_constraint
    WHERE contype = 'f' AND connamespace = current_schema()::regnamespace
"""
# Rows of the generator have numbers of their own: who inserts after it goes on behind them.
_IDENTITIES: Final = """
    SELECT c.relname::text, a.attname::text FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    WHERE a.attidentity <> '' AND c.relnamespace = current_schema()::regnamespace
"""
# The same plans on every run: the sample that statistics are made of is drawn at random, unless it is the
# whole table, three million rows for the highest target of a column; and nothing makes others later.
_STEADY: Final = """
    SELECT format('ALTER TABLE %I ALTER COLUMN %I SET STATISTICS 10000, SET (autovacuum_enabled = off)',
                  c.relname, a.attname)
    FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    WHERE a.attnum = 1 AND c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace
"""


async def fill(url: str, size: Size) -> None:
    """Fill an empty database of the newest schema, and analyse it."""
    async with await Connection.connect(url) as connection:
        for (steady,) in await fetch_all(connection, _STEADY):
            await execute(connection, steady)
        # Foreign keys are checked once at the end, which costs a tenth of a look for each row.
        keys = await fetch_all(connection, _FOREIGN_KEYS)
        for table, name, _ in keys:
            await execute(connection, f"ALTER TABLE {table} DROP CONSTRAINT {name}")
        for statement in (
            *_graph(size),
            *_pending(size),
            *_evaluations(size),
            *_jobs(size),
            *_CACHE,
        ):
            await execute(connection, statement)
        for table, name, definition in keys:
            await execute(connection, f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition}")
        for table, column in await fetch_all(connection, _IDENTITIES):
            sequence = f"pg_get_serial_sequence('{table}', '{column}')"
            await execute(
                connection, f"SELECT setval({sequence}, (SELECT coalesce(max({column}), 1) FROM {table}))"
            )
        await execute(connection, "VACUUM ANALYZE")
