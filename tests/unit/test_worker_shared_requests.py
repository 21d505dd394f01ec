"""Small uploads in one request: who shares it, and what its failure or cancellation means to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from gradient.nar.bundle import BundleItem, EntryHeader
from gradient.wire.messages import UploadGrant
from gradient.worker.shared_requests import SharedRequestFailed, SharedRequests

GRANT = UploadGrant("http://cache.test", "token", 0)


def item(letter: str) -> BundleItem:
    return BundleItem(EntryHeader(f"/nix/store/{letter * 32}-{letter}"), Path("/"))


@attrs.define(eq=False)
class Line:
    """Requests that end when `go` says so; what each held, and whose item is refused."""

    go: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(0))
    held: list[str] = attrs.field(factory=list)
    refused: str = ""

    async def request(self, items: Sequence[BundleItem], grant: UploadGrant) -> None:
        names = "".join(one.header.store_path[-1] for one in items)
        self.held.append(names)
        await self.go.acquire()
        if self.refused and self.refused in names:
            raise OSError("no")


async def test_what_comes_while_one_is_under_way_shares_the_next() -> None:
    line, shared = Line(), SharedRequests()
    async with trio.open_nursery() as nursery:
        for letter in "abcb":
            nursery.start_soon(shared.send, [item(letter)], GRANT, line.request)
            await trio.testing.wait_all_tasks_blocked()
        assert line.held == ["a"]
        line.go.release()
        line.go.release()
    assert line.held == ["a", "bc"]


async def test_a_failure_is_told_to_all_who_shared_it_and_to_nobody_else() -> None:
    line, shared = Line(refused="c"), SharedRequests()
    outcomes: dict[str, Exception | None] = {}

    async def send(letter: str) -> None:
        try:
            await shared.send([item(letter)], GRANT, line.request)
            outcomes[letter] = None
        except (OSError, SharedRequestFailed) as error:
            outcomes[letter] = error

    async with trio.open_nursery() as nursery:
        for letter in "abc":
            nursery.start_soon(send, letter)
            await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):
            line.go.release()
    assert outcomes["a"] is None
    assert isinstance(outcomes["b"], SharedRequestFailed)
    assert isinstance(outcomes["c"], SharedRequestFailed)
    line.go.release()
    with pytest.raises(OSError, match="no"):  # alone it is its own
        await shared.send([item("c")], GRANT, line.request)


async def test_a_cancelled_request_is_sent_again_by_another_who_shares_it() -> None:
    line, shared = Line(), SharedRequests()
    scope = trio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await shared.send([item("b")], GRANT, line.request)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shared.send, [item("a")], GRANT, line.request)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(cancelled)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(shared.send, [item("c")], GRANT, line.request)
        await trio.testing.wait_all_tasks_blocked()
        line.go.release()
        await trio.testing.wait_all_tasks_blocked()
        assert line.held == ["a", "bc"]
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        line.go.release()
    assert line.held == ["a", "bc", "bc"]
