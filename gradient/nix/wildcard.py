"""The wildcard language: which attributes of a flake a task wants. Layer: rank 0, pure.

A text is a comma-separated list of patterns, each a path of segments:

| form | selects |
|---|---|
| `a.b."x.y"` | this attribute; quotes keep dots and other special characters |
| `*` | any name; as the last segment also derivations one level deeper; elsewhere not into typed sets |
| `#` | any name; as the last segment derivations of this level only; elsewhere into every set |
| `!a.b` | nothing: takes this exact attribute out |
| `*` alone | `ROOT.*` for each of ROOTS |

`wildcard_match` decides with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Final

import attrs

from gradient.nix.attr_path import AttrPath, BadAttrPath, parse_attr_path, render_attr_path, split_segments
from gradient.nix.errors import NixError, excerpt

# What `*` alone looks into.
ROOTS: Final = (
    "checks",
    "packages",
    "formatter",
    "legacyPackages",
    "nixosConfigurations",
    "devShells",
    "hydraJobs",
)
# People type these; a longer one is a mistake or an attack.
MAX_LENGTH: Final = 64 * 2**10  # characters


class BadWildcard(NixError):
    """The text is no list of patterns."""


class AnyName(Enum):
    """A segment that stands for every name."""

    STAR = "*"
    HASH = "#"


STAR: Final = AnyName.STAR
HASH: Final = AnyName.HASH
Segment = str | AnyName


@attrs.frozen
class Pattern:
    """One pattern. `text` is what the user wrote, for messages: several patterns can come from one text."""

    segments: tuple[Segment, ...]
    text: str

    @property
    def path(self) -> AttrPath | None:
        """The one attribute it selects, None when it has wildcards."""
        names = tuple(segment for segment in self.segments if isinstance(segment, str))
        return names if len(names) == len(self.segments) else None


@attrs.frozen
class Wildcards:
    """All patterns of a task, each once and sorted, and the attributes taken out again."""

    patterns: tuple[Pattern, ...]
    exclusions: frozenset[AttrPath]

    def unmatched(self, matched: Iterable[str]) -> list[str]:
        """The texts of patterns that are not in `matched`: nothing was found for them."""
        return sorted({pattern.text for pattern in self.patterns} - set(matched))


def default_wildcards(systems: Iterable[str]) -> tuple[str, ...]:
    """What a task without wildcards wants: the packages and checks of `systems`."""
    return tuple(
        f"{render_attr_path((output, system))}.*" for system in systems for output in ("packages", "checks")
    )


def parse_wildcards(texts: Iterable[str]) -> Wildcards:
    """Read lists of patterns; raises BadWildcard with the item at fault."""
    patterns: set[Pattern] = set()
    exclusions: set[AttrPath] = set()
    for item in (item for text in texts for item in _items(text)):
        if item.startswith("!"):
            exclusions.add(_exclusion(item))
        else:
            patterns |= _patterns(item)
    if not patterns:
        raise BadWildcard("there is nothing to evaluate: give at least one wildcard that is no exclusion")
    return Wildcards(
        tuple(sorted(patterns, key=lambda pattern: _order(pattern.segments))), frozenset(exclusions)
    )


def plain_path(text: str) -> AttrPath | None:
    """The path when `text` names one attribute and is no wildcard; None also for an empty text."""
    try:
        return parse_attr_path(text)
    except BadAttrPath:
        return None


_ITEM: Final = re.compile(r'(?:[^",]|"(?:[^"\\]|\\.)*")*', re.DOTALL)


def _items(text: str) -> Iterator[str]:
    """The items between the commas that are not in quotes; blanks are allowed only behind a comma."""
    if len(text) > MAX_LENGTH:
        raise BadWildcard(f"the wildcard {excerpt(text)} is longer than {MAX_LENGTH} characters")
    at = 0
    while at <= len(text):
        match = _ITEM.match(text, at)
        end = match.end() if match else at
        if text[end : end + 1] == '"':
            raise BadWildcard(f"the wildcard {excerpt(text)} has a quote that is not closed")
        yield _checked(text[at:end].lstrip(" ") if at else text[at:end], text)
        at = end + 1


def _checked(item: str, text: str) -> str:
    if not item:
        raise BadWildcard(f"the wildcard {excerpt(text)} has an empty item")
    if item != item.strip():
        raise BadWildcard(
            f"the wildcard {excerpt(text)} has blanks at an edge: they are allowed after a comma"
        )
    if item == "!":
        raise BadWildcard("a wildcard that is only ! excludes nothing: write !PATH")
    if item == "#":
        raise BadWildcard("a wildcard that is only # is not allowed: write a path, such as packages.#.#")
    return item


def _exclusion(item: str) -> AttrPath:
    segments = _segments(item[1:], item)
    if any(isinstance(segment, AnyName) for segment in segments):
        raise BadWildcard(f"the exclusion {excerpt(item)} has a wildcard: exclusions are exact paths")
    return tuple(segment for segment in segments if isinstance(segment, str))


def _patterns(item: str) -> set[Pattern]:
    segments = _collapse(_segments(item, item))
    if segments == (STAR,):
        return {Pattern((root, STAR), item) for root in ROOTS}
    return {Pattern(segments, item)}


def _segments(text: str, item: str) -> tuple[Segment, ...]:
    try:
        return tuple(_segment(name, quoted, item) for name, quoted in split_segments(text))
    except BadAttrPath as error:
        raise BadWildcard(f"malformed wildcard: {error}") from error


def _segment(name: str, quoted: bool, item: str) -> Segment:
    if quoted and name in {"*", "#", "!"}:
        raise BadWildcard(f"the wildcard {excerpt(item)} has {name} in quotes: leave them out")
    return AnyName(name) if not quoted and name in {"*", "#"} else name


def _collapse(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Runs of `*` are one: `a.*.*` is `a.*`."""
    runs = zip(segments, (None, *segments), strict=False)
    return tuple(segment for segment, before in runs if not segment is before is STAR)


def _order(segments: Iterable[Segment]) -> list[tuple[bool, str]]:
    return [(isinstance(s, str), s if isinstance(s, str) else s.value) for s in segments]
