"""Other people's derivations: blocks of a package set's shape, written straight into the tables, by sets.

A block is one evaluation's. At its bottom is a chain, whose last three everything else needs; of five others
four are fixed outputs, the sources of the fifth, a package, which needs some earlier packages too: 5.6
inputs each. Every derivation is needed by an entry point, so all of an open block is wanted.

    position   0 … 99       100         101 … 104     105        …
               the chain    package 0   its sources   package 1  …

Every maintained column is what its recount says, so that a check of the graph finds nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import attrs

from gradient.graph.pg import Connection, fetch_value
from gradient.model import BuildStatus, EdgeKind, EvaluationStatus

BLOCK: Final = 10_000
_CHAIN: Final = 100


class State(Enum):
    """How far the builds of a block are."""

    DONE = "done"  # built and in the cache, with their closures
    WAITING = "waiting"  # wanted by a live evaluation; the first is Queued
    RECORDED = "recorded"  # as waiting, before anybody asked what is wanted


@attrs.frozen
class Population:
    """What was written: the ids of the derivations and of the evaluations, both without gaps."""

    derivations: range
    evaluations: range


# The parameters of every statement: `first` the id of the first derivation, `size` of a block, `last` the
# number of derivations minus one, `evaluation` the id of the first evaluation, `done` and `wanted` the state.
_EACH: Final = (
    "generate_series(0, %(last)s::bigint) AS i, LATERAL (SELECT i %% %(size)s, %(first)s + i) AS n (k, id)"
)
_PACKAGE: Final = f"(k >= {_CHAIN} AND k %% 5 = 0)"
# The number of a package at `k`, and where package `m` is.
_NUMBER: Final = f"((k - {_CHAIN}) / 5)"


def _at(number: str) -> str:
    return f"({_CHAIN} + 5 * ({number}))"


def _hash(what: str, of: str = "id") -> str:
    """A legal hash part: hexadecimal has one letter that nix32 lacks."""
    return f"translate(md5('{what}' || {of}), 'e', 'g')"


# Below position `k`: the derivation's inputs, and whether its output refers to them.
_INPUTS: Final = f"""
    SELECT k - 1 AS below, true AS refers WHERE k BETWEEN 1 AND {_CHAIN - 1}
  UNION ALL
    SELECT hub, {_PACKAGE} FROM generate_series({_CHAIN - 3}, {_CHAIN - 1}) AS hub WHERE k >= {_CHAIN}
  UNION ALL
    SELECT k + source, false FROM generate_series(1, 4) AS source WHERE {_PACKAGE}
  UNION ALL
    (SELECT {_at(f"{_NUMBER} / 2")}, false WHERE {_PACKAGE} AND {_NUMBER} > 0
     UNION
     SELECT {_at(f"(random * 104729 + 7) %% {_NUMBER}")}, false
     FROM generate_series(1, 8) AS random WHERE {_PACKAGE} AND {_NUMBER} > 0)
