"""Where a maintained column contradicts what it stands for: one read over whole tables each.

Layer: graph, for the consistency check alone. A statement sees one moment, and every committed moment is
right, so what it finds has drifted; only `wanted` and the names take long enough to matter, and whoever
mends them looks again. These statements join whole tables on purpose: a look up for each of a million rows
takes several times as long. Each finds MOST rows at a time.
Source: seed "Queueing and Counters", Consistency Check.
"""

from __future__ import annotations

from typing import Final

from gradient.graph.need import open_closure_cte_body, out_of_place_predicate
from gradient.graph.predicates import (
    any_of,
    build_edge,
    fetchable_predicate,
    gates_predicate,
    held_predicate,
    open_predicate,
    promotable_predicate,
    recorded_predicate,
    runtime_edge,
    shared_build_complete_predicate,
    steps_over,
    unassigned_predicate,
    wanting_entry_point,
)
from gradient.graph.runtime_can_start import count_missing_runtime_deps
from gradient.graph.statements import Statement
from gradient.graph.walk_completeness import count_unwalked_inputs
from gradient.model import BuildStatus, EdgeKind

# Rows one read may answer: a broken database must not fill the memory.
MOST: Final = 100_000

# Memory for the tables that are joined; and one core, because the writer needs the other.
SWEEP_SETTINGS: Final = Statement(
    "sweep_settings",
    """
    SELECT set_config('work_mem', '64MB', false), set_config('max_parallel_workers_per_gather', '0', false)
    """,
)


def _at_most(query: str) -> str:
    """The first MOST rows of `query`, planned as if all of them were asked for: a plan made for a few rows
    takes for ever to find that there are none."""
    return f"WITH found AS MATERIALIZED ({query}) SELECT * FROM found LIMIT {MOST}"


def _from_the_bottom(suspects: str, edge: str) -> str:
    """`suspects` (a query for `id`), each with whether it stands on no other of them over an edge of this
    kind, and those first: what is wrong above may be so only because of what is wrong below. In a circle
    none is lowest, and one of them must begin."""
    return _at_most(
        f"""
        WITH suspect AS MATERIALIZED ({suspects}), ranked AS MATERIALIZED (
            SELECT s.id, s.id NOT IN (
                SELECT e.derivation FROM suspect a
                JOIN derivation_dependency e ON e.derivation = a.id AND {edge}
                JOIN suspect l ON l.id = e.dependency) AS lowest
            FROM suspect s
        )
        SELECT id, lowest OR (id = (SELECT min(id) FROM ranked)
                              AND NOT EXISTS (SELECT FROM ranked r WHERE r.lowest)) AS lowest
        FROM ranked ORDER BY lowest DESC, id
        """
    )


