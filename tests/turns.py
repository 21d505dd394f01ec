"""Two sides stepped in turn, through every order with at most two switches, or three.

A side stands before each of its steps, and goes on by one when it is told to.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import trio

from tests.patience import PATIENCE


@attrs.define(eq=False)
class Side:
    """One of the two. Between two steps it stands before the next, waits for the other, or is done."""

    answer: Any = attrs.field(default=None, init=False)
    error: Exception | None = attrs.field(default=None, init=False)
    done: bool = attrs.field(default=False, init=False)
    standing: trio.Event = attrs.field(factory=trio.Event, init=False)
    told: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def act(self) -> Any:
        """What this side does, with a turn before each step."""
        raise NotImplementedError

    async def run(self) -> None:
        """Do it, and keep the answer or the error."""
        try:
            self.answer = await self.act()
        except Exception as error:
            self.error = error
        self.done = True
        self.standing.set()

    async def turn(self) -> None:
        """Stand still until told to go on."""
        self.standing.set()
        await self.told.wait()
        self.told = trio.Event()

    async def stands(self) -> bool:
        """Return when its step is done; False when the other has what the step needs."""
        raise NotImplementedError

    async def step(self) -> bool:
        """Make one step; False when it cannot: done, or waiting for the other."""
        if not await self.stands() or self.done:
            return False
        self.standing = trio.Event()
        self.told.set()
        await self.stands()
        return True

    async def advance(self, steps: int) -> bool:
        """Make so many steps; whether it can make no more."""
        for _ in range(steps):
            if not await self.step():
                break
        return self.done or not await self.stands()


@attrs.frozen
class Order:
    """Who begins, with how many steps, and with how many the other interrupts it. Then the first goes on to
    its end; or only with the steps that it makes again, and the other comes to its end before it."""

    second_begins: bool
    before: int
    between: int
    again: int = 0


@attrs.frozen
class Outcome:
    """How one order went."""

    order: Order
    # The first was done before it had made its steps; the other was, or waited for the first; the first was
    # done, or waited for the other, before it had made those that it makes again.
    first_ended: bool
    other_stopped: bool
    first_stopped: bool
    answers: tuple[Any, Any]
    errors: tuple[Exception | None, Exception | None]


async def play(one: Side, two: Side, order: Order) -> Outcome:
    """Run both in this order, each then to its end."""
    first, other = (two, one) if order.second_begins else (one, two)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        nursery.start_soon(two.run)
        with trio.fail_after(PATIENCE):
            first_ended = await first.advance(order.before)
            other_stopped = await other.advance(order.between)
            first_stopped = await first.advance(order.again)
            for side in itertools.cycle((other, first) if order.again else (first, other)):
                while await side.step():
                    pass
                if first.done and other.done:
                    break
    stopped = first_ended, other_stopped, first_stopped
    return Outcome(order, *stopped, (one.answer, two.answer), (one.error, two.error))


async def every_order(play: Callable[[Order], Awaitable[Outcome]], switches: int = 2) -> None:
    """Try every order with at most so many switches, two or three, found as it goes: nobody knows how many
    steps there are."""
    for second_begins in (False, True):
        await _orders_begun_by(second_begins, play, switches)


async def _orders_begun_by(
    second_begins: bool, play: Callable[[Order], Awaitable[Outcome]], switches: int
) -> None:
    for before in itertools.count(1):
        for between in itertools.count(1):
            order = Order(second_begins, before, between)
            outcome = await play(order)
            if outcome.first_ended:
                return
            if outcome.other_stopped:
                break
            if switches > 2:
                await _with_a_third_switch(order, play)


async def _with_a_third_switch(order: Order, play: Callable[[Order], Awaitable[Outcome]]) -> None:
    """Those orders that begin like this one, after which both could go on."""
    for again in itertools.count(1):
        if (await play(attrs.evolve(order, again=again))).first_stopped:
            return
