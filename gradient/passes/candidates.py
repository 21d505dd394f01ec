"""Pending jobs in memory, and what each worker has been offered of them. Layer: passes, no IO.

Every candidate has a generation, given when it enters and again when it returns. A worker keeps one
number, the newest generation it was offered: an offer is what came after it. Sets of job ids for each
worker would cost a gigabyte at 140,000 pending builds and 200 workers (docs/adr/0012).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import TypeAlias

import attrs

from gradient.graph.candidate_reads import BuildCandidate, EvaluationCandidate
from gradient.model import JobKind
from gradient.passes.pool import Worker

JobCandidate: TypeAlias = BuildCandidate | EvaluationCandidate


def kind_of(candidate: JobCandidate) -> JobKind:
    """Build or Eval."""
    return JobKind.BUILD if isinstance(candidate, BuildCandidate) else JobKind.EVAL


def visible_to(worker: Worker, candidate: JobCandidate) -> bool:
    """Whether this worker could run it."""
    if isinstance(candidate, EvaluationCandidate):
        return worker.can_evaluate()
    architecture = "builtin" if candidate.cache_available else candidate.architecture
    features = () if candidate.cache_available else candidate.required_features
    return worker.can_build(architecture, features)


@attrs.define(eq=False)
class Candidates:
    """Every pending job, oldest generation first."""

    # Invariant: in insertion order the generations ascend.
    _pending: dict[str, tuple[int, JobCandidate]] = attrs.field(factory=dict)
    _generation: int = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[JobCandidate]:
        return (candidate for _, candidate in self._pending.values())

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._pending

    def enter(self, candidate: JobCandidate) -> None:
        """A job became pending, or returned: it is new to every worker."""
        self._pending.pop(candidate.job_id, None)
        self._generation += 1
        self._pending[candidate.job_id] = (self._generation, candidate)

    def leave(self, job_id: str) -> None:
        """The job was claimed, aborted or left the queue."""
        self._pending.pop(job_id, None)

    def since(self, worker: Worker, limit: int) -> tuple[list[JobCandidate], int]:
        """Up to `limit` candidates the worker has not been offered and could run, oldest first, and the
        generation the offer reaches."""
        newest_first = takewhile(lambda entry: entry[0] > worker.offered, reversed(self._pending.values()))
        offer: list[JobCandidate] = []
        reached = worker.offered
        for generation, candidate in reversed(list(newest_first)):
            if len(offer) == limit:
                break
            reached = generation
            if visible_to(worker, candidate):
                offer.append(candidate)
        return offer, reached

    def of_kind(self, kind: JobKind) -> Iterable[JobCandidate]:
        """Pending jobs of a kind, oldest generation first."""
        return (candidate for candidate in self if kind_of(candidate) is kind)
