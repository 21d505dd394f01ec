"""`scripts/bench soak [--minutes N] [--seed N]`: the state machine for as long as you like.

Prints one JSON line: examples, violations, and the steps by kind, each with how often it was made and how
often it changed anything. A violation is told on stderr as soon as it is seen, then with the fewest steps
that are found in a minute, and ends the run with exit code 1. What is told can be run again: `scripts/bench
soak --steps FILE` makes the last steps in it; the same seed makes the first.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from gradient.graph.embedded import EmbeddedPostgres
from gradient.graph.migrate import migrate
from gradient.graph.pg import Connection
from tests.conftest import NOW, TEST_SETTINGS, memory_folder, running
from tests.model.machine import GraphMachine
from tests.model.pair import Diverged, Tally
from tests.model.run import make_smaller, run_machine, run_steps
from tests.model.script import Step, steps_in
from tests.model.watch import EnoughError, Failure, Watch

# Each example truncates every table: what that leaves in the catalog is cleared away meanwhile.
SETTINGS: Final = {**TEST_SETTINGS, "autovacuum": "on"}
# Examples a seed: few, so that a run ends near its time and a violation is found again soon.
ROUND: Final = 20
# Exit codes.
VIOLATED: Final = 1
STOPPED: Final = 130


def main(
    arguments: Sequence[str] | None = None, base: type[GraphMachine] = GraphMachine, shrink: float = 60
) -> int:
    """0 when nothing was violated, 130 when a signal ended it."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="how long (default 10)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the first round (default: any)")
    parser.add_argument(
        "--steps", metavar="FILE", help="run these steps, as a violation prints them, instead"
    )
    options = parser.parse_args(arguments)
    first = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    steps = None if options.steps is None else steps_in(Path(options.steps).read_text().splitlines())
    soak = Soak(first, base, shrink)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: soak.watch.stop())
    with tempfile.TemporaryDirectory(prefix="gradient-pg-", dir=memory_folder()) as folder:
        with running(EmbeddedPostgres(Path(folder) / "postgres", SETTINGS)) as url:
            trio.run(soak.run, url, options.minutes * 60, steps)
    print(soak.result(), flush=True)
    return soak.code


@attrs.define
class Soak:
    """One run, from its first seed on."""

    first: int
    base: type[GraphMachine]
    shrink: float
    code: int = 0
    tally: Tally = attrs.field(factory=Tally)
    seed: int = attrs.field(init=False)
    watch: Watch = attrs.field(init=False)
    started: float = attrs.field(factory=time.monotonic)

    def __attrs_post_init__(self) -> None:
        self.seed, self.watch = self.first, Watch(self._first)

    async def run(self, url: str, seconds: float, steps: Sequence[Step] | None) -> None:
        """On the database at `url`: one seed after the other while there is time, or these steps."""
        async with await Connection.connect(url) as connection:
            await migrate(connection, NOW)
            try:
                await self._run(connection, seconds, steps)
            except EnoughError:
                self.code = STOPPED
            except Exception:
                if self.watch.failure is None:
                    raise
            if self.watch.failure is not None:
                self.code = VIOLATED
                if steps is None:
                    await self._smaller(connection, self.watch.failure)

    async def _run(self, connection: Connection, seconds: float, steps: Sequence[Step] | None) -> None:
        same: Any = {"base": self.base, "tally": self.tally, "watch": self.watch}
        if steps is not None:
            await run_steps(connection, steps, **same)
            return
        while self.seed == self.first or time.monotonic() - self.started < seconds:
            await run_machine(connection, examples=ROUND, seed_number=self.seed, **same)
            self.seed += 1

    def _first(self, failure: Failure) -> None:
        _tell(f"seed {self.seed}, example {self.tally.examples}, after {self._seconds()} s", failure)

    async def _smaller(self, connection: Connection, failure: Failure) -> None:
        print(f"# the same with fewer steps, for {self.shrink:g} s at most:", file=sys.stderr, flush=True)
        smaller = await make_smaller(connection, failure, self.base, self.shrink)
        _tell(f"what is left after {self._seconds()} s", smaller)

    def _seconds(self) -> float:
        return round(time.monotonic() - self.started, 1)

    def result(self) -> str:
        """The JSON line."""
        made, effective = self.tally.made, self.tally.effective
        return json.dumps(
            {
                "metric": "soak",
                "steps": sum(n for kind, n in made.items() if ":" not in kind),
                "examples": self.tally.examples,
                "violations": int(self.code == VIOLATED),
                "seeds": [self.first, self.seed],
                "seconds": self._seconds(),
                "made_and_effective": {kind: [n, effective[kind]] for kind, n in made.most_common()},
            }
        )


def _tell(where: str, failure: Failure) -> None:
    """What went wrong, and the script that led there; all but its steps are comments."""
    error = failure.error
    what = [str(error)] if isinstance(error, Diverged) else traceback.format_exception(error)
    lines = [where, *"".join(what).splitlines()]
    print("\n".join([*(f"# {line}" for line in lines), *failure.script]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
