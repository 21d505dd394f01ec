"""Why a target led to no derivation, in words that say what to write instead. Layer: rank 1, pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final

import attrs

from gradient.nix.attr_path import AttrPath, render_attr_path
from gradient.nix.evaluator.findings import AttrSet, Derivation, Plain, Standing

# Names that are offered, of those that are compared: a package set has more than 100,000. Those that somebody
# made up for it take 60 ms.
MAX_OFFERED: Final = 6
MAX_COMPARED: Final = 1000
# A longer name, or path, does not fit into a line, and is nothing that somebody mistyped.
MAX_NAME: Final = 80  # characters

# What Nix calls otherwise than people.
_TYPES: Final = {"lambda": "function", "int": "integer", "bool": "boolean"}


@attrs.frozen
class DeadEnd:
    """What stands at `path` leads no further: it has no `wanted`, or, None, is no derivation."""

    path: AttrPath
    standing: Standing
    wanted: str | None

    @property
    def why(self) -> str:
        """For people."""
        place = _shown(self.path) if self.path else "the flake"
        match self.standing:
            case Plain(kind):
                return f"{place} is no derivation but of the type {_TYPES.get(kind, kind)}"
            case AttrSet(names=()) | Derivation(names=()):
                return f"{place} has no attributes"
            case AttrSet() if self.wanted is None:
                return f"{place} is a set of attributes: write {place}.* for what is in it"
        wanted = self.wanted or ""
        return f"{place} has no {_shown((wanted,))}{_instead(wanted, self.standing.names)}"


def _instead(wanted: str, names: Sequence[str]) -> str:
    """The names that may have been meant, else the first there are."""
    alike = [name for name in names if name[:1] == wanted[:1] and len(name) <= MAX_NAME][:MAX_COMPARED]
    if len(wanted) <= MAX_NAME and (close := difflib.get_close_matches(wanted, alike, n=2)):
        return f", did you mean {' or '.join(_shown((name,)) for name in close)}?"
    some = ", ".join(_shown((name,)) for name in names[:MAX_OFFERED])
    return f", only {some}{', …' if len(names) > MAX_OFFERED else ''}"


def _shown(path: AttrPath) -> str:
    text = render_attr_path(path)
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…"
