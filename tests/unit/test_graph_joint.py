"""Which messages are applied together, and in which order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Self

import attrs
import pytest

from gradient.graph.joint import Joint, Stage, in_groups
from gradient.graph.transaction import Transaction


class _Nothing(Joint[None]):
    @classmethod
    async def apply_together(cls, tx: Transaction, messages: Sequence[Self]) -> list[None]:
        return [None] * len(messages)


@attrs.frozen
class _OfBuild(_Nothing):
    build: int

    @property
    def subject(self) -> Hashable:
        return self.build


class Start(_OfBuild):
    stage: ClassVar[Stage] = Stage.START


class Output(_OfBuild):
    stage: ClassVar[Stage] = Stage.OUTPUT


class Complete(_OfBuild):
    stage: ClassVar[Stage] = Stage.COMPLETION


class Upload(_Nothing):
    stage: ClassVar[Stage] = Stage.UPLOAD
    subject = None  # type: ignore[assignment]


class Other:
    async def apply(self, tx: Transaction) -> None: ...


@pytest.mark.parametrize(
    ("messages", "groups"),
    [
        ([], []),
        ([Other(), Other()], [[0], [1]]),
        ([Start(1), Start(2), Start(3)], [[0, 1, 2]]),
        ([Output(1), Upload(), Start(2), Output(3), Upload()], [[2], [1, 4], [0, 3]]),
        # One build: in order anyway, and together with those of another.
        ([Output(1), Complete(1), Output(2), Complete(2)], [[0, 2], [1, 3]]),
        # What comes again, or the wrong way round, does not pass what came before it.
        ([Output(1), Output(2), Output(1)], [[0, 1], [2]]),
        ([Complete(1), Output(2), Output(1)], [[1], [0], [2]]),
        ([Complete(1), Output(1), Complete(1)], [[0], [1], [2]]),
        # Any other message stands where it stood.
        ([Output(1), Other(), Start(2), Output(2), Upload()], [[0], [1], [2], [4], [3]]),
        ([Complete(1), Start(2), Other()], [[1], [0], [2]]),
    ],
)
def test_groups_are_in_the_order_of_stages(messages: list[Any], groups: list[list[int]]) -> None:
    assert list(in_groups(messages)) == groups


def test_every_message_is_in_one_group() -> None:
    messages = [kind(i % 3) for i, kind in enumerate([Start, Output, Complete, Output, Start] * 5)]
    positions = [position for group in in_groups(messages) for position in group]
    assert sorted(positions) == list(range(len(messages)))
    for build in range(3):
        own = [i for i, message in enumerate(messages) if message.build == build]
        stages = [(positions.index(i), messages[i].stage) for i in own]
        assert [i for i, _ in stages] == sorted(i for i, _ in stages) or len(own) > 1
