"""Exact reads over what an evaluation names. Layer: graph."""

from __future__ import annotations

from typing import Final

from gradient.graph.predicates import blocks_evaluation
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction

EVAL_BLOCKED: Final = Statement(
    "eval_blocked",
    f"""
    SELECT EXISTS (SELECT FROM build_job j JOIN derivation_build b ON b.derivation = j.derivation
                   WHERE j.evaluation = %(evaluation)s AND {blocks_evaluation("b")})
    """,
)


async def eval_blocked(tx: Transaction, evaluation: int) -> bool:
    """Whether any named shared build still keeps the evaluation waiting: confirms a counter's zero."""
    return bool(await tx.value(EVAL_BLOCKED, evaluation=evaluation))