UNWALKED_INPUTS_DRIFT: Final = Statement(
    "unwalked_inputs_drift",
    _from_the_bottom(
        f"""
        SELECT d.id FROM derivation d LEFT JOIN (
            SELECT e.derivation, count(*) AS unwalked
            FROM derivation_dependency e JOIN derivation i ON i.id = e.dependency
            WHERE {build_edge("e")} AND NOT {recorded_predicate("i")} GROUP BY e.derivation
        ) c ON c.derivation = d.id
        WHERE d.unwalked_inputs <> coalesce(c.unwalked, 0)
        """,
        build_edge("e"),
    ),
)
MISSING_RUNTIME_DEPS_DRIFT: Final = Statement(
    "missing_runtime_deps_drift",
    _from_the_bottom(
        f"""
        WITH complete AS MATERIALIZED (
            SELECT b.derivation FROM derivation_build b WHERE {shared_build_complete_predicate("b")}
        )
        SELECT b.derivation AS id FROM derivation_build b LEFT JOIN (
            SELECT e.derivation, count(*) AS missing
            FROM derivation_dependency e LEFT JOIN complete c ON c.derivation = e.dependency
            WHERE {runtime_edge("e")} AND c.derivation IS NULL GROUP BY e.derivation
        ) c USING (derivation)
        WHERE b.missing_runtime_deps <> coalesce(c.missing, 0)
        """,
        runtime_edge("e"),
    ),
)
FETCHABLE_DRIFT: Final = Statement(
    "fetchable_drift",
    _at_most(
        f"""
    SELECT b.derivation FROM derivation_build b
    WHERE b.fetchable <> {fetchable_predicate("b")} OR {held_predicate("b")}
    """
    ),
)
_ENTRIES = f"""
    SELECT s.derivation FROM (SELECT DISTINCT t.derivation FROM entry_point t) s
    WHERE {wanting_entry_point("s.derivation")}
"""
# Whether the walk is worth its time. A mark that agrees with those right above it is right, but where marks
# may hold up each other in a circle: what is built from its inputs never stands below itself, so a circle
# leads over an edge that is a runtime reference alone.
WANTED_IN_DOUBT: Final = Statement(
    "wanted_in_doubt",
    f"""
    WITH entry AS MATERIALIZED ({_ENTRIES}), above AS (
        SELECT e.dependency AS derivation, bool_or({any_of("e.kind", {EdgeKind.RUNTIME})}) AS referred
        FROM derivation_dependency e JOIN derivation_build x ON x.derivation = e.derivation
        JOIN derivation xd ON xd.id = x.derivation
        WHERE x.wanted AND {open_predicate("x")} AND {steps_over("e", "x", "xd")} GROUP BY e.dependency
    )
    SELECT count(*) > 0 FROM derivation_build b
    LEFT JOIN above a ON a.derivation = b.derivation LEFT JOIN entry t ON t.derivation = b.derivation
    WHERE {open_predicate("b")}
      AND (b.wanted <> (a.derivation IS NOT NULL OR t.derivation IS NOT NULL) OR (b.wanted AND a.referred))
    """,
)
# The walk of the needs-build mark from every entry point.
WANTED_DRIFT: Final = Statement(
    "wanted_drift",
    _at_most(
        f"""
    WITH RECURSIVE reached (derivation) AS (
        {
            open_closure_cte_body(
                _ENTRIES,
                ends=True,
            )
        }
    )
    SELECT b.derivation FROM derivation_build b LEFT JOIN reached w USING (derivation)
    WHERE {open_predicate("b")} AND b.wanted <> (w.derivation IS NOT NULL)
    """
    ),
)
SKIPPED_DRIFT: Final = Statement(
    "skipped_drift",
    _at_most(f"SELECT b.derivation FROM derivation_build b WHERE {out_of_place_predicate('b')}"),
)
CAN_START_DRIFT: Final = Statement(
    "can_start_drift",
    _at_most(
        f"""
    WITH counted AS (
        SELECT e.derivation, count(*) AS blocking
        FROM derivation_dependency e LEFT JOIN derivation_build x ON x.derivation = e.dependency
        WHERE NOT coalesce(x.fetchable, false) GROUP BY e.derivation
    )
    SELECT b.derivation FROM derivation_build b
    JOIN derivation d ON d.id = b.derivation LEFT JOIN counted c ON c.derivation = b.derivation
    WHERE b.blocking_deps <> coalesce(c.blocking, 0) OR {promotable_predicate("b", "d")}
       OR ({any_of("b.status", {BuildStatus.QUEUED})} AND NOT {gates_predicate("b", "d")}
           AND {unassigned_predicate("b")})
    """
    ),
)

# --- the same above what was mended ---------------------------------------------------------------
# Of `ids` those whose count is wrong as things stand now, and whether they stand on no other of them.

UNWALKED_INPUTS_AMONG: Final = Statement(
    "unwalked_inputs_among",
    f"""
    WITH suspect AS MATERIALIZED (
        SELECT d.id FROM derivation d
        WHERE d.id = ANY(%(ids)s) AND d.unwalked_inputs <> {count_unwalked_inputs("d.id")}
    )
    SELECT s.id, NOT EXISTS (SELECT FROM derivation_dependency e
                             WHERE e.derivation = s.id AND {build_edge("e")}
                               AND (e.dependency IN (SELECT l.id FROM suspect l)) IS TRUE)
    FROM suspect s
    """,
)
MISSING_RUNTIME_DEPS_AMONG: Final = Statement(
    "missing_runtime_deps_among",
    f"""
    WITH suspect AS MATERIALIZED (
        SELECT b.derivation FROM derivation_build b
        WHERE b.derivation = ANY(%(ids)s)
          AND b.missing_runtime_deps <> {count_missing_runtime_deps("b.derivation")}
    )
    SELECT s.derivation, NOT EXISTS (SELECT FROM derivation_dependency e
                                     WHERE e.derivation = s.derivation AND {runtime_edge("e")}
                                       AND (e.dependency IN (SELECT l.derivation FROM suspect l)) IS TRUE)
    FROM suspect s
    """,
)
