"""Walking a flake by its wildcards, one level at a time. Layer: rank 0, pure.

The evaluator holds a `Cursor` at each attribute it has reached. It finds out what stands there, asks
`decide`, and enters the names that the `Decision` wants: a name that cannot matter is never forced.

A cursor is a set of patterns, each with the number of segments it has behind it. A final `*` goes on for one
segment more than it has: that is its look one level deeper.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum, auto

import attrs

from gradient.nix.attr_path import AttrPath
from gradient.nix.wildcard import STAR, AnyName, Pattern, Wildcards


class NodeKind(Enum):
    """What stands at an attribute."""

    DERIVATION = auto()
    SET = auto()
    TYPED = auto()  # a set with `_type`, such as a NixOS configuration: large and no collection
    OTHER = auto()


@attrs.frozen
class _State:
    """A pattern that led here, and how many segments that took."""

    pattern: Pattern
    consumed: int

    @property
    def is_final(self) -> bool:
        return self.consumed >= len(self.pattern.segments)

    @property
    def looks_deeper(self) -> bool:
        return self.consumed == len(self.pattern.segments) and self.pattern.segments[-1] is STAR

    @property
    def next_name(self) -> str | None:
        """The only name it can go on with, None for any."""
        if self.is_final:
            return None
        segment = self.pattern.segments[self.consumed]
        return None if isinstance(segment, AnyName) else segment

    def passes(self, kind: NodeKind) -> bool:
        """Whether it goes on below a node of this kind."""
        if self.is_final:
            return self.looks_deeper and kind is NodeKind.SET
        came_by_star = self.consumed > 0 and self.pattern.segments[self.consumed - 1] is STAR
        return kind is not NodeKind.OTHER and not (kind is NodeKind.TYPED and came_by_star)


@attrs.frozen
class Decision:
    """What to do with a node: `taken_by` are the texts of the patterns that select it as a derivation, and
    `names` are the ones to look at inside, None for all of them."""

    taken_by: frozenset[str]
    names: frozenset[str] | None
    _path: AttrPath
    _states: tuple[_State, ...]
    _exclusions: frozenset[AttrPath]

    @property
    def take(self) -> bool:
        """Whether the node is wanted."""
        return bool(self.taken_by)

    @property
    def descend(self) -> bool:
        """Whether anything inside may be wanted."""
        return bool(self._states)

    def enter(self, name: str) -> Cursor | None:
        """The cursor at the attribute `name`, None when neither it nor anything inside is wanted."""
        path = (*self._path, name)
        states = [
            _State(state.pattern, state.consumed + 1)
            for state in self._states
            if state.next_name in (None, name)
        ]
        if path in self._exclusions:
            states = [state for state in states if not state.is_final]
        return Cursor(path, tuple(states), self._exclusions) if states else None


@attrs.frozen
class Cursor:
    """A place in the flake that patterns have led to."""

    path: AttrPath
    _states: tuple[_State, ...]
    _exclusions: frozenset[AttrPath]

    @classmethod
    def root(cls, wildcards: Wildcards) -> Cursor:
        """The flake itself: a set."""
        states = tuple(_State(pattern, 0) for pattern in wildcards.patterns)
        return cls((), states, wildcards.exclusions)

    def decide(self, kind: NodeKind) -> Decision:
        """What to do here, now that it is known what stands here."""
        is_derivation = kind is NodeKind.DERIVATION
        taken_by = (state.pattern.text for state in self._states if is_derivation and state.is_final)
        inside = tuple(state for state in self._states if state.passes(kind))
        names = {state.next_name for state in inside}
        literal = frozenset(name for name in names if name is not None)
        return Decision(
            taken_by=frozenset(taken_by),
            names=literal if len(literal) == len(names) else None,
            path=self.path,
            states=inside,
            exclusions=self._exclusions,
        )

    def dead_ends(self, kind: NodeKind, names: Collection[str]) -> Iterator[tuple[str, str | None]]:
        """The texts of the patterns that go no further than this node with these names inside, each with the
        name it wanted there, None for any or none."""
        for state in self._states:
            inside = state.passes(kind)
            wanted = state.next_name if inside else None
            goes_on = inside and (bool(names) if wanted is None else wanted in names)
            if not goes_on and not (state.is_final and kind is NodeKind.DERIVATION):
                yield state.pattern.text, wanted
