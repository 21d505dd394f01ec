"""The graph that is imported and built: read from a file, or made up in the same shape. Pure.

A file has one derivation a line, as JSON; names are base names:

    {"drv": "….drv", "system": "…", "outputs": [["out", "…"]], "inputs": {"….drv": ["out"]},
     "sources": ["…"], "fixed": [algorithm, hash], "features": ["…"], "pname": "…", "attrs": ["…"]}

The made-up one has what makes a package set hard: a long chain at the bottom, a few derivations that nearly
everything needs, mostly fixed outputs, and some packages with thousands of inputs.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

import attrs
import zstandard

from gradient.model import DiscoveredDerivation, EntryPoint, OutputPath
from gradient.nix import base32
from gradient.nix.store_path import STORE_DIR
from gradient.worker.walk import Batch, Batcher, Read, Walk

SIZE: Final = 13_034  # derivations that are made up
DEPTH: Final = 104
# References of one output to its inputs, and as many to theirs.
REFERENCES: Final = 3
_ZSTD: Final = b"\x28\xb5\x2f\xfd"


@attrs.frozen
class Graph:
    """Derivations by path, and the attributes that evaluate to some of them."""

    derivations: dict[str, DiscoveredDerivation]
    entry_points: tuple[EntryPoint, ...]

    def batches(self) -> Iterator[Batch]:
        """The whole graph in the order and the portions in which a worker reports it."""
        walk, batcher = Walk(), Batcher()
        for entry in self.entry_points:
            batcher.enter(entry)
            walk.found([entry.drv_path])
        while wave := walk.next_wave():
            for path in wave:
                record = self.derivations[path]
                walk.found(record.dependencies)
                if (batch := batcher.read(Read(record, b""))) is not None:
                    yield batch
        if batch := batcher.flush():
            yield batch

    def references(self, path: str) -> tuple[str, ...]:
        """Base names that the outputs of a derivation refer to: itself, outputs of some of its inputs, and of
        some of theirs. A fixed output refers to nothing."""
        derivation = self.derivations[path]
        if derivation.is_fixed_output:
            return ()
        direct = self._referable(derivation)
        further = [other for below in direct for other in self._referable(below)[:1]]
        referred = (*direct[:REFERENCES], *further[:REFERENCES], derivation)
        return tuple(dict.fromkeys(base_name(d.outputs[0].path) for d in referred))

    def _referable(self, derivation: DiscoveredDerivation) -> list[DiscoveredDerivation]:
        inputs = (self.derivations[below] for below in derivation.dependencies)
        return [below for below in inputs if not below.is_fixed_output]


def base_name(path: str) -> str:
    """Without the store directory."""
    return path.removeprefix(f"{STORE_DIR}/")


def load(file: Path | None) -> Graph:
    """The graph of a file (zstd or plain), or the made-up one."""
    return made_up() if file is None else read(file)


def read(file: Path) -> Graph:
    """Read a graph from a file."""
    data = file.read_bytes()
    if data.startswith(_ZSTD):
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    rows = [json.loads(line) for line in data.splitlines()]
    needed = set(chain.from_iterable(row["inputs"] for row in rows))
    entries = []
    for row in rows:
        # What nobody needs is an entry point, whether or not the file has an attribute for it.
        attrs_of = row.get("attrs") or ([] if row["drv"] in needed else [row["drv"]])
        entries += [EntryPoint(attr, _full(row["drv"])) for attr in attrs_of]
    derivations = [_derivation(row) for row in rows]
    return Graph(
        {derivation.drv_path: derivation for derivation in derivations},
        tuple(sorted(entries, key=lambda entry: entry.attr)),
    )


def _derivation(row: dict[str, Any]) -> DiscoveredDerivation:
    return DiscoveredDerivation(
        _full(row["drv"]),
        tuple(OutputPath(name, _full(path)) for name, path in row["outputs"]),
        tuple(_full(path) for path in row["inputs"]),
        tuple(_full(path) for path in row.get("sources", ())),
        row["system"],
        tuple(row.get("features", ())),
        prefer_local_build=row.get("prefer_local", False),
        is_fixed_output="fixed" in row,
        pname=row.get("pname"),
    )


def _full(name: str) -> str:
    return f"{STORE_DIR}/{name}"


# --- made up --------------------------------------------------------------------------------------


def made_up(size: int = SIZE, prefix: str = "n") -> Graph:
    """A graph in the shape of a package set of 13,034 derivations: 79 % fixed outputs, 5.6 inputs each. What
    it names begins with `prefix`."""
    dice = random.Random(size)
    inputs: list[list[int]] = [[i - 1] if i else [] for i in range(DEPTH)]
    fixed: set[int] = set()
    packages = [DEPTH - 1]
    hubs = [DEPTH - 1, DEPTH - 2, DEPTH - 3]
    while len(inputs) < size:
        number = len(inputs)
        if number % 5:
            fixed.add(number)
            inputs.append(hubs)
        else:
            sources = [i for i in range(max(DEPTH, number - 4), number) if i in fixed]
            others = dice.sample(packages, min(len(packages), _width(dice, number)))
            inputs.append([*hubs, *sources, *others])
            packages.append(number)
    # One that needs a third of everything, as a distribution of TeX does.
    inputs.append([*hubs, *dice.sample(sorted(fixed), len(fixed) // 3)])
    needed = set(chain.from_iterable(inputs))
    roots = [i for i in range(len(inputs)) if i not in needed]
    names = [f"{prefix}{i}" for i in range(len(inputs))]
    derivations = [
        _made_up(name, [names[i] for i in dict.fromkeys(below)], number in fixed)
        for number, (name, below) in enumerate(zip(names, inputs, strict=True))
    ]
    return Graph(
        {derivation.drv_path: derivation for derivation in derivations},
        tuple(EntryPoint(f"packages.{names[i]}", derivations[i].drv_path) for i in roots),
    )


def _width(dice: random.Random, number: int) -> int:
    return dice.choice((2, 4, 6, 8, 12, 16)) if number > DEPTH * 2 else 1


def _made_up(name: str, inputs: Iterable[str], fixed: bool) -> DiscoveredDerivation:
    return DiscoveredDerivation(
        _path(f"{name}.drv"),
        (OutputPath("out", _path(name)),),
        tuple(_path(f"{below}.drv") for below in inputs),
        (_path("builder.sh"), _path(f"{name}.patch")),
        "x86_64-linux",
        is_fixed_output=fixed,
        pname=name,
    )


def _path(name: str) -> str:
    return f"{STORE_DIR}/{base32.encode(hashlib.sha256(name.encode()).digest()[:20])}-{name}"
