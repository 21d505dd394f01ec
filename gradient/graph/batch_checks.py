"""What a batch of walked derivations may say of itself, and its paths parsed. Layer: graph, pure.

Batches come from workers and are hostile. PostgreSQL would refuse values it cannot hold, but in words that
name no derivation; and it would hold what does harm later: texts too long for an index, derivations that can
never be done, limits that are none. What contradicts other batches is found in `build_circles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Final, TypeAlias

import attrs

from gradient.graph.transaction import Rejected
from gradient.model import MAX_ATTR, DiscoveredDerivation, EntryPoint
from gradient.nix.derivation import EXTENSION
from gradient.nix.errors import NixError, excerpt
from gradient.nix.store_path import StorePath, check_name

# The worker cuts them to this; package name and system share an index row.
MAX_TEXT: Final = 256  # characters
# No machine has so many.
MAX_FEATURES: Final = 64
# What its column holds: 68 years.
MAX_SECONDS: Final = 2**31 - 1

Parse: TypeAlias = Callable[[str], StorePath]


@attrs.frozen
class CheckedDerivation:
    """A derivation of a batch with its paths parsed."""

    record: DiscoveredDerivation
    inputs: frozenset[str]  # `.drv` paths
    outputs: tuple[tuple[str, StorePath], ...]  # by name
    sources: tuple[StorePath, ...]


@attrs.frozen
class CheckedBatch:
    """A batch in order: each derivation once, by its `.drv` path, and the attributes' derivations."""

    derivations: dict[str, CheckedDerivation]
    entry_points: tuple[tuple[str, str], ...]


def check_batch(
    derivations: Iterable[DiscoveredDerivation], entry_points: Iterable[EntryPoint]
) -> CheckedBatch:
    """Parse a batch. Raises Rejected, in words for the evaluation's page that name the derivation or the
    attribute at fault."""
    # Most batches name a few paths again and again.
    parse = cache(StorePath.parse)
    drv_paths: set[str] = set()
    checked: dict[str, CheckedDerivation] = {}
    for derivation in derivations:
        # Of two records the first one stays, as it does when they come in two batches.
        checked.setdefault(derivation.drv_path, _named_fault(derivation, drv_paths, parse))
    for entry in entry_points:
        _check_entry(entry, drv_paths)
    return CheckedBatch(checked, tuple((entry.attr, entry.drv_path) for entry in entry_points))


def drv_key(drv_path: str) -> tuple[str, str]:
    """Hash part and name, without `.drv`, of a derivation's path: what its row is found by.

    Raises Rejected for what is no such path.
    """
    try:
        path = StorePath.parse(drv_path)
    except NixError as error:
        raise Rejected(str(error)) from error
    if not path.name.endswith(EXTENSION):
        raise Rejected(f"{drv_path} is not the path of a derivation")
    return path.hash_part, path.name.removesuffix(EXTENSION)


def _named_fault(derivation: DiscoveredDerivation, drv_paths: set[str], parse: Parse) -> CheckedDerivation:
    """The derivation checked; whatever is wrong with it is said with its path. `drv_paths` are known to be
    in order, and grow."""
    _check_drv_paths([derivation.drv_path], drv_paths)
    try:
        return _checked(derivation, drv_paths, parse)
    except (Rejected, NixError) as error:
        raise Rejected(f"{derivation.drv_path}: {error}") from error


def _check_drv_paths(paths: Iterable[str], drv_paths: set[str]) -> None:
    for path in paths:
        if path not in drv_paths:
            drv_key(path)
            drv_paths.add(path)


def _checked(derivation: DiscoveredDerivation, drv_paths: set[str], parse: Parse) -> CheckedDerivation:
    _refuse(_fault_of_outputs(derivation))
    _refuse(_fault_of_facts(derivation))
    _check_drv_paths(derivation.dependencies, drv_paths)
    inputs = frozenset(derivation.dependencies)
    if derivation.drv_path in inputs:
        raise Rejected("it is among its own inputs")
    outputs = tuple((check_name(output.name), parse(output.path)) for output in derivation.outputs)
    if len({path for _, path in outputs}) < len(outputs):
        raise Rejected("two of its outputs have one path")
    return CheckedDerivation(derivation, inputs, outputs, tuple(map(parse, derivation.input_sources)))


def _refuse(fault: str | None) -> None:
    if fault:
        raise Rejected(fault)


def _check_entry(entry: EntryPoint, drv_paths: set[str]) -> None:
    fault = _fault_of_text(entry.attr)
    if fault is None and len(entry.attr.encode()) > MAX_ATTR:
        fault = f"is longer than {MAX_ATTR} bytes"
    if fault:
        raise Rejected(f"{excerpt(entry.drv_path)}: its attribute path {excerpt(entry.attr)} {fault}")
    try:
        _check_drv_paths([entry.drv_path], drv_paths)
    except Rejected as error:
        raise Rejected(f"attribute {excerpt(entry.attr)}: {error}") from error


# --- faults, as the end of a sentence -------------------------------------------------------------


def _fault_of_outputs(derivation: DiscoveredDerivation) -> str | None:
    if not derivation.outputs:
        return "a derivation without outputs can never be done"
    names: set[str] = set()
    for output in derivation.outputs:
        if output.name in names:
            return f"it has two outputs named {excerpt(output.name)}"
        names.add(output.name)
        if not output.path:
            return (
                f"the path of output {excerpt(output.name)} is not known before the build; "
                "floating content-addressed derivations are not supported"
            )
    return None


def _fault_of_facts(derivation: DiscoveredDerivation) -> str | None:
    words = [("system", derivation.architecture), ("package name", derivation.pname or "")]
    words += [("required feature", feature) for feature in derivation.required_features[:MAX_FEATURES]]
    for what, text in words:
        if len(text) > MAX_TEXT:
            return f"its {what} is longer than {MAX_TEXT} characters"
        if fault := _fault_of_text(text):
            return f"its {what} {fault}"
    if len(derivation.required_features) > MAX_FEATURES:
        return f"it requires more than {MAX_FEATURES} features"
    limits = (derivation.timeout_secs, derivation.max_silent_secs)
    if any(limit is not None and not 0 < limit <= MAX_SECONDS for limit in limits):
        return f"a limit in seconds is between 1 and {MAX_SECONDS}, or none"
    return None


def _fault_of_text(text: str) -> str | None:
    if "\0" in text:
        return "holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not Unicode text"
    return None
