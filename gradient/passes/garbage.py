"""Collecting garbage: old evaluations, then derivations nobody reaches, then paths nobody needs.

Layer: passes. Evaluations also go as soon as another one has ended: a task never has many more than it keeps,
and those of an hour never go at once. Each step finds its candidates on a reader's connection and has the
graph writer look again and delete, a bounded chunk a message, so that nobody waits long behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final, TypeVar

import attrs
import structlog

from gradient.graph.derivation_gc import CollectDerivations, orphan_derivations
from gradient.graph.evaluation_gc import CollectEvaluations, expired_evaluations
from gradient.graph.moves import Moves
from gradient.graph.path_gc import Ages, CollectPaths, unneeded_paths
from gradient.graph.pg_pool import Pool
from gradient.graph.transaction import Submit
from gradient.model import EVALUATION_TERMINAL
from gradient.nursery.kick import Kick
from gradient.settings.tables import Eval, Gc

log = structlog.get_logger()
T = TypeVar("T")

# One evaluation may have named 50,000 shared builds.
EVALUATIONS_AT_ONCE: Final = 1
DERIVATIONS_AT_ONCE: Final = 500
PATHS_AT_ONCE: Final = 500
# Cached paths looked at in one read.
PAGE: Final = 5000


@attrs.define(eq=False)
class Garbage:
    """The collection. `clock` gives wall time."""

    readers: Pool
    submit: Submit
    settings: Gc
    eval: Eval
    clock: Callable[[], datetime]
    # Wakes the pass that collects evaluations: one has ended, so that an older one may go.
    ended: Kick = attrs.field(factory=Kick)

    def moved(self, moves: Moves) -> None:
        """Take what a transaction moved. Never blocks."""
        if not EVALUATION_TERMINAL.isdisjoint(moves.evaluations.values()):
            self.ended.set()

    async def collect(self) -> None:
        """Everything that may go now, in the order in which one thing lets go of the next."""
        await self.collect_evaluations()
        await self.collect_derivations()
        await self.collect_paths()

    async def collect_evaluations(self) -> None:
        """Evaluations beyond what their task keeps."""
        wedged_before = self._hours_ago(self.settings.wedged_eval_hours)
        async with self.readers.connection() as connection:
            expired = await expired_evaluations(
                connection, keep_without_task=self.eval.max_keep, wedged_before=wedged_before
            )
        collected = 0
        for ids in _chunks(expired, EVALUATIONS_AT_ONCE):
            collected += len(await self.submit(CollectEvaluations(ids)))
        if collected:
            log.info("evaluations collected", evaluations=collected)

    async def collect_derivations(self) -> None:
        """Derivations outside the closure of everything that is named."""
        created_before = self._hours_ago(self.settings.orphan_derivation_hours)
        promised_since = self._hours_ago(self.settings.nar_upload_grace_hours)
        async with self.readers.connection() as connection:
            orphans = await orphan_derivations(
                connection, created_before=created_before, promised_since=promised_since
            )
        collected = 0
        for ids in _chunks(orphans, DERIVATIONS_AT_ONCE):
            collected += await self.submit(CollectDerivations(ids, created_before, promised_since))
        if collected:
            log.info("derivations collected", derivations=collected)

    async def collect_paths(self) -> None:
        """Cached paths that nothing needs, each before what it alone refers to."""
        if not self.settings.nar_ttl_hours:
            return
        ages = Ages(
            unused_since=self._hours_ago(self.settings.nar_ttl_hours),
            promised_since=self._hours_ago(self.settings.nar_upload_grace_hours),
        )
        last: int | None = 0
        while last is not None:
            async with self.readers.connection() as connection:
                last, unneeded = await unneeded_paths(connection, ages, last, PAGE)
            await self._retire(unneeded, ages)

    async def _retire(self, unneeded: Sequence[str], ages: Ages) -> None:
        due = list(unneeded)
        while due:
            below: set[str] = set()
            for hashes in _chunks(due, PATHS_AT_ONCE):
                below |= await self.submit(CollectPaths(hashes, ages))
            due = sorted(below)

    def _hours_ago(self, hours: int) -> datetime:
        return self.clock() - timedelta(hours=hours)


def _chunks(items: Sequence[T], size: int) -> Iterator[tuple[T, ...]]:
    for start in range(0, len(items), size):
        yield tuple(items[start : start + size])
