"""Runs the state machine: Hypothesis in a thread, the connection on the event loop that the caller has."""

from __future__ import annotations

from functools import partial
from typing import Final

import trio
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from gradient.graph.pg import Connection
from tests.model.graph import Graph
from tests.model.machine import GraphMachine, machine_on
from tests.model.pair import Tally

# Rules of one example; what a teardown adds lets everything run to its end.
STEPS: Final = 40


async def run_machine(
    connection: Connection,
    *,
    examples: int,
    seed_number: int,
    steps: int = STEPS,
    base: type[GraphMachine] = GraphMachine,
    shrink: bool = True,
) -> Tally:
    """Run `examples` of them, the same ones for a seed on every machine. Raises what an example raised, with
    the smallest reproduction that was found in its notes."""
    tally = Tally()
    machine = machine_on(Graph(connection), trio.from_thread.run, tally, base)
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    await trio.to_thread.run_sync(
        partial(run_state_machine_as_test, seed(seed_number)(machine), settings=how)
    )
    return tally
