"""`scripts/bench soak [--minutes N] [--seed N]`: the state machine for as long as you like.

Prints one JSON line: steps, examples, violations. A violation ends the run with exit code 1 and the smallest
example that shows it on stderr; the same seed finds it again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Final

import trio

from gradient.graph.embedded import EmbeddedPostgres
from gradient.graph.migrate import migrate
from gradient.graph.pg import Connection
from tests.conftest import NOW, TEST_SETTINGS, memory_folder, running
from tests.model.run import run_machine

# Examples a seed: few, so that a run ends near its time and a violation is found again soon.
ROUND: Final = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="how long (default 10)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the first round (default: any)")
    arguments = parser.parse_args()
    first = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory(prefix="gradient-pg-", dir=memory_folder()) as folder:
        with running(EmbeddedPostgres(Path(folder) / "postgres", TEST_SETTINGS)) as url:
            return trio.run(_soak, url, first, arguments.minutes * 60)


async def _soak(url: str, first: int, seconds: float) -> int:
    started = time.monotonic()
    steps = examples = 0
    number = first
    violation: BaseException | None = None
    async with await Connection.connect(url) as connection:
        await migrate(connection, NOW)
        while violation is None and (number == first or time.monotonic() - started < seconds):
            try:
                tally = await run_machine(connection, examples=ROUND, seed_number=number)
            except Exception as error:
                violation = error
            else:
                steps += tally.steps
                examples += tally.examples
                number += 1
    if violation is not None:
        traceback.print_exception(violation, file=sys.stderr)
        print(f"again: scripts/bench soak --minutes 0 --seed {number}", file=sys.stderr)
    print(
        json.dumps(
            {
                "metric": "soak",
                "steps": steps,
                "examples": examples,
                "violations": int(violation is not None),
                "seeds": [first, number],
                "seconds": round(time.monotonic() - started, 1),
            }
        ),
        flush=True,
    )
    return int(violation is not None)


if __name__ == "__main__":
    sys.exit(main())
