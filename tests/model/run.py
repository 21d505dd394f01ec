"""Runs the state machine: Hypothesis in a thread, the connection on the event loop that the caller has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from gradient.graph.pg import Connection
from tests.model.graph import Graph
from tests.model.machine import GraphMachine, machine_on
from tests.model.pair import Tally, seldom
from tests.model.script import Step, steps_in
from tests.model.watch import EnoughError, Failure, Watch

# Rules of one example; what a teardown adds lets everything run to its end.
STEPS: Final = 40


async def run_machine(
    connection: Connection,
    *,
    examples: int,
    seed_number: int,
    base: type[GraphMachine] = GraphMachine,
    tally: Tally | None = None,
    watch: Watch | None = None,
) -> Tally:
    """Run `examples` of them, the same ones for a seed on every machine.

    The first that fails ends the run, which raises what it raised, with its script in the notes.
    """
    tally, watch = tally or Tally(), watch or Watch()
    machine = machine_on(Graph(connection), trio.from_thread.run, tally, watch, base)
    how = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
    )
    run = partial(run_state_machine_as_test, seed(seed_number)(machine), settings=how)
    try:
        await trio.to_thread.run_sync(run)
    except (Exception, EnoughError):
        if watch.failure is None:
            raise
        raise watch.failure.error from None
    return tally


async def run_steps(
    connection: Connection,
    steps: Sequence[Step],
    *,
    base: type[GraphMachine] = GraphMachine,
    tally: Tally | None = None,
    watch: Watch | None = None,
) -> Failure | None:
    """Make the steps of one script, and let it come to its end; how it failed."""
    tally, watch = tally or Tally(), watch or Watch()
    machine = machine_on(Graph(connection), trio.from_thread.run, tally, watch, base)
    try:
        await trio.to_thread.run_sync(_make, machine, steps)
    except Exception:
        if watch.failure is None:
            raise
    return watch.failure


def _make(machine: type[GraphMachine], steps: Sequence[Step]) -> None:
    example = machine()
    conditions = {rule.function.__name__: rule.preconditions for rule in example.rules}
    try:
        for name, values in steps:
            if all(holds(example) for holds in conditions.get(name, ()) if holds is not seldom):
                getattr(example, name)(**values)
    finally:
        example.teardown()


async def make_smaller(
    connection: Connection, failure: Failure, base: type[GraphMachine], seconds: float
) -> Failure:
    """Leave out of a script what it fails without, many steps at a time, then few, while there is time."""
    until = time.monotonic() + seconds
    steps = steps_in(failure.script)
    size = len(steps) // 2
    while size and time.monotonic() < until:
        # From the end: what comes late stands on what came before. The first step is where all begins.
        for start in range(len(steps) - size, 0, -size):
            fewer = [*steps[:start], *steps[start + size :]]
            found = await run_steps(connection, fewer, base=base) if time.monotonic() < until else None
            if found is not None and found.kind == failure.kind:
                failure, steps = found, fewer
        size //= 2
    return failure
