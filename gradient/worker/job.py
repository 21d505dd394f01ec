"""A running job: its identity, and how its code speaks to the server. Layer: worker, no logic."""

from __future__ import annotations

import attrs

from gradient.model import JobKind
from gradient.worker.queries import Queries, Send
from gradient.worker.timeline import Timeline


@attrs.define(eq=False)
class Job:
    """One job of a session.

    Reports are made as `Building(*job.key, ...)`: a re-sent assignment changes `assignment_id` under a
    running job, and what is sent afterwards echoes the new one.
    """

    job_id: str
    assignment_id: int
    kind: JobKind
    send: Send
    queries: Queries
    timeline: Timeline = attrs.field(factory=Timeline)
    # Why the server wants it stopped; set before or while it runs.
    abort_reason: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What every report begins with."""
        return self.job_id, self.assignment_id
