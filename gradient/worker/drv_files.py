"""Reading `.drv` files from the local store. Layer: worker, blocking IO: call from a worker thread."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

import attrs

from gradient.model import FailureKind
from gradient.nar.bundle import BundleItem, EntryHeader
from gradient.nar.tree import regular_file
from gradient.nix.derivation import MAX_SIZE, Derivation, InvalidDerivation, parse_derivation
from gradient.nix.facts import discover
from gradient.nix.hashes import Hash
from gradient.nix.store_path import StorePath
from gradient.worker.errors import JobFault
from gradient.worker.store_names import base_names
from gradient.worker.walk import Read

# Output paths of derivations that others need: a few hundred bytes each.
_REMEMBERED: Final = 20_000
# A NAR of one file is its content, padded to 8, in so many bytes.
_NAR_FRAME: Final = 112


class DrvMissing(Exception):
    """The store has no such file."""


@attrs.frozen
class BuildPlan:
    """What a build needs to be valid: the `.drv` itself, its sources, and the outputs it uses."""

    drv_path: str
    inputs: tuple[str, ...]


@attrs.frozen
class Unreadable:
    """What was said to be a derivation, and why it cannot be walked."""

    drv_path: str
    fault: JobFault


def read_derivations(paths: Iterable[str]) -> list[Read | Unreadable]:
    """The records of derivations and the bytes they came from, in order."""
    found: list[Read | Unreadable] = []
    for path in paths:
        try:
            data, derivation = _read(path)
            found.append(Read(discover(derivation, path), data))
        except DrvMissing as error:
            found.append(Unreadable(path, JobFault(FailureKind.TRANSIENT, str(error))))
        except JobFault as fault:
            found.append(Unreadable(path, fault))
    return found


def build_plan(drv_path: str) -> BuildPlan:
    """What to fetch before this is built. Raises DrvMissing when it, or an input's `.drv`, is not here."""
    _, derivation = _read(drv_path)
    inputs = dict.fromkeys(derivation.input_srcs)
    for input_drv, names in derivation.input_drvs.items():
        outputs = output_paths(input_drv)
        for name in names:
            if not (path := outputs.get(name, "")):
                raise JobFault(
                    FailureKind.PERMANENT,
                    f"{drv_path} needs the output {name} of {input_drv}, whose path is not known",
                )
            inputs[path] = None
    return BuildPlan(drv_path, tuple(inputs))


@lru_cache(maxsize=_REMEMBERED)
def output_paths(drv_path: str) -> dict[str, str]:
    """Output name -> path, "" while unknown. Never changes: a `.drv` is named by its content."""
    _, derivation = _read(drv_path)
    return {output.name: output.path for output in derivation.outputs}


def drv_item(read: Read) -> BundleItem:
    """The `.drv` file as an upload."""
    record, data = read.record, read.data
    header = EntryHeader(
        store_path=record.drv_path,
        references=base_names((*record.dependencies, *record.input_sources)),
        ca=f"text:{Hash.of(data).nix32()}",
        nar_size=_NAR_FRAME + len(data) + -len(data) % 8,
    )
    return BundleItem(header, regular_file(data))


def _read(path: str) -> tuple[bytes, Derivation]:
    name = StorePath.parse(path).name
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_SIZE + 1)
    except FileNotFoundError:
        raise DrvMissing(f"{path} is not in the local store") from None
    except OSError as error:
        raise JobFault(FailureKind.TRANSIENT, f"{path} cannot be read: {error.strerror}") from error
    try:
        return data, parse_derivation(data, name)
    except InvalidDerivation as error:
        raise JobFault(FailureKind.PERMANENT, str(error)) from error
