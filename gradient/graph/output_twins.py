"""Derivations of one store path: all of their outputs are the same, or the batch is refused. Layer: graph.

Fixed-output derivations of one content share their one output; derivations that differ only in those among
their inputs share every output (Nix manual, "Derivation output path"). Two that shared some outputs only
would each wait for what the other one makes, and a closure with one of them would never be complete.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gradient.graph.statements import Statement
from gradient.graph.transaction import Rejected, Transaction, ordered
from gradient.nix.derivation import drv_path

_NOT_SHARED = """
    EXISTS (SELECT FROM derivation_output own WHERE own.derivation = {one}
            AND NOT EXISTS (SELECT FROM derivation_output same
                            WHERE same.derivation = {other} AND same.hash = own.hash))
"""
PARTIAL_TWINS: Final = Statement(
    "partial_twins",
    f"""
    SELECT d.hash, d.name, t.hash, t.name
    FROM derivation_output o
    JOIN derivation_output shared ON shared.hash = o.hash AND shared.derivation <> o.derivation
    JOIN derivation d ON d.id = o.derivation
    JOIN derivation t ON t.id = shared.derivation
    WHERE o.derivation = ANY(%(ids)s)
      AND ({_NOT_SHARED.format(one="d.id", other="t.id")} OR {_NOT_SHARED.format(one="t.id", other="d.id")})
    ORDER BY d.id, t.id LIMIT 1
    """,
)


async def refuse_partial_twins(tx: Transaction, new: Collection[int]) -> None:
    """Raises Rejected when one of `new`, whose outputs were just written, shares only some of them with
    another derivation."""
    for hash_part, name, twin_hash, twin_name in await tx.rows(PARTIAL_TWINS, ids=ordered(new)):
        raise Rejected(
            f"{drv_path(hash_part, name)}: it shares some of its outputs with"
            f" {drv_path(twin_hash, twin_name)}, and others not; no Nix makes such derivations"
        )
