"""The pool: lends evaluator children, watches their memory, replaces the ones that fail.

Layer: rank 1. A child is started when somebody needs one and kept, warm, for the next request about the
same flake. `run` owns what goes on beside the lending and must run for as long as anything is lent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from gradient.nix.evaluator.child import REAP_LIMIT, Child
from gradient.nix.evaluator.findings import FlakeAddress
from gradient.nix.evaluator.settings import EvaluatorSettings, Role

# A child can allocate a gigabyte in a second or two; reading one line of /proc is 20 µs.
MEMORY_POLL: Final = 0.1  # seconds
# An idle child is kept when it leaves the next request at least half of the budget.
KEEP_BELOW: Final = 0.5


@attrs.frozen
class _Purpose:
    """Children of one purpose are interchangeable."""

    role: Role
    flake: FlakeAddress | None
    store: str | None


class EvaluatorPool:
    """At most `size` children evaluate or fetch at a time, and `import_size` more, which mostly wait for
    builds, import from derivations. `memory_budget` is bytes of one child."""

    def __init__(
        self,
        settings: EvaluatorSettings,
        *,
        size: int,
        import_size: int = 1,
        memory_budget: int = 2 * 2**30,
    ) -> None:
        self.settings = settings
        self.size = size
        self.import_size = import_size
        self.memory_budget = memory_budget
        # The largest resident memory any one child was seen to have, in bytes.
        self.peak_rss = 0
        self._permits = trio.Semaphore(size, max_value=size)
        self._import_permits = trio.Semaphore(import_size, max_value=import_size)
        self._lent: set[Child] = set()
        # Oldest first. Invariant: never more than the free permits, so `size` bounds the memory of all.
        self._idle: list[tuple[_Purpose, Child]] = []
        self._running = False
        # Whether this Nix cannot evaluate purely, so that access has to be restricted: the first child tells.
        # Where evaluation is pure a restriction would only forbid the flake its locked inputs.
        self._must_restrict = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the children until cancelled, then end the idle ones; lent ones end with their lending.

        Raises OSError when the settings' home folder cannot be made."""
        await trio.to_thread.run_sync(self.settings.prepare)
        self._running = True
        try:
            task_status.started()
            while True:
                self._watch_memory()
                await trio.sleep(MEMORY_POLL)
        finally:
            self._running = False
            with trio.move_on_after(REAP_LIMIT, shield=True):
                await self._keep_idle_at_most(0)

    @asynccontextmanager
    async def lend(
        self, flake: FlakeAddress | None, role: Role = Role.EVALUATE, *, store: str | None = None
    ) -> AsyncIterator[Child]:
        """A child for one task: a warm one of this flake, or a fresh one; waits for its turn.

        Given back idle, unbroken and within the budget it is kept; otherwise, cancellation included, it
        is dead when this returns. Raises EvaluatorUnusable. `run` must be running."""
        assert self._running, "EvaluatorPool.run is not running"
        purpose = _Purpose(role, flake, store)
        async with self._import_permits if role is Role.IMPORT else self._permits:
            child = await self._take(purpose)
            self._lent.add(child)
            try:
                yield child
            finally:
                self._lent.discard(child)
                with trio.move_on_after(REAP_LIMIT, shield=True):
                    await self._give_back(purpose, child)

    async def _take(self, purpose: _Purpose) -> Child:
        warm = [entry for entry in self._idle if entry[0] == purpose]
        for entry in reversed(warm):
            self._idle.remove(entry)
            if entry[1].reusable:
                return entry[1]
            await entry[1].aclose()
        await self._keep_idle_at_most(self._permits.value)
        child = await self._start(purpose)
        if child.pure or purpose.role is Role.FETCH or self._must_restrict:
            return child
        self._must_restrict = True
        await child.aclose()
        return await self._start(purpose)

    async def _start(self, purpose: _Purpose) -> Child:
        restrict = self._must_restrict and purpose.role is not Role.FETCH
        allowed_uris = (purpose.flake.input_urls if purpose.flake else ()) if restrict else None
        invocation = self.settings.invocation(purpose.role, store=purpose.store, allowed_uris=allowed_uris)
        return await Child.start(invocation, purpose.flake)

    async def _give_back(self, purpose: _Purpose, child: Child) -> None:
        rss = self._measure(child)
        # A child that imports is bound to one job's proxy.
        keep = self._running and purpose.role is not Role.IMPORT and rss <= self.memory_budget * KEEP_BELOW
        if keep and child.reusable:
            self._idle.append((purpose, child))
        else:
            await child.aclose()

    async def _keep_idle_at_most(self, number: int) -> None:
        while len(self._idle) > number:
            await self._idle.pop(0)[1].aclose()

    def _watch_memory(self) -> None:
        for child in self._lent:
            if (rss := self._measure(child)) > self.memory_budget:
                child.condemn(
                    f"was ended: it uses {rss // 2**20} MiB, over its budget of"
                    f" {self.memory_budget // 2**20} MiB"
                )

    def _measure(self, child: Child) -> int:
        rss = child.rss()
        self.peak_rss = max(self.peak_rss, rss)
        return rss
