"""What each child of the process is doing, as plain values for `/health` and `gradient status`.

Owns the table; the children write their own rows through `supervise` and `periodic`. Methods are
synchronous and never wait, so a reader always sees a whole row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Final

import attrs

# An error text can quote a whole SQL statement; a health page needs its beginning.
ERROR_LENGTH: Final = 500  # characters


class State(Enum):
    """What a child does at this moment."""

    RUNNING = "running"
    BACKING_OFF = "backing off"
    STOPPED = "stopped"


@attrs.frozen
class Moment:
    """One instant on both clocks: `wall` (seconds since the epoch) is for people, `monotonic` for ages."""

    monotonic: float
    wall: float


def system_clock() -> Moment:
    """The moment it is, from the machine's clocks."""
    return Moment(time.monotonic(), time.time())


@attrs.frozen
class ChildHealth:
    """A row as it was when it was read. None: it has not happened yet."""

    name: str
    state: State
    since: Moment
    last_good: Moment | None
    last_error: str | None
    last_error_at: Moment | None
    restarts: int


@attrs.define(eq=False)
class Child:
    """The writing end of one row; its child calls these."""

    name: str
    _clock: Callable[[], Moment]
    _row: ChildHealth = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._row = ChildHealth(self.name, State.STOPPED, self._clock(), None, None, None, 0)

    @property
    def now(self) -> ChildHealth:
        """The row as it stands."""
        return self._row

    def running(self) -> None:
        """The child was started, or started again."""
        self._move(State.RUNNING)

    def good(self) -> None:
        """It did its work once, to the end."""
        self._row = attrs.evolve(self._row, last_good=self._clock())

    def failed(self, error: str) -> None:
        """It failed and carries on; `error` in words."""
        self._row = attrs.evolve(self._row, last_error=error[:ERROR_LENGTH], last_error_at=self._clock())

    def backing_off(self) -> None:
        """It failed and waits before it is started again."""
        self._move(State.BACKING_OFF, restarts=self._row.restarts + 1)

    def stopped(self) -> None:
        """It ended for good."""
        self._move(State.STOPPED)

    def _move(self, state: State, *, restarts: int | None = None) -> None:
        count = self._row.restarts if restarts is None else restarts
        self._row = attrs.evolve(self._row, state=state, since=self._clock(), restarts=count)


@attrs.define(eq=False)
class HealthTable:
    """Every child of a process by name. `clock` gives the moment it is."""

    clock: Callable[[], Moment] = system_clock
    _children: dict[str, Child] = attrs.field(factory=dict, init=False)

    def child(self, name: str) -> Child:
        """The row of `name`, made on first use; a child that starts again finds its old row."""
        return self._children.setdefault(name, Child(name, self.clock))

    def snapshot(self) -> tuple[ChildHealth, ...]:
        """Every row, in the order in which the children first appeared."""
        return tuple(child.now for child in self._children.values())


def describe(error: BaseException) -> str:
    """An error in one line: the leaves of a group, each with its type, joined by `; `."""
    return "; ".join(f"{type(leaf).__name__}: {' '.join(str(leaf).split())}" for leaf in leaves(error))


def leaves(error: BaseException) -> list[BaseException]:
    """The errors that a group holds, however deep; an error that is no group is its own only leaf."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for member in error.exceptions for leaf in leaves(member)]
