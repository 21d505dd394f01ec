"""What the naive model remembers: facts that events write, and nothing that can be worked out from them.

Derivations go by a letter, store paths by their name part (`a`, `a-dev`, `a.drv`), evaluations and
assignments by their number in the database. No column of the seed's start conditions is here: `rules`
works each of them out anew whenever somebody asks.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import attrs

from gradient.model import (
    AttemptOutcome,
    AttemptReason,
    BuildStatus,
    DispatchOutcome,
    EdgeKind,
    EvaluationStatus,
    JobKind,
)


@attrs.define
class Derivation:
    """`outputs` by name, with the path of each, and input sources; empty on a stub."""

    walked: bool = False
    outputs: dict[str, str] = attrs.field(factory=dict)
    sources: set[str] = attrs.field(factory=set)


@attrs.define
class Build:
    """A shared build. `updated_at` is when its status moved last."""

    status: BuildStatus
    updated_at: datetime
    probed: bool = True
    cache_available: bool = False
    substituted: bool = False
    attempt: int = 0


@attrs.define
class Evaluation:
    """`task` asked for it, or a person. `evaluated`: its stream has ended."""

    status: EvaluationStatus
    created_at: datetime
    task: int | None = None
    evaluated: bool = False
    has_error: bool = False
    # Something was un-walked while it was walking.
    walk_lost: bool = False
    # It waits since then though workers for all of it are there: nothing of it can be handed out.
    stuck_since: datetime | None = None
    # It brings a lost `.drv` again, for the evaluation that it recovers while there is that one.
    is_recovery: bool = False
    recovers: int | None = None

    def turn(self, status: EvaluationStatus) -> None:
        """Move it. What it waited for before is over."""
        self.status, self.stuck_since = status, None


@attrs.define
class Assignment:
    """A row of `dispatched_job`; open while it has no outcome."""

    kind: JobKind
    worker: UUID
    evaluation: int | None
    derivation: str | None
    dispatched_at: datetime
    outcome: DispatchOutcome | None = None

    @property
    def job_id(self) -> str:
        """As the database numbers it, with the derivation's letter for its id."""
        return f"eval:{self.evaluation}" if self.kind is JobKind.EVAL else f"build:{self.derivation}"


@attrs.define
class Attempt:
    """One try at a shared build, in the order they began."""

    derivation: str
    assignment: int
    evaluation: int | None
    outcome: AttemptOutcome = AttemptOutcome.RUNNING
    reason: AttemptReason | None = None


@attrs.define
class Facts:
    """Everything. An edge is (above, below); a name is (evaluation, derivation)."""

    derivations: dict[str, Derivation] = attrs.field(factory=dict)
    edges: dict[tuple[str, str], EdgeKind] = attrs.field(factory=dict)
    builds: dict[str, Build] = attrs.field(factory=dict)
    evaluations: dict[int, Evaluation] = attrs.field(factory=dict)
    # Named shared builds; True where the build was aborted for that evaluation.
    names: dict[tuple[int, str], bool] = attrs.field(factory=dict)
    # By evaluation and attribute.
    entry_points: dict[tuple[int, str], str] = attrs.field(factory=dict)
    # What the cache holds, with the paths each refers to.
    cached: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    cached_at: dict[str, datetime] = attrs.field(factory=dict)
    assignments: dict[int, Assignment] = attrs.field(factory=dict)
    attempts: list[Attempt] = attrs.field(factory=list)
