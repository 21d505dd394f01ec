"""Drives psycopg's generators with trio. Layer: graph.

psycopg's protocol code is generators that yield "wait until readable/writable" and never do IO
themselves; its asyncio half is only the driver of those, and this is ours.
"""

from __future__ import annotations

import select
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
from psycopg.abc import PQGen, PQGenConn
from psycopg.waiting import Ready, Wait

from gradient.graph.pg_errors import DatabaseGone

T = TypeVar("T")


async def _ready(fd: int, want: Wait) -> Ready:
    """Wait until `fd` is readable or writable, as `want` says; at once if it is already."""
    if ready := ready_now(fd, want):
        await trio.lowlevel.cancel_shielded_checkpoint()
        return ready
    if want == Wait.R:
        await trio.lowlevel.wait_readable(fd)
        return Ready.R
    if want == Wait.W:
        await trio.lowlevel.wait_writable(fd)
        return Ready.W
    return await _either(fd)


def ready_now(fd: int, want: Wait) -> Ready:
    """What of `want` `fd` is ready for at this moment."""
    poll = select.poll()
    poll.register(fd, (select.POLLIN if want & Wait.R else 0) | (select.POLLOUT if want & Wait.W else 0))
    for _, mask in poll.poll(0):
        # An error or hang-up wakes the generator too: it finds out by reading.
        found = (Ready.R if mask & ~select.POLLOUT else 0) | (Ready.W if mask & select.POLLOUT else 0)
        return Ready(found)
    return Ready.NONE


async def _either(fd: int) -> Ready:
    """Wait until `fd` is readable or writable, whichever comes first."""
    ready = Ready.NONE
    failure: Exception | None = None

    async def one(wait: Callable[[int], Awaitable[None]], state: Ready) -> None:
        nonlocal ready, failure
        try:
            await wait(fd)
            ready = Ready(ready | state)
        except (OSError, trio.ClosedResourceError) as error:
            failure = error
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, trio.lowlevel.wait_readable, Ready.R)
        nursery.start_soon(one, trio.lowlevel.wait_writable, Ready.W)
    if failure is not None:
        raise failure
    return ready


async def drive(gen: PQGen[T], fd: int) -> T:
    """Run `gen` to its end. After a cancellation it may be driven again: it asks for the same wait."""
    try:
        want = next(gen)
        while True:
            want = gen.send(await _ready(fd, want))
    except StopIteration as stop:
        result: T = stop.value
        return result
    except (OSError, trio.ClosedResourceError) as error:
        raise DatabaseGone("the connection was closed while it was in use") from error


async def drive_connecting(gen: PQGenConn[T]) -> T:
    """Run `gen`, which says with each wait on which socket, to its end."""
    try:
        fd, want = next(gen)
        while True:
            fd, want = gen.send(await _ready(fd, want))
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        gen.close()
