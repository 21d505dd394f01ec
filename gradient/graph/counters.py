"""The five counters of an evaluation: read, folded, recounted. Layer: graph.

Triggers append signed rows to the ledger; the fold adds them to the evaluation's columns. Counters only
ever say "not yet": a zero is confirmed by `reachability.eval_blocked`.
Source: seed "Queueing and Counters", Evaluation Counters.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs

from gradient.graph.pg import Connection, execute, fetch_value
from gradient.graph.predicates import live_evaluation, past_walk
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered

# The advisory lock of the fold; the one beside the instance lock.
FOLD_LOCK: Final = 640

# What the ledger holds of the evaluation `v`, and no fold has added to its columns yet.
UNFOLDED: Final = """LATERAL (
        SELECT coalesce(sum(x.named), 0)::integer AS named, coalesce(sum(x.active), 0)::integer AS active,
               coalesce(sum(x.failed), 0)::integer AS failed, coalesce(sum(x.queued), 0)::integer AS queued,
               coalesce(sum(x.building), 0)::integer AS building
        FROM evaluation_shared_build_delta x WHERE x.evaluation = v.id
    ) unfolded"""


def counter(name: str) -> str:
    """A counter of the evaluation `v` as it is now, in a statement that reads UNFOLDED."""
    return f"v.{name}_shared_builds + unfolded.{name}"


_ALL_COUNTERS: Final = ", ".join(map(counter, ("named", "active", "failed", "queued", "building")))
EVAL_COUNTERS: Final = Statement(
    "eval_counters",
    f"SELECT v.id, {_ALL_COUNTERS} FROM evaluation v, {UNFOLDED} WHERE v.id = ANY(%(ids)s)",
)
TRY_FOLD_LOCK: Final = Statement("try_fold_lock", f"SELECT pg_try_advisory_xact_lock({FOLD_LOCK})")
TAKE_FOLD_LOCK: Final = Statement("take_fold_lock", f"SELECT pg_advisory_xact_lock({FOLD_LOCK})")
# Skips every evaluation row that another transaction holds: those deltas wait for the next pass.
FOLD_DELTAS: Final = Statement(
    "fold_shared_build_deltas",
    """
    WITH free AS (
        SELECT v.id FROM evaluation v
        WHERE v.id IN (SELECT evaluation FROM evaluation_shared_build_delta)
        ORDER BY v.id FOR NO KEY UPDATE SKIP LOCKED
    ), taken AS (
        DELETE FROM evaluation_shared_build_delta x USING free
        WHERE x.evaluation = free.id
        RETURNING x.evaluation, x.named, x.active, x.failed, x.queued, x.building
    ), summed AS (
        SELECT evaluation, sum(named) AS named, sum(active) AS active, sum(failed) AS failed,
               sum(queued) AS queued, sum(building) AS building
        FROM taken GROUP BY evaluation
    )
    UPDATE evaluation v
    SET named_shared_builds = v.named_shared_builds + s.named,
        active_shared_builds = v.active_shared_builds + s.active,
        failed_shared_builds = v.failed_shared_builds + s.failed,
        queued_shared_builds = v.queued_shared_builds + s.queued,
        building_shared_builds = v.building_shared_builds + s.building
    FROM summed s WHERE v.id = s.evaluation
    """,
)
# A deleted evaluation leaves its deltas behind: the ledger has no foreign key.
DROP_ORPHAN_DELTAS: Final = Statement(
    "drop_orphan_deltas",
    """
    DELETE FROM evaluation_shared_build_delta x
    WHERE NOT EXISTS (SELECT FROM evaluation v WHERE v.id = x.evaluation)
    """,
)
_COUNTED = """count(b.derivation)::integer AS named, coalesce(sum(c.active), 0)::integer AS active,
               coalesce(sum(c.failed), 0)::integer AS failed, coalesce(sum(c.queued), 0)::integer AS queued,
               coalesce(sum(c.building), 0)::integer AS building"""
# Counts first and locks then: what is counted is of one moment with the deltas that go, and nobody waits
# for the count of a large evaluation.
RECOUNT_EVALUATIONS: Final = Statement(
    "recount_evaluations",
    f"""
    WITH counted AS MATERIALIZED (
        SELECT v.id, {_COUNTED}
        FROM evaluation v
        LEFT JOIN build_job j ON j.evaluation = v.id
        LEFT JOIN derivation_build b ON b.derivation = j.derivation
        LEFT JOIN LATERAL evaluation_shared_build_counts(b.status, b.wanted) c ON b.derivation IS NOT NULL
        WHERE v.id = ANY(%(ids)s)
        GROUP BY v.id
    ), free AS (
        SELECT v.id FROM counted n JOIN evaluation v ON v.id = n.id
        WHERE {live_evaluation("v")} OR v.id = %(ending)s
        ORDER BY v.id FOR NO KEY UPDATE OF v SKIP LOCKED
    ), dropped AS (
        DELETE FROM evaluation_shared_build_delta x USING free WHERE x.evaluation = free.id
    )
    UPDATE evaluation v
    SET named_shared_builds = n.named, active_shared_builds = n.active, failed_shared_builds = n.failed,
        queued_shared_builds = n.queued, building_shared_builds = n.building
    FROM counted n JOIN free ON free.id = n.id WHERE v.id = n.id
    RETURNING v.id
    """,
)
# Live evaluations whose counters are wrong, or that nothing keeps from their verdict; by one moment's look.
EVALUATION_DRIFT: Final = Statement(
    "evaluation_drift",
    f"""
    SELECT v.id, drifted, wedged FROM evaluation v, {UNFOLDED}, LATERAL (
        SELECT {_COUNTED}
        FROM build_job j JOIN derivation_build b ON b.derivation = j.derivation,
        LATERAL evaluation_shared_build_counts(b.status, b.wanted) c
        WHERE j.evaluation = v.id
    ) n, LATERAL (
        SELECT ({_ALL_COUNTERS}) <> (n.named, n.active, n.failed, n.queued, n.building) AS drifted,
               n.active = 0 AND {past_walk("v")} AS wedged
    ) found
    WHERE {live_evaluation("v")} AND (drifted OR wedged)
    ORDER BY v.id
    """,
)


@attrs.frozen
class Counters:
    """Shared builds an evaluation names, by what they mean for it."""

    named: int
    active: int
    failed: int
    queued: int
    building: int


async def eval_counters(tx: Transaction, evaluations: Collection[int]) -> dict[int, Counters]:
    """Folded columns plus unfolded deltas of each evaluation."""
    rows = await tx.rows(EVAL_COUNTERS, ids=ordered(evaluations))
    return {evaluation: Counters(*counts) for evaluation, *counts in rows}


async def fold_shared_build_deltas(connection: Connection) -> bool:
    """Fold the ledger into the evaluations; False when another fold is running.

    Runs in its own transaction on a connection of the caller's. Never waits for an evaluation row.
    """
    async with connection.transaction():
        if not await fetch_value(connection, TRY_FOLD_LOCK):
            return False
        await execute(connection, FOLD_DELTAS)
        await execute(connection, DROP_ORPHAN_DELTAS)
    return True


async def recount_evaluations(connection: Connection, evaluations: Collection[int]) -> None:
    """Count evaluations afresh under the fold lock, skipping those another transaction holds."""
    async with connection.transaction():
        await execute(connection, TAKE_FOLD_LOCK)
        await execute(connection, RECOUNT_EVALUATIONS, {"ids": ordered(evaluations), "ending": None})


async def count_at_the_end(tx: Transaction, evaluation: int) -> None:
    """Count an evaluation that this transaction has ended, and whose builds with it. Its row is ours, so no
    fold comes between."""
    await tx.run(RECOUNT_EVALUATIONS, ids=[evaluation], ending=evaluation)
