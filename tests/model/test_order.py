"""Invariant 23: in whatever order the messages of a walk come, the graph ends in the same state."""

from __future__ import annotations

import random
from typing import Any

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradient.graph.assignments import ClaimEvaluation
from gradient.graph.evaluation_reports import EvalStreamCompleted, EvaluationPhase
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.nar import CommitNars
from gradient.graph.pg import Connection
from gradient.graph.record import Record
from gradient.graph.transaction import Message
from gradient.model import EntryPoint, EvaluationStatus, Repository
from tests.graph.world import drv
from tests.model import rules, stored
from tests.model.graph import Graph
from tests.model.pair import PICK, WORKERS
from tests.model.universe import Universe, discovered, signed, universes


async def walk(graph: Graph, batches: list[Message[Any]], entries: tuple[EntryPoint, ...]) -> Any:
    """One evaluation from these messages; what there is after the last of them, and after the stream."""

    async def apply(message: Message[Any]) -> Any:
        graph.pass_time()
        return await graph.apply(message, lambda moves: None)

    await graph.empty()
    evaluation = await apply(CreateEvaluation("main", Repository("git+https://example.org/x")))
    assignment = await apply(ClaimEvaluation(evaluation, WORKERS[0], "w"))
    await apply(EvaluationPhase(assignment, EvaluationStatus.EVALUATING_DERIVATION))
    for message in batches:
        await apply(message)
    await apply(Record(evaluation, (), entries))
    before = await picture(graph)
    await apply(EvalStreamCompleted(assignment))
    return before, await picture(graph)


async def picture(graph: Graph) -> Any:
    """Everything but numbers and times."""
    now = await stored.read(graph.connection)
    facts = now.facts
    builds = {name: (build.status, build.substituted) for name, build in facts.builds.items()}
    columns = (now.unwalked_inputs, now.missing_runtime_deps, now.blocking_deps, now.fetchable, now.is_cached)
    # The mark means nothing on a row that is done.
    marked = now.wanted & rules.open_builds(facts)
    named = facts.derivations, facts.edges, facts.names, facts.entry_points
    return named, builds, columns, marked, now.counters


def same_either_way(
    graph: Graph, universe: Universe, tops: list[int], held: list[int], order: random.Random
) -> None:
    """Records, `.drv` files and NARs of one walk, once as they come and once shuffled."""
    letters, paths = list(universe.found), list(universe.references)
    names = universe.closure({letters[top % len(letters)] for top in tops})
    committed = sorted({paths[pick % len(paths)] for pick in held})
    batches: list[Message[Any]] = [Record(1, (discovered(universe.found[name]),)) for name in names]
    batches += [CommitNars(1, (signed(f"{name}.drv", ()),)) for name in names]
    batches += [CommitNars(1, (signed(path, universe.references[path]),)) for path in committed]
    entries = tuple(EntryPoint(name, drv(name)) for name in names[:1])
    one = trio.from_thread.run(walk, graph, batches, entries)
    order.shuffle(batches)
    assert trio.from_thread.run(walk, graph, batches, entries) == one


async def test_the_order_of_messages_makes_no_difference(connection: Connection) -> None:
    graph, picks = Graph(connection), st.lists(PICK, min_size=1, max_size=3)

    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(universes(), picks, st.lists(PICK, max_size=3), st.randoms())
    def examples(universe: Universe, tops: list[int], held: list[int], order: random.Random) -> None:
        same_either_way(graph, universe, tops, held, order)

    await trio.to_thread.run_sync(examples)