"""
# What no package of its block needs by the rule of halves.
_ENTRY: Final = f"({_PACKAGE} AND {_NUMBER} >= (%(size)s - {_CHAIN}) / 10)"

_STATEMENTS: Final = (
    f"""
    INSERT INTO derivation (id, hash, name, architecture, pname, is_fixed_output, walked, created_at)
    OVERRIDING SYSTEM VALUE
    SELECT id, {_hash("drv")}, 'p' || id, 'x86_64-linux', 'p' || id,
           k >= {_CHAIN} AND NOT {_PACKAGE}, true, now()
    FROM {_EACH}
    """,
    f"""
    INSERT INTO derivation_output (derivation, name, hash, package, nar_size, is_cached)
    SELECT id, 'out', {_hash("out")}, 'p' || id, CASE WHEN %(done)s THEN 1000 END, %(done)s FROM {_EACH}
    """,
    f"""
    INSERT INTO derivation_dependency (derivation, dependency, kind)
    SELECT id, id - k + below,
           CASE WHEN %(done)s AND refers THEN {EdgeKind.BOTH:d} ELSE {EdgeKind.BUILD:d} END
    FROM {_EACH}, LATERAL ({_INPUTS}) AS input
    """,
    f"""
    INSERT INTO derivation_input_source (derivation, hash, store_path)
    SELECT id, {_hash("builder", "k")}, '/nix/store/' || {_hash("builder", "k")} || '-builder.sh' FROM {_EACH}
    """,
    f"""
    INSERT INTO derivation_build (derivation, status, probed, fetchable, wanted, blocking_deps, created_at,
                                  updated_at)
    SELECT id, CASE WHEN %(done)s THEN {BuildStatus.COMPLETED:d} WHEN %(wanted)s AND k = 0
               THEN {BuildStatus.QUEUED:d} ELSE {BuildStatus.CREATED:d} END,
           true, %(done)s, %(wanted)s,
           CASE WHEN %(done)s THEN 0
                ELSE (SELECT count(*) FROM derivation_dependency e WHERE e.derivation = id) END,
           now(), now()
    FROM {_EACH}
    """,
    f"""
    INSERT INTO evaluation (id, project, status, repository, concurrent, named_shared_builds,
        active_shared_builds, queued_shared_builds, created_at, updated_at, building_started_at, finished_at)
    OVERRIDING SYSTEM VALUE
    SELECT %(evaluation)s + block, (SELECT min(id) FROM project),
           CASE WHEN %(done)s THEN {EvaluationStatus.COMPLETED:d} ELSE {EvaluationStatus.BUILDING:d} END,
           'git+https://example.org/packages', true, %(size)s, CASE WHEN %(wanted)s THEN %(size)s ELSE 0 END,
           CASE WHEN %(wanted)s THEN 1 ELSE 0 END, now(), now(), now(), CASE WHEN %(done)s THEN now() END
    FROM generate_series(0, %(last)s::bigint / %(size)s) AS block
    """,
    f"""
    INSERT INTO build_job (evaluation, derivation, created_at)
    SELECT %(evaluation)s + i / %(size)s, id, now() FROM {_EACH}
    """,
    f"""
    INSERT INTO entry_point (evaluation, eval, derivation)
    SELECT %(evaluation)s + i / %(size)s, 'packages.p' || id, id FROM {_EACH} WHERE {_ENTRY}
    """,
    # Every `.drv`, and of what is done every output with what it refers to.
    f"""
    INSERT INTO cached_path (hash, package, nar_hash, nar_size, file_hash, file_size, "references",
                             created_at)
    SELECT {_hash("drv")}, 'p' || id || '.drv', 'sha256:' || {_hash("nar")}, 1000,
           'sha256:' || {_hash("drv")}, 500, '{{}}', now()
    FROM {_EACH}
    """,
    f"""
    INSERT INTO cached_path (hash, package, nar_hash, nar_size, file_hash, file_size, "references",
                             created_at)
    SELECT {_hash("out")}, 'p' || id, 'sha256:' || {_hash("nar")}, 1000, 'sha256:' || {_hash("out")}, 500,
           ARRAY(SELECT {_hash("out", "(id - k + below)")} || '-p' || (id - k + below)
                 FROM ({_INPUTS}) AS input WHERE refers), now()
    FROM {_EACH} WHERE %(done)s
    """,
    """
    INSERT INTO cached_path_reference (cached_path, hash)
    SELECT p.id, left(base, 32) FROM cached_path p, unnest(p."references") AS base
    WHERE p.id >= %(path)s
    """,
    """
    INSERT INTO cached_path_signature (cached_path, cache, signature)
    SELECT p.id, (SELECT min(id) FROM cache), 'bench:signature' FROM cached_path p WHERE p.id >= %(path)s
    """,
)


async def populate(
    connection: Connection, derivations: int, state: State, *, size: int = BLOCK
) -> Population:
    """Write that many derivations, in blocks of `size`; statistics are up to date afterwards."""
    assert derivations % size == 0
    assert size % 10 == 0
    first = await _next(connection, "derivation")
    evaluation = await _next(connection, "evaluation")
    parameters = {
        "first": first,
        "last": derivations - 1,
        "size": size,
        "evaluation": evaluation,
        "path": await _next(connection, "cached_path"),
        "done": state is State.DONE,
        "wanted": state is State.WAITING,
    }
    await write_untriggered(connection, _STATEMENTS, parameters)
    return Population(range(first, first + derivations), range(evaluation, evaluation + derivations // size))


async def write_untriggered(
    connection: Connection, statements: tuple[str, ...], parameters: dict[str, Any]
) -> None:
    """Run statements without triggers and foreign keys, whose work they have done themselves."""
    async with connection.transaction():
        await connection.execute("SET LOCAL session_replication_role = replica")
        for statement in statements:
            used = {name: value for name, value in parameters.items() if f"%({name})s" in statement}
            await connection.cursor().execute(_casting(statement).encode(), used)
    for table in ("derivation", "evaluation"):
        await connection.execute(
            f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), max(id)) FROM {table}".encode()
        )
    await connection.execute("VACUUM ANALYZE")


def _casting(statement: str) -> str:
    """Numbers and flags by their types: alone, PostgreSQL could not tell."""
    for name in ("first", "size", "evaluation", "path"):
        statement = statement.replace(f"%({name})s", f"%({name})s::bigint")
    for name in ("done", "wanted"):
        statement = statement.replace(f"%({name})s", f"%({name})s::boolean")
    return statement


async def _next(connection: Connection, table: str) -> int:
    return int(await fetch_value(connection, f"SELECT coalesce(max(id), 0) + 1 FROM {table}"))
