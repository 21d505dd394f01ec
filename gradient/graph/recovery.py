"""Startup recovery: what a killed server left open. Layer: graph, run before the writer starts.

Runs in one transaction, without live effects: nobody is connected yet, and the rows are consistent on
their own afterwards.
Source: seed "Waiting and Recovery", Startup Recovery.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

import attrs

from gradient.graph.can_start import unpromote_ungated
from gradient.graph.evaluation_end import finish_evaluations
from gradient.graph.need import settle_held, skip_unwanted
from gradient.graph.pg import Connection
from gradient.graph.predicates import any_of
from gradient.graph.statements import Statement
from gradient.graph.transaction import graph_transaction
from gradient.model import (
    EVALUATION_RUNNING,
    EVALUATION_TERMINAL,
    REQUEUEABLE,
    TERMINAL_SUCCESS,
    AttemptOutcome,
    BuildStatus,
    ClusterOutcome,
    ClusterStatus,
    DispatchOutcome,
    EvaluationStatus,
)

ABANDON_OPEN: Final = Statement(
    "abandon_open_assignments",
    f"""
    UPDATE dispatched_job SET finished_at = %(now)s, outcome = {int(DispatchOutcome.ABANDONED)}
    WHERE finished_at IS NULL RETURNING derivation
    """,
)
ABORT_RUNNING_ATTEMPTS: Final = Statement(
    "abort_running_attempts",
    f"""
    UPDATE build_attempt SET outcome = {int(AttemptOutcome.ABORTED)}, build_finished_at = %(now)s
    WHERE outcome = {int(AttemptOutcome.RUNNING)}
    """,
)
REQUEUE_ALL_BUILDING: Final = Statement(
    "requeue_all_building",
    f"""
    UPDATE derivation_build SET status = {int(BuildStatus.QUEUED)}, queued_at = %(now)s, updated_at = %(now)s
    WHERE status = {int(BuildStatus.BUILDING)} RETURNING derivation
    """,
)
ALL_QUEUED: Final = Statement(
    "all_queued", f"SELECT derivation FROM derivation_build WHERE status = {int(BuildStatus.QUEUED)}"
)


def _queue_evaluations(which: str) -> str:
    """Those that fulfil `which` go back to the queue, with a phase event each."""
    return f"""
    WITH moved AS (
        UPDATE evaluation SET status = {int(EvaluationStatus.QUEUED)}, waiting_reason = NULL,
               waiting_since = NULL, updated_at = %(now)s
        WHERE {which} RETURNING id
    )
    INSERT INTO phase_event (evaluation, status, at)
    SELECT id, {int(EvaluationStatus.QUEUED)}, %(now)s FROM moved RETURNING evaluation
    """


REQUEUE_EVALUATIONS: Final = Statement(
    "requeue_running_evaluations", _queue_evaluations(any_of("status", EVALUATION_RUNNING))
)
UNPARK_DRAINING: Final = Statement(
    "unpark_draining_evals",
    _queue_evaluations(
        f"status = {int(EvaluationStatus.WAITING)} AND waiting_reason ->> 'kind' = 'draining'"
    ),
)
CLOSE_CLUSTER_ATTEMPTS: Final = Statement(
    "close_cluster_attempts",
    f"""
    UPDATE cluster_attempt
    SET finished_at = %(now)s, outcome = CASE WHEN started_at IS NULL
        THEN {int(ClusterOutcome.PREPARE_FAILED)} ELSE {int(ClusterOutcome.ABORTED)} END
    WHERE finished_at IS NULL
    """,
)
# A member that has ended can no longer take part: its cluster is over, any other is tried again.
REQUEUE_CLUSTERS: Final = Statement(
    "requeue_clusters",
    f"""
    UPDATE cluster_job c SET updated_at = %(now)s, status = CASE WHEN EXISTS (
        SELECT FROM cluster_member m
        LEFT JOIN evaluation v ON v.id = m.evaluation
        LEFT JOIN derivation_build b ON b.derivation = m.derivation
        WHERE m.cluster_job = c.id
          AND ({any_of("v.status", EVALUATION_TERMINAL)}
               OR {any_of("b.status", TERMINAL_SUCCESS | REQUEUEABLE)})
    ) THEN {int(ClusterStatus.ABORTED)} ELSE {int(ClusterStatus.QUEUED)} END
    WHERE c.status = {int(ClusterStatus.RUNNING)}
    """,
)


@attrs.frozen
class Recovered:
    """How much a start had to pick up."""

    assignments: int
    builds: int
    evaluations: int


async def recover_interrupted_work(connection: Connection, now: datetime) -> Recovered:
    """Close what was open, requeue what was running. All or nothing."""
    async with graph_transaction(connection, now) as tx:
        abandoned = await tx.ids(ABANDON_OPEN, now=now)
        await tx.run(ABORT_RUNNING_ATTEMPTS, now=now)
        builds = await tx.ids(REQUEUE_ALL_BUILDING, now=now)
        queued = await tx.ids(ALL_QUEUED)
        await settle_held(tx, {*queued, *(i for i in abandoned if i is not None)})
        await skip_unwanted(tx, await unpromote_ungated(tx, queued))
        evaluations = await tx.ids(REQUEUE_EVALUATIONS, now=now)
        await tx.run(CLOSE_CLUSTER_ATTEMPTS, now=now)
        await tx.run(REQUEUE_CLUSTERS, now=now)
        await tx.run(UNPARK_DRAINING, now=now)
        await finish_evaluations(tx)
    return Recovered(len(abandoned), len(builds), len(evaluations))
