"""Circles among build inputs: refused with the batch that closes one. Layer: graph.

No Nix makes one, but a worker may say so, in one batch or over several; its derivations would wait for each
other for ever. What is in a circle is walked and never recorded down to its leaves, so only such derivations
are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from gradient.graph.predicates import build_edge
from gradient.graph.statements import Statement
from gradient.graph.transaction import Rejected, Transaction, ordered
from gradient.nix.derivation import drv_path

# Members of a circle that a message names.
MAX_NAMED: Final = 5

# The inputs of `r.derivation` that are walked, but not down to their leaves.
_BEGUN_BELOW: Final = f"""LATERAL (
        SELECT i.id FROM derivation_dependency e JOIN derivation i ON i.id = e.dependency
        WHERE e.derivation = r.derivation AND {build_edge("e")} AND i.walked AND i.unwalked_inputs > 0
        OFFSET 0
    ) below"""
# Build edges between walked derivations with unrecorded subtrees, from `ids` down.
INCOMPLETE_BUILD_EDGES: Final = Statement(
    "incomplete_build_edges",
    f"""
    WITH RECURSIVE region (derivation) AS (
        SELECT unnest(%(ids)s::bigint[])
      UNION
        SELECT below.id FROM region r, {_BEGUN_BELOW}
    )
    SELECT r.derivation, below.id FROM region r, {_BEGUN_BELOW}
    """,
)
DERIVATION_NAMES: Final = Statement(
    "derivation_names", "SELECT id, hash, name FROM derivation WHERE id = ANY(%(ids)s)"
)


async def refuse_circles(tx: Transaction, begun: Collection[int], fresh: Collection[int]) -> None:
    """Raise Rejected when the newly walked derivations `fresh` have closed a circle through earlier ones; in
    words that name one of them. Such a circle goes through their inputs that are `begun`: walked, but not
    down to their leaves."""
    if not begun:
        return
    below = defaultdict(list)
    for above, dependency in await tx.rows(INCOMPLETE_BUILD_EDGES, ids=ordered(begun)):
        below[above].append(dependency)
    circle = _find_circle(below)
    if circle:
        start = next(n for n, member in enumerate(circle) if member in fresh)
        paths = {i: drv_path(*of) for i, *of in await tx.rows(DERIVATION_NAMES, ids=ordered(circle))}
        raise circle_refused([paths[i] for i in circle[start:] + circle[:start]])


def _find_circle(below: Mapping[int, Collection[int]]) -> list[int]:
    """The members of a circle in this graph, in order; empty without one."""
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return in_order(error)
    return []


def in_order(error: CycleError) -> list[Any]:
    """The members of a circle, each before one of its inputs."""
    members: list[Any] = error.args[1]
    return members[:0:-1]


def circle_refused(drv_paths: Sequence[str]) -> Rejected:
    """The refusal of a circle of derivations."""
    first, *others = drv_paths
    return Rejected(f"{first}: it needs itself, through {', '.join(others[:MAX_NAMED])}")
