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
    present_predicate,
    promotable_predicate,
    runtime_edge,
    steps_over,
    unassigned_predicate,
    wanting_entry_point,
)
from gradient.graph.statements import Statement
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


# What is not recorded, and with it everything above.
UNWALKED_INPUTS_DRIFT: Final = Statement(
    "unwalked_inputs_drift",
    _at_most(
        f"""
        WITH RECURSIVE unrecorded (id) AS (
            SELECT d.id FROM derivation d WHERE NOT d.walked
          UNION
            SELECT above.derivation FROM unrecorded u, LATERAL (
                SELECT e.derivation FROM derivation_dependency e
                WHERE e.dependency = u.id AND {build_edge("e")} OFFSET 0
            ) above
        )
        SELECT d.id FROM derivation d LEFT JOIN (
            SELECT e.derivation, count(*) AS unwalked
            FROM derivation_dependency e JOIN unrecorded u ON u.id = e.dependency
            WHERE {build_edge("e")} GROUP BY e.derivation
        ) c ON c.derivation = d.id
        WHERE d.unwalked_inputs <> coalesce(c.unwalked, 0)
        """
    ),
)
# What refers to an output that is not here, and with it everything that refers to that.
MISSING_RUNTIME_DEPS_DRIFT: Final = Statement(
    "missing_runtime_deps_drift",
    _at_most(
        f"""
        WITH RECURSIVE present AS MATERIALIZED (
            SELECT b.derivation FROM derivation_build b WHERE {present_predicate("b.derivation")}
        ), broken (derivation) AS (
            SELECT e.derivation FROM derivation_dependency e
            LEFT JOIN present p ON p.derivation = e.dependency
            WHERE {runtime_edge("e")} AND p.derivation IS NULL
          UNION
            SELECT above.derivation FROM broken m, LATERAL (
                SELECT e.derivation FROM derivation_dependency e
                WHERE e.dependency = m.derivation AND {runtime_edge("e")} OFFSET 0
            ) above
        )
        SELECT b.derivation FROM derivation_build b LEFT JOIN (
            SELECT e.derivation, count(*) AS missing FROM derivation_dependency e
            LEFT JOIN present p ON p.derivation = e.dependency
            LEFT JOIN broken m ON m.derivation = e.dependency
            WHERE {runtime_edge("e")} AND (p.derivation IS NULL OR m.derivation IS NOT NULL)
            GROUP BY e.derivation
        ) c USING (derivation)
        WHERE b.missing_runtime_deps <> coalesce(c.missing, 0)
        """
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
        {open_closure_cte_body(_ENTRIES, onward="true")}
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
