"""Small uploads of several jobs in one request. Layer: worker, no IO of its own.

A request costs the server much the same for one small NAR as for ten: a thread, a disk flush, a transaction.
So one goes at a time, and what comes meanwhile shares the next.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import attrs
import trio

from gradient.nar.bundle import BundleItem
from gradient.wire.messages import UploadGrant

# Sends the items in one request; raises when the server does not take them.
Request: TypeAlias = Callable[[Sequence[BundleItem], UploadGrant], Awaitable[None]]


class SharedRequestFailed(Exception):
    """A request failed that held NARs of others too: whose fault it was is not known. Send them alone."""


@attrs.define(eq=False)
class _Batch:
    # By store path: two jobs may have made the same one, and a request names each once.
    items: dict[str, BundleItem] = attrs.field(factory=dict)
    over: bool = False
    error: Exception | None = None


class SharedRequests:
    """The small uploads of a worker."""

    def __init__(self) -> None:
        self._turn = trio.Lock()
        # Invariant: not over; whoever has the turn first sends it for all who joined.
        self._next = _Batch()

    async def send(self, items: Sequence[BundleItem], grant: UploadGrant, request: Request) -> None:
        """Have `items` sent, by the `request` of this caller or of another who shares it.

        Raises what `request` raised, when it was for these items alone, and SharedRequestFailed. When the
        caller at work is cancelled, another one sends the request again.
        """
        batch = self._next
        batch.items.update((item.header.store_path, item) for item in items)
        async with self._turn:
            if not batch.over:
                await self._run(batch, grant, request)
        if batch.error is None:
            return
        if len(batch.items) > len(items):
            raise SharedRequestFailed(str(batch.error)) from batch.error
        raise batch.error

    async def _run(self, batch: _Batch, grant: UploadGrant, request: Request) -> None:
        if self._next is batch:
            self._next = _Batch()
        try:
            await request(tuple(batch.items.values()), grant)
        except Exception as error:
            batch.error = error
        batch.over = True
