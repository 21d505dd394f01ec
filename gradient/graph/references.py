"""Runtime edges: from the references of a NAR to the derivations that make what it refers to.

Layer: graph. Both sides may come first: the NAR before the producer is known, or the derivation before
its NAR. No edge is recorded between two derivations that produce the same store path: that is a
self-reference, and counting it would make the two wait for each other for ever (docs/adr/0010).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import attrs

from gradient.graph.predicates import any_of
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import EdgeKind

# `owner` has the output whose NAR refers, `target` the output referred to; `ids` bounds either side.
_RUNTIME_EDGES = f"""
    INSERT INTO derivation_dependency AS e (derivation, dependency, kind)
    SELECT DISTINCT owner.derivation, target.derivation, {int(EdgeKind.RUNTIME)}
    FROM derivation_output {{start}}
    WHERE {{bound}} AND owner.derivation <> target.derivation
      AND NOT EXISTS (SELECT FROM derivation_output a JOIN derivation_output b ON b.hash = a.hash
                      WHERE a.derivation = owner.derivation AND b.derivation = target.derivation)
    ORDER BY 1, 2
    ON CONFLICT (derivation, dependency) DO UPDATE SET kind = {int(EdgeKind.BOTH)}
        WHERE {any_of("e.kind", {EdgeKind.BUILD})}
    RETURNING e.derivation, e.dependency, e.kind
"""
ADD_REFERENCES_OF_OWNERS: Final = Statement(
    "add_references_of_owners",
    _RUNTIME_EDGES.format(
        start="""owner
    JOIN cached_path p ON p.hash = owner.hash
    JOIN cached_path_reference r ON r.cached_path = p.id
    JOIN derivation_output target ON target.hash = r.hash""",
        bound="owner.derivation = ANY(%(ids)s)",
    ),
)
ADD_REFERENCES_TO_TARGETS: Final = Statement(
    "add_references_to_targets",
    _RUNTIME_EDGES.format(
        start="""target
    JOIN cached_path_reference r ON r.hash = target.hash
    JOIN cached_path p ON p.id = r.cached_path
    JOIN derivation_output owner ON owner.hash = p.hash""",
        bound="target.derivation = ANY(%(ids)s)",
    ),
)


@attrs.frozen
class Referring:
    """Derivations that gained runtime edges; `links` are the edges (derivation, dependency) where there was
    none, and so another dependency to wait for."""

    grown: frozenset[int] = frozenset()
    links: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]]) -> Referring:
        """From rows of (derivation, dependency, the edge's kind now)."""
        edges = list(rows)
        return cls(
            frozenset(derivation for derivation, _, _ in edges),
            tuple((above, below) for above, below, kind in edges if kind == EdgeKind.RUNTIME),
        )


async def references_of(tx: Transaction, owners: Collection[int]) -> Referring:
    """Record the runtime edges of derivations whose NARs landed."""
    return Referring.of(await tx.rows(ADD_REFERENCES_OF_OWNERS, ids=ordered(owners)) if owners else ())


async def adopt_runtime_references(tx: Transaction, new: Collection[int]) -> frozenset[int]:
    """Record the runtime edges that waited for the output rows of `new`, on either side; returns the
    derivations whose edges grew."""
    if not new:
        return frozenset()
    owners = await references_of(tx, new)
    return owners.grown | frozenset(await tx.ids(ADD_REFERENCES_TO_TARGETS, ids=ordered(new)))
