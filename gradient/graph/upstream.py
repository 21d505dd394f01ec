"""What the upstream caches answered: which shared builds one of them serves. Layer: graph, run by the graph
writer.

A shared build that is served becomes a passthrough: its outputs are fetched into our cache, and nothing is
built for it. One that nobody serves is a builder from here on. Either way the need below it moves.
Source: seed "Queueing and Counters", Start Condition Columns (an upstream copy is never fetchable) and
Callers of update_need (upstream hit, probe answer).
"""

from __future__ import annotations

from typing import Final

import attrs

from gradient.graph.can_start import promote
from gradient.graph.moves import BuildChange
from gradient.graph.need import settle_held, skip_unwanted, update_and_settle_need
from gradient.graph.predicates import any_of
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction
from gradient.model import TERMINAL_FAILURE, TERMINAL_SUCCESS, BuildStatus

# Only what the answer changes. A success stays one, and a failure that an upstream serves is fetched
# instead. Answers the status before and after.
ANSWER_PROBE: Final = Statement(
    "answer_probe",
    f"""
    WITH answered AS (
        SELECT b.derivation, b.status, a.served AND NOT {any_of("b.status", TERMINAL_SUCCESS)} AS served,
               a.served AND {any_of("b.status", TERMINAL_FAILURE)} AS again
        FROM unnest(%(ids)s::bigint[], %(served)s::boolean[]) AS a (derivation, served)
        JOIN derivation_build b ON b.derivation = a.derivation
        WHERE NOT b.probed
           OR a.served AND NOT b.cache_available AND NOT {any_of("b.status", TERMINAL_SUCCESS)}
        ORDER BY b.derivation FOR NO KEY UPDATE OF b
    )
    UPDATE derivation_build b
    SET probed = true, cache_available = b.cache_available OR a.served,
        status = CASE WHEN a.again THEN {int(BuildStatus.CREATED)} ELSE b.status END,
        attempt = CASE WHEN a.again THEN 0 ELSE b.attempt END,
        updated_at = CASE WHEN a.again THEN %(now)s ELSE b.updated_at END
    FROM answered a WHERE b.derivation = a.derivation
    RETURNING b.derivation, a.status, b.status
    """,
)


@attrs.frozen
class AnswerProbe:
    """The upstream caches answered for these shared builds (writer message): every output of `served` is to
    be had from one of them, of `missed` from none. What got no answer is in neither.

    Answers the shared builds that the answer changed.
    """

    served: tuple[int, ...] = ()
    missed: tuple[int, ...] = ()

    async def apply(self, tx: Transaction) -> tuple[int, ...]:
        """Mark them, move the need below them, queue what may start."""
        answers = dict.fromkeys(self.missed, False) | dict.fromkeys(self.served, True)
        ids = sorted(answers)
        rows = await tx.rows(ANSWER_PROBE, ids=ids, served=[answers[i] for i in ids], now=tx.now)
        tx.moves.change(
            BuildChange(i, BuildStatus(old), BuildStatus(new)) for i, old, new in rows if old != new
        )
        changed = sorted(i for i, _, _ in rows)
        # In full: a passthrough needs none of its build inputs, and the mark of a failed row means nothing.
        await update_and_settle_need(tx, changed)
        await settle_held(tx, changed)
        await skip_unwanted(tx, changed)
        await promote(tx, changed)
        return tuple(changed)
