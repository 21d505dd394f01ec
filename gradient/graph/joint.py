"""Messages applied together: one set of statements for all of a kind that wait meanwhile. Layer: graph.

Builds end in crowds, each with a handful of messages; one by one they are dozens of round trips each. Those
of different builds do not depend on each other, so messages that stand side by side are taken in the order of
a build's stages, all of a stage at once. Two about one subject keep their order, and a message that is not
joint stands where it stood.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from enum import IntEnum
from itertools import groupby
from typing import Any, ClassVar, Generic, Self, TypeVar

from gradient.graph.transaction import Message, Transaction

T = TypeVar("T")


class Stage(IntEnum):
    """What happens to a build, in this order."""

    CLAIM = 0
    START = 1
    UPLOAD = 2
    OUTPUT = 3
    COMPLETION = 4


class Joint(ABC, Generic[T]):
    """A message that can be applied with others of its stage, as if they came one after the other."""

    __slots__ = ()
    stage: ClassVar[Stage]

    @property
    @abstractmethod
    def subject(self) -> Hashable:
        """What it is about; None when it may pass any other."""

    @classmethod
    @abstractmethod
    async def apply_together(cls, tx: Transaction, messages: Sequence[Self]) -> Sequence[T]:
        """Apply all of them; the answer of each. No two have one subject."""

    async def apply(self, tx: Transaction) -> T:
        """Apply this one alone."""
        (answer,) = await self.apply_together(tx, [self])
        return answer


def in_groups(messages: Sequence[Message[Any]]) -> Iterator[list[int]]:
    """The positions of `messages` in the order to apply them; several of a group are applied together."""
    run: dict[int, Joint[Any]] = {}
    reached: dict[Hashable, Stage] = {}
    for position, message in enumerate(messages):
        if isinstance(message, Joint) and not _overtakes(message, reached):
            reached[message.subject] = message.stage
            run[position] = message
            continue
        yield from _by_stage(run)
        run, reached = {}, {}
        if isinstance(message, Joint):
            reached[message.subject] = message.stage
            run[position] = message
        else:
            yield [position]
    yield from _by_stage(run)


def _overtakes(message: Joint[Any], reached: dict[Hashable, Stage]) -> bool:
    """Whether it would pass one before it that is about the same."""
    before = reached.get(message.subject)
    return message.subject is not None and before is not None and message.stage <= before


def _by_stage(run: dict[int, Joint[Any]]) -> Iterator[list[int]]:
    in_order = sorted(run, key=lambda position: run[position].stage)
    for _, positions in groupby(in_order, key=lambda position: run[position].stage):
        yield list(positions)
