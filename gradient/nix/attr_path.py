"""Attribute paths of a flake: their text, with quoting, and where a short name may stand for one.

Layer: rank 0, pure. A rendered path is also a valid selection in a Nix expression (`flake.a."b.c"`), whatever
the names contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from gradient.nix.errors import NixError, excerpt

AttrPath = tuple[str, ...]

# A segment: quoted with backslash escapes, or bare without what the wildcard language uses.
_SEGMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^\s".,!*#\\]+|[*#])', re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t"}
_BARE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_'-]*", re.ASCII)
_KEYWORDS: Final = frozenset({"assert", "else", "if", "in", "inherit", "let", "or", "rec", "then", "with"})


class BadAttrPath(NixError):
    """The text is no attribute path."""


def split_segments(text: str) -> Iterator[tuple[str, bool]]:
    """The segments of `text` and whether each was quoted; raises BadAttrPath.

    A bare `*` or `#` comes out like a name: what it means is the caller's.
    """
    at = 0
    while True:
        match = _SEGMENT.match(text, at)
        if match is None or (match.end() < len(text) and text[match.end()] != "."):
            raise BadAttrPath(f"{excerpt(text)} is no attribute path: {_fault(text, at, match)}")
        quoted, bare = match.groups()
        yield (bare, False) if bare is not None else (_unescape(quoted), True)
        at = match.end() + 1
        if match.end() == len(text):
            return


def parse_attr_path(text: str) -> AttrPath:
    """The names of `a.b."x.y"`; raises BadAttrPath."""
    segments = list(split_segments(text))
    if any(name in {"*", "#"} and not quoted for name, quoted in segments):
        raise BadAttrPath(f"{excerpt(text)} is a wildcard where one attribute is wanted")
    return tuple(name for name, _ in segments)


def render_attr_path(path: Iterable[str]) -> str:
    """The text of a path: names that are no plain identifiers are quoted."""
    return ".".join(_render(name) for name in path)


def nix_string(text: str) -> str:
    """`text` as a string of the Nix language, whatever it contains."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("${", "\\${")
    # A bare carriage return would be read as a line feed.
    return '"' + escaped.replace("\r", "\\r") + '"'


def unique_attr_paths(paths: Iterable[AttrPath]) -> list[AttrPath]:
    """Each path once, in the order in which people look for names."""
    return sorted(set(paths))


def candidate_paths(path: AttrPath, systems: Sequence[str]) -> tuple[AttrPath, ...]:
    """Where `nix build FLAKE#path` looks, in its order: the first that exists is meant.

    The empty path is the default package. With several systems each is tried in turn.
    """
    if not path:
        defaults = [(("packages", system, "default"), ("defaultPackage", system)) for system in systems]
        return tuple(candidate for pair in defaults for candidate in pair)
    prefixes = [(output, system) for system in systems for output in ("packages", "legacyPackages")]
    return (*((*prefix, *path) for prefix in prefixes), path)


def _unescape(quoted: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), quoted)


def _render(name: str) -> str:
    return name if _BARE.fullmatch(name) and name not in _KEYWORDS else nix_string(name)


def _fault(text: str, at: int, match: re.Match[str] | None) -> str:
    rest = text[at if match is None else match.end() :]
    if match is not None and "*" in (rest[0], match[0]):
        return "'*' stands for a whole name, not for a part of one"
    if match is not None:
        return (
            f"{excerpt(rest[:1])} cannot follow {excerpt(match[0])}: put names with such characters in quotes"
        )
    if rest[:1] in {"", "."}:
        return "a name is missing before or after a dot"
    if rest[:1] == '"':
        return "a quote is not closed"
    return f"{excerpt(rest[:1])} is not allowed outside quotes"
