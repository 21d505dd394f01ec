"""The bodies of the schema's functions and triggers do what the predicates say: run over every state there
is.

`test_predicates` compares words and sets; here each body moves rows, and what it says of them is compared
with the predicate before and after.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest

from gradient.graph.pg import Connection, execute, fetch_all
from gradient.graph.predicates import (
    blocks_evaluation,
    build_edge,
    live_evaluation,
    present_predicate,
    runtime_edge,
    shared_build_complete_predicate,
)
from gradient.model import EVALUATION_ACTIVE, REQUEUEABLE, BuildStatus, EdgeKind, EvaluationStatus

STATES = list(itertools.product(BuildStatus, (False, True)))
# Outputs of a derivation: which of them are in the cache.
OUTPUTS: tuple[tuple[bool, ...], ...] = ((), (True,), (False,), (True, True), (True, False))
KINDS: tuple[EdgeKind | None, ...] = (None, *EdgeKind)


async def bodies(connection: Connection) -> dict[str, str]:
    """The functions as they are after every migration, each run of blanks one blank."""
    query = "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = current_schema()::regnamespace"
    return {name: " ".join(body.split()) for name, body in await fetch_all(connection, query)}


async def derivations(connection: Connection, count: int) -> list[int]:
    """So many derivations with a shared build each."""
    rows = await fetch_all(
        connection,
        f"""
        INSERT INTO derivation (hash, name, created_at) SELECT 'h' || i, 'd', now()
        FROM generate_series(1, {count}) i RETURNING id
        """,
    )
    await execute(
        connection,
        """
        INSERT INTO derivation_build (derivation, created_at, updated_at)
        SELECT id, now(), now() FROM derivation
        """,
    )
    return [row[0] for row in rows]


async def edges(
    connection: Connection, above: int, kinds: tuple[EdgeKind | None, ...], below: list[int]
) -> None:
    for kind, dependency in zip(kinds, below, strict=True):
        if kind is not None:
            await execute(
                connection, f"INSERT INTO derivation_dependency VALUES ({above}, {dependency}, {int(kind)})"
            )


# --- ripple_missing_runtime_deps ------------------------------------------------------------------


async def a_level(connection: Connection, direction: int) -> list[int]:
    """Rows above two that flip, and one that does not: every kind of edge to each, every state of outputs.

    Before a flip to complete, each row counts exactly what it refers to; before one to broken, nothing.
    """
    cases = list(itertools.product(KINDS, KINDS, KINDS, OUTPUTS))
    ids = await derivations(connection, 3 + len(cases))
    below, above = ids[:3], ids[3:]
    for i, (*kinds, outputs) in zip(above, cases, strict=True):
        await edges(connection, i, tuple(kinds), below)
        for number, cached in enumerate(outputs):
            output = f"({i}, 'o{number}', 'x', 'x', NULL, {cached})"
            await execute(connection, f"INSERT INTO derivation_output VALUES {output}")
    # The third is missing all the time.
    counted = f"{below}" if direction < 0 else f"[{below[2]}]"
    await execute(
        connection,
        f"""
        UPDATE derivation_build b SET missing_runtime_deps = (
            SELECT count(*) FROM derivation_dependency e WHERE e.derivation = b.derivation
              AND {runtime_edge("e")} AND e.dependency = ANY (ARRAY{counted}))
        """,
    )
    return below[:2]


async def complete(connection: Connection) -> set[int]:
    query = f"SELECT b.derivation FROM derivation_build b WHERE {shared_build_complete_predicate('b')}"
    return {row[0] for row in await fetch_all(connection, query)}


@pytest.mark.parametrize("direction", [-1, 1])
async def test_what_ripples_is_what_the_predicate_says_flipped(
    connection: Connection, direction: int
) -> None:
    flipped = await a_level(connection, direction)
    before = await complete(connection)
    rows = await fetch_all(connection, f"SELECT ripple_missing_runtime_deps(ARRAY{flipped}, {direction})")
    answered = [row[0] for row in rows]
    after = await complete(connection)
    assert len(answered) == len(set(answered))
    assert set(answered) == before ^ after
    assert answered, "nothing was shown"
    missing = {-1: 1, 1: 3}[direction]  # of the three, from now on
    below = [flipped[0] + n for n in range(3)]
    recount = f"""
        SELECT b.derivation, b.missing_runtime_deps, n FROM derivation_build b, LATERAL (
            SELECT count(*) AS n FROM derivation_dependency e WHERE e.derivation = b.derivation
              AND {runtime_edge("e")} AND e.dependency = ANY (ARRAY{below[3 - missing :]})) c
        WHERE b.missing_runtime_deps <> n
    """
    assert await fetch_all(connection, recount) == []


# --- ripple_unwalked_inputs -----------------------------------------------------------------------


@pytest.mark.parametrize("direction", [-1, 1])
async def test_what_is_recorded_ripples_over_build_edges(connection: Connection, direction: int) -> None:
    cases = list(itertools.product(KINDS, KINDS, KINDS, (False, True)))
    ids = await derivations(connection, 3 + len(cases))
    below, above = ids[:3], ids[3:]
    for i, (*kinds, walked) in zip(above, cases, strict=True):
        await edges(connection, i, tuple(kinds), below)
        await execute(connection, f"UPDATE derivation SET walked = {walked} WHERE id = {i}")
    counting = f"""
        (SELECT count(*) FROM derivation_dependency e WHERE e.derivation = d.id AND {build_edge("e")}
           AND e.dependency = ANY (ARRAY{{}}))
    """
    counted = below if direction < 0 else below[2:]
    await execute(connection, f"UPDATE derivation d SET unwalked_inputs = {counting.format(counted)}")
    recorded = "SELECT id FROM derivation d WHERE walked AND unwalked_inputs = 0"
    before = {row[0] for row in await fetch_all(connection, recorded)}
    rows = await fetch_all(connection, f"SELECT ripple_unwalked_inputs(ARRAY{below[:2]}, {direction})")
    answered = [row[0] for row in rows]
    after = {row[0] for row in await fetch_all(connection, recorded)}
    assert len(answered) == len(set(answered))
    assert set(answered) == before ^ after
    assert answered
    counted = below[2:] if direction < 0 else below
    drift = f"SELECT d.id FROM derivation d WHERE d.unwalked_inputs <> {counting.format(counted)}"
    assert await fetch_all(connection, drift) == []


@pytest.mark.parametrize("name", ["ripple_missing_runtime_deps", "ripple_unwalked_inputs"])
async def test_a_ripple_goes_on_level_by_level(connection: Connection, name: str) -> None:
    """A chain of both kinds of edge, every row complete but for the one below it; and back."""
    depth = 30
    ids = await derivations(connection, depth)
    await execute(
        connection,
        f"""
        INSERT INTO derivation_dependency
        SELECT id, id - 1, {int(EdgeKind.BOTH)} FROM derivation WHERE id > {ids[0]}
        """,
    )
    await execute(
        connection, f"UPDATE derivation SET walked = true, unwalked_inputs = (id > {ids[0]})::integer"
    )
    await execute(
        connection, f"UPDATE derivation_build SET missing_runtime_deps = (derivation > {ids[0]})::integer"
    )
    await execute(
        connection, "INSERT INTO derivation_output SELECT id, 'out', 'x', 'x', NULL, true FROM derivation"
    )
    for direction, count in ((-1, 0), (1, depth - 1)):
        rows = await fetch_all(connection, f"SELECT {name}(ARRAY[{ids[0]}]::bigint[], {direction})")
        assert [row[0] for row in rows] == ids[1:]
        sums = """
            SELECT sum(missing_runtime_deps), sum(unwalked_inputs)
            FROM derivation_build JOIN derivation ON id = derivation
        """
        ((missing, unwalked),) = await fetch_all(connection, sums)
        assert (missing if name == "ripple_missing_runtime_deps" else unwalked) == count
    assert await fetch_all(connection, f"SELECT {name}('{{}}', 1)") == []


# --- the delta ledger -----------------------------------------------------------------------------


def counts(status: BuildStatus, wanted: bool, blocks: bool) -> tuple[int, ...]:
    """Active, failed, queued, building: what one named shared build adds."""
    return (
        int(blocks),
        int(status in REQUEUEABLE),
        int(status is BuildStatus.QUEUED),
        int(status is BuildStatus.BUILDING),
    )


async def memberships(connection: Connection) -> dict[tuple[BuildStatus, bool], tuple[int, ...]]:
    """By the predicate, for every state."""
    rows = ", ".join(f"({int(status)}, {wanted})" for status, wanted in STATES)
    query = f"SELECT {blocks_evaluation('b')} FROM (VALUES {rows}) b (status, wanted)"
    blocking = [row[0] for row in await fetch_all(connection, query)]
    return {state: counts(*state, blocks) for state, blocks in zip(STATES, blocking, strict=True)}


async def test_every_move_of_a_build_leaves_its_difference(connection: Connection) -> None:
    """From every state to every state: one build and one evaluation for each."""
    counted = await memberships(connection)
    moves = list(itertools.product(STATES, STATES))
    ids = await derivations(connection, len(moves))
    await execute(connection, "INSERT INTO project (name, created_at) VALUES ('p', now())")
    await execute(
        connection,
        f"""
        INSERT INTO evaluation (id, project, concurrent, created_at, updated_at) OVERRIDING SYSTEM VALUE
        SELECT i, 1, true, now(), now() FROM unnest(ARRAY{ids}) i
        """,
    )

    async def move_to(states: list[tuple[BuildStatus, bool]]) -> None:
        rows = ", ".join(f"({i}, {int(s)}, {w})" for i, (s, w) in zip(ids, states, strict=True))
        await execute(
            connection,
            f"""
            UPDATE derivation_build b SET status = n.status, wanted = n.wanted
            FROM (VALUES {rows}) n (i, status, wanted) WHERE b.derivation = n.i
            """,
        )

    async def ledger() -> dict[int, tuple[int, ...]]:
        query = (
            "SELECT evaluation, named, active, failed, queued, building FROM evaluation_shared_build_delta"
        )
        found = {row[0]: row[1:] for row in await fetch_all(connection, query)}
        await execute(connection, "DELETE FROM evaluation_shared_build_delta")
        return found

    await move_to([old for old, _ in moves])
    await execute(connection, f"INSERT INTO build_job SELECT i, i, false, now() FROM unnest(ARRAY{ids}) i")
    assert await ledger() == {i: (1, *counted[old]) for i, (old, _) in zip(ids, moves, strict=True)}
    await move_to([new for _, new in moves])
    expected = {}
    for i, (old, new) in zip(ids, moves, strict=True):
        difference = tuple(b - a for a, b in zip(counted[old], counted[new], strict=True))
        if any(difference):
            expected[i] = (0, *difference)
    assert await ledger() == expected
    await execute(connection, "DELETE FROM build_job")
    gone = {i: (-1, *(-n for n in counted[new])) for i, (_, new) in zip(ids, moves, strict=True)}
    assert await ledger() == gone


@pytest.mark.parametrize("status", EvaluationStatus)
async def test_live_is_the_same_for_every_trigger(connection: Connection, status: EvaluationStatus) -> None:
    (build,) = await derivations(connection, 1)
    await execute(connection, "INSERT INTO project (name, created_at) VALUES ('p', now())")
    await execute(
        connection,
        f"""
        INSERT INTO evaluation (project, status, created_at, updated_at)
        VALUES (1, {int(status)}, now(), now())
        """,
    )
    steps: dict[str, str] = {
        "named": f"INSERT INTO build_job VALUES (1, {build}, false, now())",
        "moved": f"UPDATE derivation_build SET status = {int(BuildStatus.BUILDING)}",
        "unnamed": "DELETE FROM build_job",
    }
    for what, statement in steps.items():
        await execute(connection, statement)
        written = await fetch_all(
            connection, "DELETE FROM evaluation_shared_build_delta RETURNING evaluation"
        )
        assert written == ([(1,)] if status in EVALUATION_ACTIVE else []), what


# --- word for word --------------------------------------------------------------------------------

# Function -> what must stand in its body.
EMBEDDED: dict[str, tuple[Callable[[], str], ...]] = {
    "ripple_missing_runtime_deps": (
        lambda: runtime_edge("e"),
        lambda: present_predicate("w.derivation").removeprefix("(").removesuffix(")"),
    ),
    "ripple_unwalked_inputs": (lambda: build_edge("e"),),
    "evaluation_shared_build_counts": (
        lambda: blocks_evaluation("b").replace("b.", "").removeprefix("(").removesuffix(")"),
    ),
    "evaluation_shared_build_moved": (lambda: live_evaluation("v"),),
    "evaluation_shared_build_named": (lambda: live_evaluation("v"),),
}


async def test_the_bodies_hold_the_predicates_word_for_word(connection: Connection) -> None:
    found = await bodies(connection)
    for name, predicates in EMBEDDED.items():
        for predicate in predicates:
            assert " ".join(predicate().split()) in found[name], name


async def test_no_body_is_left_out(connection: Connection) -> None:
    """A function that is new has its predicates listed above, or compares no status and no kind."""
    numbers = re.compile(r"\b(status|kind|is_cached|walked|fetchable|wanted)\b")
    speaking = {name for name, body in (await bodies(connection)).items() if numbers.search(body)}
    assert speaking <= set(EMBEDDED)
    assert set(EMBEDDED) == speaking
