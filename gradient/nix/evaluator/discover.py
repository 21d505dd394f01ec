"""Discovery: which derivations do these targets name? Layer: rank 1.

`survey.py` decides what to ask; the crew here asks it of as many children as the pool lends, and reports
each finding when it is found, so that builds start while slow attributes still evaluate. What one
attribute does to its child costs that attribute alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

import attrs
import trio

from gradient.nix.attr_path import AttrPath
from gradient.nix.evaluator import expressions
from gradient.nix.evaluator.agenda import Agenda, Lane
from gradient.nix.evaluator.child import Answer, Child, Refused
from gradient.nix.evaluator.errors import ChildDied, EvaluationFailed, EvaluatorError
from gradient.nix.evaluator.findings import (
    AttributeFailed,
    Derivation,
    Evaluated,
    Finding,
    FlakeAddress,
    Progress,
    Question,
)
from gradient.nix.evaluator.flake import FlakeUnusable, open_flake
from gradient.nix.evaluator.messages import about_the_flake, is_import_from_derivation
from gradient.nix.evaluator.pool import EvaluatorPool
from gradient.nix.evaluator.settings import Role
from gradient.nix.evaluator.survey import Survey
from gradient.nix.wildcard import Wildcards

# Questions in one request: they share the round trip and the reading of the line (0.2 ms, as long as a small
# attribute takes). Fewer near the end: one more would wait behind a slow attribute while a child is idle.
MAX_BATCH: Final = 32
# Between one child's start and the next. Children that write many small `.drv` files wait for each other at
# the store's database: 500 attributes took 0.45 s with one child and 1.2 s with two. A long evaluation
# hardly notices the wait, and gains from every core.
JOIN_INTERVAL: Final = 0.5  # seconds
# A child may die of something else than what it was asked: each question gets a second, fresh one.
TRIES: Final = 2


@attrs.frozen
class Request:
    """Evaluate what `wildcards` select of `flake`.

    `attribute_limit` is seconds of evaluation for one attribute (imports from derivations, which wait for
    builds, are not held to it). `import_store` is the store URI of a proxy that has derivations built;
    without one, an attribute that imports from a derivation fails and says so.
    """

    flake: FlakeAddress
    wildcards: Wildcards
    attribute_limit: float = math.inf
    import_store: str | None = None


async def discover(
    pool: EvaluatorPool,
    request: Request,
    findings: trio.MemorySendChannel[Finding],
    progress: Progress | None = None,
) -> None:
    """Send every derivation the wildcards select as it is found, then close `findings`.

    Each attribute is reported once; targets that led to none come last. While the reader is slow the
    children wait: give the channel some room. Raises FlakeUnusable when there is no such flake or it does
    not evaluate, EvaluatorUnusable, BrokenResourceError when the reader has gone. Cancelled, its children
    are killed.
    """
    with findings:
        await _Crew(pool, request, findings, progress or Progress()).run()


class _Crew:
    """The tasks of one discovery."""

    def __init__(
        self,
        pool: EvaluatorPool,
        request: Request,
        findings: trio.MemorySendChannel[Finding],
        progress: Progress,
    ) -> None:
        self._pool = pool
        self._request = request
        self._progress = progress
        self._survey = Survey(request.wildcards)
        self._agenda = Agenda()
        self._deaths: Counter[AttrPath] = Counter()
        self._findings = findings
        self._openings_lost = 0
        # Why nothing can be discovered, if so: raised by `run`, outside the nursery's group.
        self._fatal: EvaluatorError | None = None

    async def run(self) -> None:
        """Ask until nothing is left to ask."""
        self._ask(self._survey.begin())
        async with trio.open_nursery() as nursery:
            for number in range(self._pool.size):
                nursery.start_soon(self._join, number)
            for _ in range(self._pool.import_size if self._request.import_store else 0):
                nursery.start_soon(self._work, self._agenda.imports, Role.IMPORT)
            await self._agenda.finish()
            # Who is still on the way to a child comes too late.
            nursery.cancel_scope.cancel()
        if self._fatal is not None:
            raise self._fatal
        for finding in self._survey.unmatched():
            await self._findings.send(finding)

    async def _join(self, number: int) -> None:
        """One fast member; the later ones join while there is much to do."""
        await trio.sleep(number * JOIN_INTERVAL)
        await self._work(self._agenda.fast, Role.EVALUATE)

    async def _work(self, lane: Lane, role: Role) -> None:
        """One member: while the lane needs somebody, lend a child and put its questions to it."""
        me = object()
        store = self._request.import_store if role is Role.IMPORT else None
        while await self._agenda.work_for_another(lane):
            lane.coming.add(me)
            try:
                async with self._pool.lend(self._request.flake, role, store=store) as child:
                    await open_flake(child)
                    self._agenda.arrived(lane, me)
                    await self._converse(child, lane)
            except ChildDied as death:  # while it opened the flake
                self._openings_lost += 1
                if self._openings_lost == TRIES:
                    self._stop(FlakeUnusable(str(death)))
            except EvaluatorError as error:
                self._stop(error)
            finally:
                self._agenda.arrived(lane, me)

    async def _converse(self, child: Child, lane: Lane) -> None:
        """Put questions to a child until the lane is empty or the child is lost."""
        while batch := lane.take(min(MAX_BATCH, 1 + len(lane.waiting) // (2 * self._pool.size))):
            if not await self._put(child, lane, self._fitting(lane, batch)):
                return

    def _fitting(self, lane: Lane, batch: list[Question]) -> deque[Question]:
        """What of a batch fits into a request; the rest goes back."""
        fitting = batch
        while len(fitting) > 1 and not Child.takes(expressions.looks(fitting)):
            fitting = fitting[: len(fitting) // 2]
        self._agenda.put_back(lane, batch[len(fitting) :])
        return deque(fitting)

    async def _put(self, child: Child, lane: Lane, batch: deque[Question]) -> bool:
        """Put one request to a child; False when the child is lost.

        Answers come in order: the first question without one is the one that failed, or whose evaluation
        ended the child. Those behind it were not reached and go back."""
        heard = await _begin(child, batch) or await self._next(child, lane, batch)
        while batch and isinstance(heard, Answer):
            await self._heard(batch.popleft(), heard)
            heard = await self._next(child, lane, batch)
        if batch:
            failed = batch.popleft()
            self._agenda.put_back(lane, batch)
            await self._unanswered(failed, heard, lane)
        return isinstance(heard, Refused)

    async def _next(
        self, child: Child, lane: Lane, batch: Iterable[Question]
    ) -> Answer | Refused | ChildDied | None:
        """What the child says, None when it says nothing within the limit of one attribute."""
        heard = None
        at = {question.attr for question in islice(batch, 1)}
        self._progress.at |= at
        with trio.move_on_after(self._limit(lane)):
            heard = await _hear(child)
        self._progress.at -= at
        return heard

    async def _heard(self, question: Question, answer: Answer) -> None:
        standing = expressions.read_look(answer.value)
        if isinstance(standing, str):
            await self._fail(question, standing)
            return
        self._ask(self._survey.heard(question, standing))
        if isinstance(standing, Derivation) and standing.drv_path is not None:
            self._progress.derivations += 1
            remarks = about_the_flake(answer.remarks)
            await self._findings.send(Evaluated(question.attr, standing.drv_path, remarks))
        self._close(question)

    async def _unanswered(self, question: Question, heard: object, lane: Lane) -> None:
        match heard:
            case Refused(message) if self._wants_import(lane, message):
                self._agenda.move_to_imports(question)
            case Refused(message):
                await self._fail(question, message or "Nix gave no answer and no reason")
            case ChildDied() as death:
                await self._lost(question, death, lane)
            case _:  # too slow once is too slow
                await self._fail(question, f"not evaluated within {self._limit(lane):g} seconds")

    async def _lost(self, question: Question, death: ChildDied, lane: Lane) -> None:
        self._deaths[question.path] += 1
        if self._deaths[question.path] < TRIES:
            self._agenda.put_back(lane, [question])
        else:
            await self._fail(question, str(death))

    async def _fail(self, question: Question, message: str) -> None:
        self._survey.failed(question)
        self._progress.failed += 1
        await self._findings.send(AttributeFailed(question.attr, message))
        self._close(question)

    def _ask(self, questions: Sequence[Question]) -> None:
        if attributes := sum(question.instantiate for question in questions):
            self._progress.attributes_total = (self._progress.attributes_total or 0) + attributes
        self._agenda.add(questions)

    def _close(self, question: Question) -> None:
        self._progress.attributes_done += question.instantiate
        self._agenda.close()

    def _stop(self, error: EvaluatorError) -> None:
        self._fatal = error
        self._agenda.abandon()

    def _limit(self, lane: Lane) -> float:
        return self._request.attribute_limit if lane is self._agenda.fast else math.inf

    def _wants_import(self, lane: Lane, message: str) -> bool:
        return (
            lane is self._agenda.fast
            and self._request.import_store is not None
            and is_import_from_derivation(message)
        )


async def _begin(child: Child, batch: Sequence[Question]) -> Refused | ChildDied | None:
    """Send a request for these; what comes of it when it cannot be sent."""
    try:
        await child.begin(expressions.looks(batch))
    except EvaluationFailed as too_long:
        return Refused(str(too_long))
    except ChildDied as death:
        return death
    return None


async def _hear(child: Child) -> Answer | Refused | ChildDied:
    try:
        return await child.hear()
    except ChildDied as death:
        return death
