"""A build whose `.drv` is gone from the cache: no event will queue it, because a walk alone can bring that.

Layer: graph. A live evaluation that needs the build would wait for ever: its own walk is over. So another one
walks the same source, all of it, and what waits goes on by its counters. What even that does not bring back
fails the evaluation in words (docs/adr/0025).
Source: seed "Waiting and Recovery", Graph-Stuck Heal (Lost .drv).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import attrs

from gradient.graph.evaluation_end import fail_evaluation
from gradient.graph.messages import add_messages
from gradient.graph.predicates import (
    any_of,
    drv_present_predicate,
    live_evaluation,
    non_passthrough_predicate,
    unassigned_predicate,
)
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction
from gradient.model import PENDING, EvaluationKind, EvaluationStatus, MessageLevel, WalkMode

# How long an evaluation must have been stuck: somebody else may be sending it already.
RECOVER_AFTER: Final = timedelta(seconds=120)

# Its newest recovery comes with it, if there was one.
STUCK_EVALUATION: Final = Statement(
    "stuck_evaluation",
    f"""
    SELECT v.kind, r.id, coalesce({live_evaluation("r")}, false)
    FROM evaluation v LEFT JOIN evaluation r ON r.recovers = v.id
    WHERE v.id = %(evaluation)s AND v.status = {int(EvaluationStatus.WAITING)}
      AND v.waiting_reason ->> 'kind' = 'graph_stuck' AND v.waiting_since <= %(stuck_since)s
    ORDER BY r.id DESC NULLS LAST LIMIT 1
    """,
)
# Nothing is missing to build it but its own `.drv`.
LOST_DRV: Final = Statement(
    "lost_drv",
    f"""
    SELECT lost.name FROM build_job j, LATERAL (
        SELECT d.id, d.name FROM derivation_build b JOIN derivation d ON d.id = b.derivation
        WHERE b.derivation = j.derivation AND b.wanted AND {any_of("b.status", PENDING)}
          AND d.walked AND b.probed AND {non_passthrough_predicate("b")} AND b.blocking_deps = 0
          AND NOT {drv_present_predicate("d")} AND {unassigned_predicate("b")} OFFSET 0
    ) lost
    WHERE j.evaluation = %(evaluation)s ORDER BY lost.id LIMIT 1
    """,
)
# Beside the one that waits, of the same commit. Nothing is known to it: the walk brings every `.drv`.
INSERT_RECOVERY: Final = Statement(
    "insert_drv_recovery",
    f"""
    INSERT INTO evaluation (project, task, kind, walk_mode, repository, commit, flake_source, wildcards,
                            input_overrides, started_by, source_comment, concurrent, prioritized, recovers,
                            created_at, updated_at)
    SELECT project, task, {int(EvaluationKind.DRV_RECOVERY)}, {int(WalkMode.FULL)}, repository, commit,
           CASE WHEN repository IS NULL THEN flake_source END, wildcards, input_overrides, started_by,
           source_comment, true, prioritized, id, %(now)s, %(now)s
    FROM evaluation WHERE id = %(evaluation)s
    RETURNING id
    """,
)


@attrs.frozen
class RecoverDrv:
    """Have the `.drv` that a stuck evaluation waits for brought again (writer message).

    Answers the evaluation that does it; None when none is lost, or nothing more can be done.

    Once for each evaluation: one that is still stuck when its recovery has ended fails, and so does a stuck
    recovery.
    """

    evaluation: int

    async def apply(self, tx: Transaction) -> int | None:
        """Look again, then begin a recovery, or end the evaluation."""
        stuck = await tx.rows(
            STUCK_EVALUATION, evaluation=self.evaluation, stuck_since=tx.now - RECOVER_AFTER
        )
        name = await tx.value(LOST_DRV, evaluation=self.evaluation) if stuck else None
        if name is None:
            return None
        ((kind, recovery, going_on),) = stuck
        words = f"the .drv file of {name} is gone from the cache"
        if kind == EvaluationKind.DRV_RECOVERY:
            await self._fail(tx, f"{words}, and this evaluation has not brought it back")
        elif recovery is None:
            return await self._begin(tx, words)
        elif not going_on:
            await self._fail(tx, f"{words}, and evaluation {recovery} has not brought it back")
        return None

    async def _begin(self, tx: Transaction, words: str) -> int:
        recovery: int = await tx.value(INSERT_RECOVERY, evaluation=self.evaluation, now=tx.now)
        tx.moves.evaluations[recovery] = EvaluationStatus.QUEUED
        goes_on = f"{words}: evaluation {recovery} walks the same source to bring it back"
        await add_messages(tx, self.evaluation, MessageLevel.WARNING, "scheduler", [goes_on])
        return recovery

    async def _fail(self, tx: Transaction, words: str) -> None:
        await fail_evaluation(tx, self.evaluation, "scheduler", f"{words}: evaluate again")
