"""What an aborted evaluation lets go: the need for its builds, and the builds that no live one wants.

Layer: graph, inside the abort transition. Ended evaluations want their closures still, and keep nobody from
stopping a build: what is stopped though one of them wants it is marked, so that the abort holds
(docs/adr/0021).
Source: seeds "Queueing and Counters" (Skipped and Thaw), "Jobs" (Abort and Lost Workers).
"""

from __future__ import annotations

from typing import Any, Final

from gradient.graph.moves import BuildChange
from gradient.graph.need import open_closure_cte_body, settle_need, update_need
from gradient.graph.predicates import (
    any_of,
    asked_for,
    live_evaluation,
    open_predicate,
    unassigned_predicate,
    wanting_entry_point,
)
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import ABORTABLE, PENDING, BuildStatus

ENTRY_POINTS_OF: Final = Statement(
    "entry_points_of", "SELECT DISTINCT derivation FROM entry_point WHERE evaluation = %(evaluation)s"
)
# Of those of an aborted evaluation, the ones that no other has: below the rest all is wanted as it was.
RELEASED_ENTRY_POINTS: Final = Statement(
    "released_entry_points",
    f"""
    SELECT DISTINCT own.derivation FROM entry_point own
    WHERE own.evaluation = %(evaluation)s AND NOT {wanting_entry_point("own.derivation")}
    """,
)
# After the need was released: what this evaluation names and only ended ones want. What a live one names
# goes on, because no abort of it would hold; what one wants without naming it is found by its walk, which is
# made only where there is something to stop. Nobody can estimate either: EXCEPT and an array keep the planner
# from looking through one of them for each row of the other.
ABORT_WANTED_BY_ENDED: Final = Statement(
    "abort_builds_wanted_by_ended_evaluations",
    f"""
    WITH RECURSIVE candidate AS MATERIALIZED (
        SELECT pending.derivation FROM build_job own, LATERAL (
            SELECT b.derivation FROM derivation_build b
            WHERE b.derivation = own.derivation AND b.wanted AND {any_of("b.status", ABORTABLE)}
              AND NOT {asked_for("b.derivation")} OFFSET 0
        ) pending
        WHERE own.evaluation = %(evaluation)s
    ), reached (derivation) AS (
        {
        open_closure_cte_body(
            f'''SELECT b.derivation FROM evaluation v JOIN entry_point t ON t.evaluation = v.id
            JOIN derivation_build b ON b.derivation = t.derivation AND {open_predicate("b")}
            LEFT JOIN build_job j ON j.evaluation = t.evaluation AND j.derivation = t.derivation
            WHERE {live_evaluation("v")} AND NOT coalesce(j.aborted, false)
              AND EXISTS (SELECT FROM candidate)''',
            onward="true",
        )
    }
    ), doomed AS (
        SELECT b.derivation, b.status FROM derivation_build b
        WHERE b.derivation = ANY(ARRAY(SELECT c.derivation FROM candidate c
                                       EXCEPT SELECT r.derivation FROM reached r))
        ORDER BY b.derivation FOR NO KEY UPDATE
    )
    UPDATE derivation_build b SET status = {int(BuildStatus.ABORTED)}, updated_at = %(now)s
    FROM doomed d WHERE b.derivation = d.derivation
    RETURNING b.derivation, d.status
    """,
)
# What this evaluation names, or was the last to want, and nobody wants now. What has not begun and another
# live evaluation names is left to be Skipped: an abort of one evaluation is no failure of another that had no
# use for the build.
ABORT_UNWANTED: Final = Statement(
    "abort_unwanted_builds",
    f"""
    WITH concerned (derivation) AS (
        SELECT unnest(%(lost)s::bigint[])
      UNION
        SELECT own.derivation FROM build_job own WHERE own.evaluation = %(evaluation)s
    ), doomed AS (
        SELECT b.derivation, b.status FROM concerned JOIN derivation_build b USING (derivation)
        WHERE NOT b.wanted AND {any_of("b.status", ABORTABLE)}
          AND NOT ({any_of("b.status", PENDING)} AND {unassigned_predicate("b")} AND EXISTS (
                   SELECT FROM build_job j JOIN evaluation v ON v.id = j.evaluation
                   WHERE j.derivation = b.derivation AND {live_evaluation("v")}))
        ORDER BY b.derivation FOR NO KEY UPDATE OF b
    )
    UPDATE derivation_build b SET status = {int(BuildStatus.ABORTED)}, updated_at = %(now)s
    FROM doomed d WHERE b.derivation = d.derivation
    RETURNING b.derivation, d.status
    """,
)
# Of what was stopped, what an ended evaluation wants all the same: what stands below such a build only is
# wanted no more, and thaws with it.
MARK_WANTED: Final = Statement(
    "mark_wanted_as_aborted",
    """
    UPDATE build_job j SET aborted = true FROM derivation_build b
    WHERE j.evaluation = %(evaluation)s AND j.derivation = ANY(%(ids)s)
      AND b.derivation = j.derivation AND b.wanted
    """,
)


async def release_evaluation_need(tx: Transaction, evaluation: int) -> list[int]:
    """Update the need below the entry points of an aborted evaluation, and end what no live one wants: what
    nobody wants any more, and what it names and only ended ones do. Returns what has ended."""
    released = await update_need(tx, await tx.ids(RELEASED_ENTRY_POINTS, evaluation=evaluation))
    held = await _abort(tx, ABORT_WANTED_BY_ENDED, evaluation=evaluation)
    below = await update_need(tx, held)
    await tx.run(MARK_WANTED, evaluation=evaluation, ids=held)
    lost = ordered({*released.lost, *below.lost})
    # Nothing is wanted through what nobody wants: the need below these is right as it is.
    unwanted = await _abort(tx, ABORT_UNWANTED, evaluation=evaluation, lost=lost)
    await settle_need(tx, released)
    await settle_need(tx, below)
    return [*held, *unwanted]


async def _abort(tx: Transaction, doomed: Statement, **params: Any) -> list[int]:
    rows = await tx.rows(doomed, now=tx.now, **params)
    tx.moves.change(BuildChange(i, BuildStatus(old), BuildStatus.ABORTED) for i, old in rows)
    return ordered(i for i, _ in rows)
