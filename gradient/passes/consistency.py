"""The consistency check as a pass: on a connection of its own, and said aloud when it found something.

Layer: passes.
"""

from __future__ import annotations

from typing import Final

import attrs
import structlog

from gradient.graph.consistency import graph_consistency_report
from gradient.graph.pg import Connection
from gradient.graph.transaction import Submit

log = structlog.get_logger()

# Seconds one run may take.
CONSISTENCY_BUDGET: Final = 600.0


async def check_graph(url: str, submit: Submit) -> None:
    """Check the graph in the database at `url`, and mend it through `submit`."""
    async with await Connection.connect(url) as connection:
        report = await graph_consistency_report(connection, submit)
    found = {step: rows for step, rows in attrs.asdict(report).items() if rows}
    # Adoption is part of life; any other figure is a lost move: a bug, or somebody wrote into the database.
    if attrs.evolve(report, adopted=0).clean:
        log.info("the graph is consistent", **found)
    else:
        log.warning("the graph had drifted and was mended", **found)
