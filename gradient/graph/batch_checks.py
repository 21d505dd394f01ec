"""What a batch of walked derivations may say of itself. Layer: graph, pure.

Batches come from workers and are hostile. PostgreSQL refuses values it cannot hold by itself; here is
refused what it would hold and what would do harm later: texts too long for an index, derivations that can
never be done, limits that are none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gradient.graph.transaction import Rejected
from gradient.model import MAX_ATTR, DiscoveredDerivation, EntryPoint
from gradient.nix.store_path import check_name

# The worker cuts them to this; package name and system share an index row.
MAX_TEXT: Final = 256  # characters
# No machine has so many.
MAX_FEATURES: Final = 64


def check_batch(derivations: Iterable[DiscoveredDerivation], entry_points: Iterable[EntryPoint]) -> None:
    """Raise Rejected, or InvalidStorePath for an output's name, in words for the worker's log."""
    for derivation in derivations:
        fault = _fault(derivation)
        if fault:
            raise Rejected(f"{derivation.drv_path[:MAX_TEXT]}: {fault}")
        for output in derivation.outputs:
            check_name(output.name)
    for entry in entry_points:
        if len(entry.attr.encode()) > MAX_ATTR:
            raise Rejected(f"an attribute path is longer than {MAX_ATTR} bytes: {entry.attr[:MAX_TEXT]}...")


def _fault(derivation: DiscoveredDerivation) -> str | None:
    if not derivation.outputs:
        return "a derivation without outputs can never be done"
    for output in derivation.outputs:
        if not output.path:
            return (
                f"the path of output {output.name[:MAX_TEXT]} is not known before the build; "
                "floating content-addressed derivations are not supported"
            )
    texts = (derivation.architecture, derivation.pname or "", *derivation.required_features)
    if any(len(text) > MAX_TEXT for text in texts):
        return f"its system, package name or a feature is longer than {MAX_TEXT} characters"
    if len(derivation.required_features) > MAX_FEATURES:
        return f"it requires more than {MAX_FEATURES} features"
    limits = (derivation.timeout_secs, derivation.max_silent_secs)
    if any(limit is not None and limit <= 0 for limit in limits):
        return "a limit in seconds is above 0, or none"
    return None
