"""Deleting old evaluations, and what becomes of the names they leave behind. Layer: graph.

Only terminal ones go, each task's oldest; an active evaluation is never deleted, and one that is still
getting somewhere keeps its whole task's. Only the evaluation that walked a subtree names its interior:
what others still wait for there is adopted before it leaves the queue.
Source: seed "Queueing and Counters", Naming and Adoption.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Final

import attrs

from gradient.graph.can_start import unpromote_ungated
from gradient.graph.need import thaw_wanted, update_and_settle_need
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.predicates import any_of, live_evaluation, open_predicate
from gradient.graph.reachability import adopt_pending_closures
from gradient.graph.statements import Statement
from gradient.graph.transaction import Alone, Transaction, ordered
from gradient.model import EVALUATION_TERMINAL

# By the stamps of its phases, which a wedged evaluation does not renew; `updated_at` it might.
_LAST_PHASE: Final = (
    "greatest(a.created_at, a.fetch_started_at, a.eval_flake_started_at, a.eval_drv_started_at,"
    " a.building_started_at)"
)
# Those beyond what a task keeps, by when they ended: whoever followed a long one to its end still finds it.
# Evaluations without a task are each project's own row.
EXPIRED_EVALUATIONS: Final = Statement(
    "expired_evaluations",
    f"""
    SELECT ended.id FROM (
        SELECT v.id, v.project, v.task, coalesce(t.keep_evaluations, %(keep)s) AS keep,
               row_number() OVER (PARTITION BY v.project, v.task
                                  ORDER BY v.finished_at DESC NULLS LAST, v.id DESC) AS place
        FROM evaluation v LEFT JOIN task t ON t.id = v.task
        WHERE {any_of("v.status", EVALUATION_TERMINAL)}
    ) ended
    WHERE ended.keep > 0 AND ended.place > ended.keep AND NOT EXISTS (
        SELECT FROM evaluation a
        WHERE a.project = ended.project AND a.task IS NOT DISTINCT FROM ended.task
          AND {live_evaluation("a")} AND {_LAST_PHASE} > %(wedged_before)s)
    ORDER BY ended.id DESC
    """,
)
LOCK_ENDED: Final = Statement(
    "lock_ended_evaluations",
    f"""
    SELECT id FROM evaluation WHERE id = ANY(%(ids)s) AND {any_of("status", EVALUATION_TERMINAL)}
    ORDER BY id FOR UPDATE
    """,
)
# What nobody wants is left out: it is not adopted, and the deletion gives it to nobody.
OPEN_NAMES: Final = Statement(
    "open_names",
    f"""
    SELECT DISTINCT j.derivation FROM build_job j, LATERAL (
        SELECT FROM derivation_build b
        WHERE b.derivation = j.derivation AND b.wanted AND {open_predicate("b")} OFFSET 0) open
    WHERE j.evaluation = ANY(%(ids)s)
    """,
)
ENTRY_POINTS: Final = Statement(
    "entry_points_of_evaluations",
    "SELECT DISTINCT derivation FROM entry_point WHERE evaluation = ANY(%(ids)s)",
)
UNLINK_EVALUATIONS: Final = Statement(
    "unlink_evaluations",
    """
    UPDATE evaluation SET previous = CASE WHEN previous = ANY(%(ids)s) THEN NULL ELSE previous END,
                          next = CASE WHEN next = ANY(%(ids)s) THEN NULL ELSE next END
    WHERE previous = ANY(%(ids)s) OR next = ANY(%(ids)s)
    """,
)
DELETE_EVALUATIONS: Final = Statement("delete_evaluations", "DELETE FROM evaluation WHERE id = ANY(%(ids)s)")


async def expired_evaluations(
    connection: Connection, *, keep_without_task: int, wedged_before: datetime
) -> list[int]:
    """The evaluations that are to go, newest first; 0 to keep means all."""
    rows = await fetch_all(
        connection, EXPIRED_EVALUATIONS, {"keep": keep_without_task, "wedged_before": wedged_before}
    )
    return [row[0] for row in rows]


@attrs.frozen
class CollectEvaluations(Alone):
    """Delete evaluations (writer message); answers which. One that is active by now stays."""

    ids: tuple[int, ...]

    async def apply(self, tx: Transaction) -> tuple[int, ...]:
        """Delete them with everything that is theirs alone, and settle what they wanted and named."""
        ended = await tx.ids(LOCK_ENDED, ids=ordered(self.ids))
        if not ended:
            return ()
        opened = await tx.ids(OPEN_NAMES, ids=ended)
        entry_points = await tx.ids(ENTRY_POINTS, ids=ended)
        await tx.run(UNLINK_EVALUATIONS, ids=ended)
        await tx.run(DELETE_EVALUATIONS, ids=ended)
        await settle_after_delete(tx, entry_points, opened)
        return tuple(ended)


async def settle_after_delete(
    tx: Transaction, entry_points: Collection[int], opened: Collection[int]
) -> None:
    """After evaluations went with these entry points and names of open shared builds: who still waits for
    one of those names it, and one that nobody names any more leaves the queue."""
    await update_and_settle_need(tx, entry_points)
    if opened:
        await adopt_pending_closures(tx)
        # The mark of an abort may have gone with the evaluation in which it held.
        await thaw_wanted(tx, opened)
        await unpromote_ungated(tx, opened)
