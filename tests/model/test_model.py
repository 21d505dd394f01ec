"""The model and the graph go the same way, whatever comes; and a model that does not is found out."""

from __future__ import annotations

import pytest

from gradient.graph.pg import Connection
from tests.model.machine import GraphMachine
from tests.model.model import Model
from tests.model.pair import Diverged
from tests.model.run import run_machine

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 40))]


@pytest.mark.parametrize("seed_number", SEEDS)
async def test_the_graph_does_what_the_model_does(connection: Connection, seed_number: int) -> None:
    tally = await run_machine(connection, examples=8, seed_number=seed_number)
    assert tally.examples >= 8


class Forgetful(Model):
    """Leaves in the queue what nobody wants any more."""

    def skip_unwanted(self) -> bool:
        return False


class ForgetfulMachine(GraphMachine):
    make_model = Forgetful


async def test_a_model_that_differs_is_found_out(connection: Connection) -> None:
    with pytest.raises(Diverged, match="SKIPPED"):
        await run_machine(connection, examples=50, seed_number=0, base=ForgetfulMachine)
