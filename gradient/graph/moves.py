"""What one transaction moved: one value, published after its commit. Pure.

Nothing else announces anything: the startable set, the pages' live events and the aborts sent to
workers are all fed from here, through synchronous callbacks that never block (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from gradient.model import BuildStatus, EvaluationStatus


@attrs.frozen
class BuildChange:
    """A shared build's status as one statement changed it."""

    derivation: int
    old: BuildStatus
    new: BuildStatus


@attrs.frozen
class JobAbort:
    """A job that must stop on its worker."""

    job_id: str
    reason: str


@attrs.define
class Moves:
    """Net effects of a transaction; two changes of one row fold into one."""

    # Invariant: old is the status before the transaction, new the one after; equal pairs are dropped.
    builds: dict[int, BuildChange] = attrs.field(factory=dict)
    evaluations: dict[int, EvaluationStatus] = attrs.field(factory=dict)
    # Evaluations with anything new to show: names, messages, entry points.
    progressed: set[int] = attrs.field(factory=set)
    aborts: list[JobAbort] = attrs.field(factory=list)
    # Jobs that went back to the queue and must be offered again, also to workers that saw them.
    returned: set[str] = attrs.field(factory=set)
    # Hash parts of cached paths whose objects somebody could not get: to be looked for.
    suspected: set[str] = attrs.field(factory=set)
    # Assignments that were closed without their worker: its session forgets the job.
    dropped: set[int] = attrs.field(factory=set)
    # Shared builds whose loss of need, or end, may finish an evaluation. Emptied before the commit.
    unsettled: set[int] = attrs.field(factory=set)

    def change(self, changes: Iterable[BuildChange]) -> None:
        """Fold status changes in."""
        for change in changes:
            before = self.builds.pop(change.derivation, None)
            old = change.old if before is None else before.old
            if old != change.new:
                self.builds[change.derivation] = BuildChange(change.derivation, old, change.new)
            self.unsettled.add(change.derivation)

    def merge(self, later: Moves) -> None:
        """Fold in what a later savepoint of the same transaction moved."""
        self.change(later.builds.values())
        self.unsettled |= later.unsettled
        self.evaluations |= later.evaluations
        self.progressed |= later.progressed
        self.aborts += later.aborts
        self.returned |= later.returned
        self.suspected |= later.suspected
        self.dropped |= later.dropped

    @property
    def queued(self) -> list[int]:
        """Shared builds that are Queued now and were not."""
        return [c.derivation for c in self.builds.values() if c.new is BuildStatus.QUEUED]

    @property
    def unqueued(self) -> list[int]:
        """Shared builds that were Queued and are not now."""
        return [c.derivation for c in self.builds.values() if c.old is BuildStatus.QUEUED]

    @property
    def empty(self) -> bool:
        """Nothing to tell anybody."""
        return not (
            self.builds
            or self.evaluations
            or self.progressed
            or self.aborts
            or self.returned
            or self.suspected
            or self.dropped
        )
