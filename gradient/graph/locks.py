"""The proof that shared builds are locked. Layer: graph.

A flag change and its spread must share one transaction under row locks taken in derivation order
(seed "Queueing and Counters"). Functions that spread take the proof instead of trusting the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered

LOCK_SHARED_BUILDS: Final = Statement(
    "lock_shared_builds",
    """
    SELECT derivation FROM derivation_build
    WHERE derivation = ANY(%(ids)s) ORDER BY derivation FOR NO KEY UPDATE
    """,
)


class LockNotHeld(AssertionError):
    """A spread without the lock of its own transaction: a bug in the caller."""


@attrs.frozen(eq=False)
class SharedBuildLock:
    """Row locks on `ids`, valid for `transaction` alone."""

    transaction: Transaction
    ids: frozenset[int]

    def check(self, tx: Transaction, ids: Iterable[int]) -> None:
        """Raise LockNotHeld unless this proof is of `tx` and covers `ids`."""
        if self.transaction is not tx:
            raise LockNotHeld("the SharedBuildLock belongs to another transaction")
        if not self.ids.issuperset(ids):
            raise LockNotHeld(f"not locked: {sorted(set(ids) - self.ids)[:5]}")


async def lock_shared_builds(
    tx: Transaction, ids: Iterable[int], held: SharedBuildLock | None = None
) -> SharedBuildLock:
    """Lock the shared builds in derivation order, FOR NO KEY UPDATE, and return the proof.

    What `held` covers already is not locked again.
    """
    wanted = set(ids)
    covered = frozenset() if held is None else held.ids
    if held is not None:
        held.check(tx, ())
    if wanted - covered:
        await tx.rows(LOCK_SHARED_BUILDS, ids=ordered(wanted - covered))
    return SharedBuildLock(tx, covered | wanted)


def proven(tx: Transaction, ids: Iterable[int]) -> SharedBuildLock:
    """The proof for rows that a statement of this transaction has locked in derivation order itself."""
    return SharedBuildLock(tx, frozenset(ids))
