"""Running jobs, and the time they get to report after a stop.

A worker that is told to stop cancels its jobs and must still send `JobFailed` for each, so that the
server hands them to another worker at once. It has five seconds for that, not one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio

# The seed page "Jobs": on a stop the worker waits up to 5 s for its jobs to report, then closes.
STOP_WINDOW: Final = 5.0  # seconds


@attrs.define(eq=False)
class StopWindow:
    """The jobs that run, each with its cancel scope.

    A job has two parts: its work, inside the scope that `job` gives, and its report, after that scope
    and still inside `job`. So work that was cancelled can be reported:

        with window.job(job_id) as scope:
            with scope:
                await work()
            await report()
    """

    length: float = STOP_WINDOW
    closing: bool = attrs.field(default=False, init=False)
    _scopes: dict[str, trio.CancelScope] = attrs.field(factory=dict, init=False)
    # Set while no job runs.
    _empty: trio.Event = attrs.field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._empty.set()

    @property
    def running(self) -> tuple[str, ...]:
        """The jobs that have not reported yet."""
        return tuple(self._scopes)

    @contextmanager
    def job(self, name: str) -> Iterator[trio.CancelScope]:
        """Count the block as the job `name`; one that begins after `close` finds its scope cancelled."""
        assert name not in self._scopes, f"job {name} runs already"
        scope = self._scopes[name] = trio.CancelScope()
        if len(self._scopes) == 1:
            self._empty = trio.Event()
        if self.closing:
            scope.cancel()
        try:
            yield scope
        finally:
            del self._scopes[name]
            if not self._scopes:
                self._empty.set()

    def abort(self, name: str) -> bool:
        """Cancel the work of one job; False when no such job runs."""
        scope = self._scopes.get(name)
        if scope is not None:
            scope.cancel()
        return scope is not None

    async def wait_empty(self) -> None:
        """Wait until no job runs."""
        await trio.lowlevel.checkpoint()
        while self._scopes:
            await self._empty.wait()

    async def close(self) -> tuple[str, ...]:
        """Cancel every job and wait for the reports, `length` seconds at most.

        Returns the jobs that did not report in time; the caller's nursery then ends them. Not shielded:
        a stop at once cuts the window short.
        """
        deadline = trio.current_time() + self.length
        self.closing = True
        for scope in list(self._scopes.values()):
            scope.cancel()
        with trio.move_on_at(deadline):
            await self.wait_empty()
        return self.running
