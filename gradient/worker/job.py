"""A running job: its identity, and how its code speaks to the server. Layer: worker, no logic."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import trio

from gradient.model import BuildStage, JobKind
from gradient.wire.messages import Stage
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
    # Called when the job has left its slot to the next one, before it ends.
    left: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
    # Where a build is. A build that uploads holds no slot (model.free_build_slots).
    stage: BuildStage | None = None
    # Why the server wants it stopped; set before or while it runs.
    abort_reason: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What every report begins with."""
        return self.job_id, self.assignment_id

    async def enter(self, stage: BuildStage) -> None:
        """A build begins its next stage. Raises LinkClosed."""
        self.stage = stage
        await self.send(Stage(*self.key, stage))
        if stage is BuildStage.UPLOAD:
            await self.left()
