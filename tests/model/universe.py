"""Random derivations: what they need, what they make, what their NARs refer to.

Drawn so that Hypothesis can take them apart: a failing universe shrinks to the few derivations it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final

import attrs
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from gradient.graph.nar import Signed
from gradient.model import DiscoveredDerivation, NarRecord, OutputPath
from tests.graph.world import drv, hash_part
from tests.model.model import Found

LETTERS: Final = "abcdefghij"
# Input sources: files that nobody makes.
SOURCES: Final = ("sh-source", "patch-source")


class Makes(Enum):
    """What a derivation makes."""

    ONE = "one output"
    TWO = "two outputs, which may refer to each other"
    FIXED = "the path that an earlier derivation makes, as fixed outputs do"
    TWIN = "every path that an earlier derivation makes: they differ in fixed outputs below alone"


@attrs.frozen
class Universe:
    """Derivations by letter, and the references of each path."""

    found: Mapping[str, Found]
    references: Mapping[str, tuple[str, ...]]

    def as_json(self) -> dict[str, Any]:
        """For a script."""
        return {
            "found": [attrs.asdict(found) for found in self.found.values()],
            "references": self.references,
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Universe:
        """From a script."""
        found = (
            Found(f["name"], tuple(f["inputs"]), f["outputs"], tuple(f["sources"])) for f in values["found"]
        )
        references = {path: tuple(refs) for path, refs in values["references"].items()}
        return cls({f.name: f for f in found}, references)

    def closure(self, tops: Iterable[str], known: Iterable[str] = ()) -> list[str]:
        """What a worker's walk finds below `tops`; it skips the subtrees of `known`."""
        walked: list[str] = []
        due = list(tops)
        while due:
            name = due.pop()
            if name not in walked and name not in known:
                walked.append(name)
                due += self.found[name].inputs
        return walked

    def outputs(self, name: str) -> dict[str, tuple[str, ...]]:
        """The paths of a derivation, with the references of each."""
        return {path: self.references[path] for path in self.found[name].outputs.values()}


@st.composite
def universes(draw: DrawFn) -> Universe:
    """Up to eight derivations, each needing earlier ones."""
    found: dict[str, Found] = {}
    references: dict[str, tuple[str, ...]] = dict.fromkeys(SOURCES, ())
    for name in LETTERS[: draw(st.integers(3, 8))]:
        earlier = list(found)
        inputs = tuple(draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3))) if earlier else ()
        outputs = _outputs(draw, name, found, references)
        sources = tuple(draw(st.lists(st.sampled_from(SOURCES), unique=True, max_size=1)))
        found[name] = Found(name, inputs, outputs, sources)
        for path in outputs.values():
            if path not in references:
                references[path] = _references(draw, path, found, name)
    return Universe(found, references)


def _outputs(
    draw: DrawFn, name: str, found: Mapping[str, Found], references: dict[str, tuple[str, ...]]
) -> dict[str, str]:
    makes = draw(st.sampled_from(Makes))
    if makes is Makes.TWO:
        return {"out": name, "dev": f"{name}-dev"}
    if makes is Makes.ONE or not found:
        return {"out": name}
    twin = found[draw(st.sampled_from(sorted(found)))]
    if makes is Makes.TWIN:
        return dict(twin.outputs)
    shared = twin.outputs["out"]
    if len(twin.outputs) == 1:
        # A fixed output refers to nothing.
        references[shared] = ()
        return {"out": shared}
    return {"out": name}


def _references(draw: DrawFn, path: str, found: Mapping[str, Found], name: str) -> tuple[str, ...]:
    """Some of what it was built from, itself, and its sibling."""
    due, closure = [name], set()
    while due:
        low = due.pop()
        if low not in closure:
            closure.add(low)
            due += found[low].inputs
    lows = [found[low] for low in closure]
    paths = sorted({path for low in lows for path in (*low.outputs.values(), *low.sources)})
    return tuple(draw(st.lists(st.sampled_from(paths), unique=True, max_size=3)))


# --- as the wire has them -------------------------------------------------------------------------


def store_path(name: str) -> str:
    """The full path of a name part."""
    return f"/nix/store/{hash_part(name)}-{name}"


def discovered(found: Found) -> DiscoveredDerivation:
    """One derivation of an EvalResult batch."""
    outputs = tuple(OutputPath(name, store_path(path)) for name, path in found.outputs.items())
    inputs, sources = tuple(map(drv, found.inputs)), tuple(map(store_path, found.sources))
    return DiscoveredDerivation(drv(found.name), outputs, inputs, sources, "x86_64-linux")


def signed(path: str, references: Iterable[str]) -> Signed:
    """A NAR of a CommitNars."""
    names = tuple(store_path(reference).removeprefix("/nix/store/") for reference in references)
    nar = NarRecord(store_path(path), "sha256:" + "0" * 52, 120, "sha256:" + "1" * 52, 100, names)
    return Signed(nar, "key:signature")
