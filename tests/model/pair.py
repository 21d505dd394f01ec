"""The real graph and the model, side by side: one message to both, and everything compared after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias, TypeVar
from uuid import UUID

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition

from gradient.graph.failure import RetryLimits
from gradient.graph.moves import Moves
from gradient.graph.transaction import Message
from gradient.model import BuildStatus
from tests.model import invariants, stored
from tests.model.graph import Graph
from tests.model.model import Found, Model
from tests.model.stored import Stored
from tests.model.universe import Universe
from tests.model.watch import Failure, Watch

T = TypeVar("T")
LIMITS: Final = RetryLimits()
WORKERS: Final = (UUID(int=1), UUID(int=2))
PICK: Final = st.integers(0, 11)
WORKER: Final = st.integers(0, len(WORKERS) - 1)
# Runs an async function on the event loop that has the connection.
Portal: TypeAlias = Callable[..., Any]


# For what changes nothing, or clears everything away: a rule that may be chosen after every other step leaves
# room for the others.
def seldom(pair: Pair) -> bool:
    """A precondition of choosing, not of making: a script with steps left out counts otherwise."""
    return pair.steps % 2 == 0


SELDOM: Final = precondition(seldom)


class Diverged(AssertionError):
    """The graph is not where the model is, or breaks an invariant."""


@attrs.define
class Stream:
    """An evaluation on a worker: what it has still to send, and what it has sent."""

    assignment: int
    left: list[str]
    entries: dict[str, str]
    sent: list[tuple[list[Found], dict[str, str]]] = attrs.field(factory=list)


@attrs.define
class Tally:
    """What a run did."""

    examples: int = 0
    # Steps by kind, and those of them that changed anything.
    made: Counter[str] = attrs.field(factory=Counter)
    effective: Counter[str] = attrs.field(factory=Counter)


class Pair(RuleBasedStateMachine):
    """One example: a universe, and the graph and the model of what happens in it."""

    # Set by `machine_on`.
    portal: Portal
    graph: Graph
    tally: Tally
    watch: Watch
    make_model: Callable[[datetime, bool], Model] = Model

    def __init__(self) -> None:
        super().__init__()
        self.watch.next_example()
        # What is being done, whether it has changed anything, and all that was done.
        self.doing, self.changed = "", False
        self.script: list[str] = []
        self.steps = 0
        self.broken = False
        self.streams: dict[int, Stream] = {}
        self.tops: dict[int, list[str]] = {}
        self.last: Stored
        # As the transaction that is open, or the next, begins.
        self.before: Stored

    def _begin(self, universe: Universe, upstream: bool) -> None:
        self.tally.examples += 1
        self.universe = universe
        self.letters = list(universe.found)
        self.portal(self.graph.empty, upstream)
        self.model = self.make_model(self.graph.now, upstream)
        self.moves = Moves()
        self.last = self.before = self._read()
        self._say(f"begin {'with' if upstream else 'without'} an upstream cache")
        self.script += [f"#   {found}" for found in universe.found.values()]
        self.script += [f"#   {path} refers to {refs}" for path, refs in universe.references.items() if refs]

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        try:
            if not self.broken:
                self._make("# the end", self.end)
        finally:
            self.portal(self.graph.roll_back)

    # --- doing both -----------------------------------------------------------------------------

    def _make(self, line: str, step: Callable[[], None]) -> None:
        """Make one step of the script."""
        self.script.append(line)
        try:
            step()
        except Exception as error:
            self.broken = True
            error.add_note("\n".join(self.script))
            self.watch.saw(Failure(error, tuple(self.script)))
            raise
        finally:
            self.steps += 1

    def _say(self, what: str) -> None:
        self.script.append(f"#   {what}")
        self.doing, self.changed = what.split(maxsplit=1)[0], False
        self.tally.made[self.doing] += 1

    def _apply(self, message: Message[T]) -> T:
        """The message to the real graph. The model's part follows, then `_check`."""
        self.graph.pass_time()
        self.model.now = self.graph.now
        answer: T = self.portal(self.graph.apply, message, self._saw)
        return answer

    def _saw(self, moves: Moves) -> None:
        self.moves = moves

    def _same(self, what: str, graph: object, model: object) -> None:
        if graph != model:
            self._diverge([f"{what}: the graph answers {graph}, the model {model}"])

    def _diverge(self, lines: Sequence[str]) -> None:
        raise Diverged("\n".join(lines))

    def _read(self) -> Stored:
        found: Stored = self.portal(stored.read, self.graph.connection)
        return found

    def _check(self, *, moved: bool = True) -> None:
        """Everything the model knows and everything maintained (invariant 32), the invariants of states, and
        what has ended (invariants 26 and 27)."""
        if not self.graph.in_shared:
            self.model.finish()
        now = self._read()
        lines = stored.differences(self.model.facts, now)
        lines += invariants.violations(now, invariants.ALWAYS)
        if not self.graph.in_shared:
            lines += invariants.violations(now, invariants.SETTLED)
            lines += invariants.completed_names_no_failure(now, self.last)
        if moved:
            lines += self._moves(now)
        if lines:
            self._diverge(lines)
        self.tally.effective[self.doing] += not self.changed and now != self.last
        self.changed = self.changed or now != self.last
        self.last = now
        if not self.graph.in_shared:
            self.before = now

    def _unchanged(self, what: str, before: Stored) -> None:
        """The graph is as it was, and the ledger of moves did not grow."""
        if attrs.evolve(self.last, derivation_ids={}) != attrs.evolve(before, derivation_ids={}):
            lines = stored.differences(before.facts, self.last)
            self._diverge([f"{what} changed something", *lines])

    def _moves(self, now: Stored) -> list[str]:
        """Invariant 33: emitted moves are the difference of the statuses, none lost, none doubled."""
        was, now_is = _statuses(self.before), _statuses(now)
        pairs = {i: (was.get(i, BuildStatus.CREATED), status) for i, status in now_is.items()}
        changed = {i: pair for i, pair in pairs.items() if pair[0] is not pair[1]}
        # What moved and was deleted is told, too: nobody minds.
        told = {i: (change.old, change.new) for i, change in self.moves.builds.items() if i in now_is}
        lines = [] if told == changed else [f"33 moves: {told}, not {changed}"]
        before = {v: row.status for v, row in self.before.facts.evaluations.items()}
        moved = {v: row.status for v, row in now.facts.evaluations.items() if before.get(v) != row.status}
        heard = {v: s for v, s in self.moves.evaluations.items() if v in now.facts.evaluations}
        # One that went away and came back is told as it is.
        stayed = {v: status for v, status in heard.items() if before.get(v) == status}
        if heard != moved | stayed:
            lines.append(f"33 moves of evaluations: {heard}, not {moved}")
        return lines

    def _choose(self, options: Sequence[T], pick: int) -> T:
        return options[pick % len(options)]

    def _refused(self, why: str) -> None:
        """What is being done was refused, as the rules say."""
        self.tally.made[f"{self.doing}: {why}"] += 1

    def _id(self, name: str) -> int:
        return next(i for i, letter in self.last.derivation_ids.items() if letter == name)

    def end(self) -> None:
        """Let everything run to its end."""


def _statuses(stored: Stored) -> dict[int, BuildStatus]:
    builds = stored.facts.builds
    return {i: builds[name].status for i, name in stored.derivation_ids.items() if name in builds}
