"""One run of an operation for everybody who waits for it: group commit.

Ten tasks that each need their file on disk are served by one `fsync` of the folder, provided it
starts after the last of them asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import trio


@attrs.define(eq=False)
class _Batch:
    """The callers whom one run serves."""

    done: bool = False
    error: Exception | None = None


@attrs.define(eq=False)
class Coalescer:
    """Calling it waits for one whole run of `operation` that began after the call.

    An error of that run is raised in every caller it served. It is never tried again for them: after
    a failed `fsync` a second one can succeed although the data is lost. A cancelled caller takes
    its run with it only if it was the one running it, and then the next caller runs again.
    """

    operation: Callable[[], Awaitable[None]]
    _lock: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    # The callers of the next run: everybody joins this one until it begins.
    _gathering: _Batch = attrs.field(factory=_Batch, init=False)

    async def __call__(self) -> None:
        batch = self._gathering
        async with self._lock:
            if not batch.done:
                await self._run_for(batch)
        if batch.error is not None:
            raise batch.error

    async def _run_for(self, batch: _Batch) -> None:
        if self._gathering is batch:
            self._gathering = _Batch()
        try:
            await self.operation()
        except Exception as error:  # every caller of the batch raises it
            batch.done, batch.error = True, error
            raise
        batch.done = True
