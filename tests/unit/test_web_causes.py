"""From edges between failed builds to the causes of each."""

from __future__ import annotations

from gradient.graph.failure_causes import MAX_CAUSES, Cause, FailedEdge, root_causes
from gradient.model import BuildStatus


def edge(build: int, dependency: int, status: BuildStatus = BuildStatus.DEPENDENCY_FAILED) -> FailedEdge:
    return FailedEdge(build, Cause(dependency, str(dependency), status))


def failed(build: int, dependency: int) -> FailedEdge:
    return edge(build, dependency, BuildStatus.FAILED_PERMANENT)


def causes(*edges: FailedEdge) -> dict[int, list[int]]:
    return {build: [cause.build for cause in found] for build, found in root_causes(edges).items()}


def test_the_cause_goes_up_a_chain() -> None:
    assert causes(edge(4, 3), edge(3, 2), failed(2, 1)) == {2: [1], 3: [1], 4: [1]}


def test_a_diamond_over_one_failure_has_one_cause() -> None:
    assert causes(edge(4, 2), edge(4, 3), failed(2, 1), failed(3, 1)) == {2: [1], 3: [1], 4: [1]}


def test_several_causes_are_all_named_lowest_first() -> None:
    assert causes(edge(9, 8), failed(9, 5), failed(8, 2)) == {9: [2, 5], 8: [2]}


def test_no_more_than_a_person_reads() -> None:
    found = causes(*(failed(100, i) for i in range(50)), edge(101, 100))
    assert found == {100: list(range(MAX_CAUSES)), 101: list(range(MAX_CAUSES))}


def test_without_a_way_down_there_is_no_cause() -> None:
    assert causes(edge(3, 2)) == {}


def test_a_circle_ends() -> None:
    # Runtime references may point back.
    assert causes(edge(2, 3), edge(3, 2), failed(3, 1)) == {2: [1], 3: [1]}
