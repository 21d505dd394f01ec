"""The questions of one discovery that nobody has answered yet. Layer: rank 1; plain synchronous methods,
and one wait.

Two lanes: most questions are for the fast children; those that turned out to import from a derivation
are for a child that may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import trio

from gradient.nix.evaluator.findings import Question


class Lane:
    """One queue of questions, and the crew members on their way to it."""

    def __init__(self) -> None:
        self.waiting: deque[Question] = deque()
        # Members that are getting a child; each will take one question at least.
        self.coming: set[object] = set()

    def take(self, limit: int) -> list[Question]:
        """The next questions that one request can ask: siblings, asked alike; at most `limit`."""
        batch: list[Question] = []
        while self.waiting and len(batch) < limit and (not batch or _alike(batch[0], self.waiting[0])):
            batch.append(self.waiting.popleft())
        return batch


class Agenda:
    """Every open question is in a lane or under way in a child; at zero the discovery is over."""

    def __init__(self) -> None:
        self.fast = Lane()
        self.imports = Lane()
        self._open = 0
        self._abandoned = False
        self._changed = trio.Event()

    @property
    def finished(self) -> bool:
        """Whether no question is open. Nothing can add one after that."""
        return self._abandoned or self._open == 0

    def add(self, questions: Iterable[Question]) -> None:
        """New questions, for the fast lane. Add what an answer leads to before closing its question."""
        if new := list(questions):
            self._open += len(new)
            self.fast.waiting.extend(new)
            self._wake()

    def put_back(self, lane: Lane, questions: Iterable[Question]) -> None:
        """Questions whose child ended before it came to them, to be asked first, in their order."""
        if returned := list(questions):
            lane.waiting.extendleft(reversed(returned))
            self._wake()

    def move_to_imports(self, question: Question) -> None:
        """A question that was under way and needs a child that may import from derivations."""
        self.imports.waiting.append(question)
        self._wake()

    def arrived(self, lane: Lane, member: object) -> None:
        """The member has its child, or will not get one. Safe to repeat."""
        if member in lane.coming:
            lane.coming.remove(member)
            self._wake()

    def close(self) -> None:
        """One question is answered for good."""
        self._open -= 1
        if self.finished:
            self._wake()

    def abandon(self) -> None:
        """Leave every question unanswered."""
        self._abandoned = True
        self._wake()

    async def work_for_another(self, lane: Lane) -> bool:
        """Wait until `lane` has work for one more than are on their way; False once all is finished."""
        while not self.finished:
            if len(lane.waiting) > len(lane.coming):
                return True
            await self._changed.wait()
        return False

    async def finish(self) -> None:
        """Wait until no question is open."""
        while not self.finished:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _alike(one: Question, other: Question) -> bool:
    return (
        one.path[:-1] == other.path[:-1]
        and len(one.path) == len(other.path)
        and (one.instantiate, one.inside) == (other.instantiate, other.inside)
    )
