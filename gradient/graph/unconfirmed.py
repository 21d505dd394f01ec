"""Aborts that a worker does not confirm: after five minutes nobody waits for it any more. Layer: graph.

Until then its build cannot be retried, and a job that is wanted again stays with it.
Source: seed "Jobs", Abort and Lost Workers.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import attrs

from gradient.graph.assignments import abandon_assignments, close_attempt
from gradient.graph.requeue import requeue_builds
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import AttemptOutcome

UNCONFIRMED_AFTER: Final = timedelta(minutes=5)

UNCONFIRMED_ABORTS: Final = Statement(
    "unconfirmed_aborts",
    """
    SELECT id FROM dispatched_job WHERE finished_at IS NULL AND abort_sent_at <= %(sent_before)s ORDER BY id
    """,
)


@attrs.frozen
class AbandonUnconfirmed:
    """Close the assignments whose abort was sent so long ago (writer message); answers how many."""

    after: timedelta = UNCONFIRMED_AFTER

    async def apply(self, tx: Transaction) -> int:
        """The jobs leave their sessions too; what was wanted again meanwhile goes to others."""
        overdue = await tx.ids(UNCONFIRMED_ABORTS, sent_before=tx.now - self.after)
        closed = await abandon_assignments(tx, overdue) if overdue else []
        for assignment, *_ in closed:
            await close_attempt(tx, assignment, AttemptOutcome.ABORTED)
        await requeue_builds(tx, ordered(build for *_, build in closed if build is not None))
        tx.moves.dropped.update(overdue)
        return len(closed)
