"""Which failed builds stand behind a DependencyFailed one. Layer: graph, reads only.

"A dependency failed" helps nobody; the name of the build that did, does. One query walks down from the
builds in question through failed dependencies only and brings the edges home; what follows is pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import attrs

from gradient.graph.pg import Connection, fetch_all
from gradient.graph.predicates import any_of
from gradient.graph.statements import Statement
from gradient.model import REQUEUEABLE, BuildStatus

# Edges of one answer. A failure under a whole package set has more: then some builds stay without a
# named cause, and their page says that a dependency failed.
MAX_EDGES: Final = 20_000
# Causes named for one build; a person follows one, and sees that there are more.
MAX_CAUSES: Final = 3

FAILED_EDGES: Final = Statement(
    "failed_edges",
    f"""
    WITH RECURSIVE below (derivation) AS (
        SELECT unnest(%(ids)s::bigint[])
      UNION
        SELECT e.dependency FROM below w
        JOIN derivation_build b ON b.derivation = w.derivation
             AND b.status = {int(BuildStatus.DEPENDENCY_FAILED)}
        JOIN derivation_dependency e ON e.derivation = w.derivation
        JOIN derivation_build x ON x.derivation = e.dependency AND {any_of("x.status", REQUEUEABLE)}
    )
    SELECT e.derivation, e.dependency, x.status, d.name
    FROM below w
    JOIN derivation_build b ON b.derivation = w.derivation
         AND b.status = {int(BuildStatus.DEPENDENCY_FAILED)}
    JOIN derivation_dependency e ON e.derivation = w.derivation
    JOIN derivation_build x ON x.derivation = e.dependency AND {any_of("x.status", REQUEUEABLE)}
    JOIN derivation d ON d.id = e.dependency
    LIMIT {MAX_EDGES}
    """,
)


@attrs.frozen
class Cause:
    """A build that failed by itself, or was aborted."""

    build: int
    name: str
    status: BuildStatus


@attrs.frozen
class FailedEdge:
    """A DependencyFailed build and one of its dependencies that failed."""

    build: int
    dependency: Cause


async def failure_causes(
    connection: Connection, dependency_failed: Collection[int]
) -> dict[int, tuple[Cause, ...]]:
    """The causes of each of these DependencyFailed builds, at most MAX_CAUSES each."""
    if not dependency_failed:
        return {}
    rows = await fetch_all(connection, FAILED_EDGES, {"ids": sorted(dependency_failed)})
    edges = [
        FailedEdge(build, Cause(cause, name, BuildStatus(status))) for build, cause, status, name in rows
    ]
    causes = root_causes(edges)
    return {build: causes[build] for build in dependency_failed if build in causes}


def root_causes(edges: Iterable[FailedEdge]) -> Mapping[int, tuple[Cause, ...]]:
    """For each build with a path down to a cause: its causes, lowest ids first, at most MAX_CAUSES.

    Spreads upwards from the causes, one step a round, and stops at what a build has enough of. Pure.
    """
    above: dict[int, list[int]] = {}
    found: dict[int, tuple[Cause, ...]] = {}
    for edge in edges:
        above.setdefault(edge.dependency.build, []).append(edge.build)
        if edge.dependency.status is not BuildStatus.DEPENDENCY_FAILED:
            found[edge.build] = _merged(found.get(edge.build, ()), (edge.dependency,))
    frontier = set(found)
    while frontier:
        moved = set()
        for build in frontier:
            for parent in above.get(build, ()):
                before = found.get(parent, ())
                if (after := _merged(before, found[build])) != before:
                    found[parent] = after
                    moved.add(parent)
        frontier = moved
    return found


def _merged(ours: tuple[Cause, ...], theirs: tuple[Cause, ...]) -> tuple[Cause, ...]:
    # Each round only replaces causes by smaller ones, so the rounds end.
    by_id = {cause.build: cause for cause in (*ours, *theirs)}
    return tuple(by_id[build] for build in sorted(by_id)[:MAX_CAUSES])
