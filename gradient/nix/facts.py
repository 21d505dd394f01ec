"""What the scheduler needs to know of a derivation, read from its attributes. Layer: rank 0, pure.

Attributes are environment variables, or members of the JSON object in `__json` when the derivation
has structured attributes. Whoever wrote the flake chose them: a malformed value is as good as
none, and every text comes out as something that a database and a terminal can hold.

Source: NixOS/nix, src/libstore/derivation-options.cc (which attributes exist, and their types).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from gradient.model import DiscoveredDerivation, OutputPath
from gradient.nix.derivation import Derivation

STRUCTURED: Final = "__json"
# Nix asks this of a machine when a derivation's output paths are unknown before its build.
CA_FEATURE: Final = "ca-derivations"
# What a 32-bit column holds: 68 years. A longer limit is none.
MAX_SECONDS: Final = 2**31 - 1
# A derivation that asks for more is broken or hostile; no machine has so many.
MAX_FEATURES: Final = 64
MAX_TEXT: Final = 256  # characters of a feature or a package name


def discover(derivation: Derivation, drv_path: str) -> DiscoveredDerivation:
    """The record of `derivation` as an EvalResult batch carries it; never raises for odd attributes."""
    attributes = Attributes.of(derivation)
    return DiscoveredDerivation(
        drv_path=drv_path,
        outputs=tuple(OutputPath(output.name, output.path) for output in derivation.outputs),
        dependencies=tuple(derivation.input_drvs),
        input_sources=derivation.input_srcs,
        architecture=_text(derivation.system),
        required_features=_required_features(derivation, attributes),
        timeout_secs=attributes.seconds("timeout"),
        max_silent_secs=attributes.seconds("maxSilent"),
        prefer_local_build=attributes.boolean("preferLocalBuild", default=False),
        is_fixed_output=derivation.is_fixed_output,
        allow_substitutes=attributes.boolean("allowSubstitutes", default=True),
        pname=attributes.text("pname"),
    )


class Attributes:
    """Typed access to the attributes of one derivation, structured or not."""

    def __init__(self, values: Mapping[str, Any], *, structured: bool) -> None:
        self._values = values
        self._structured = structured

    @classmethod
    def of(cls, derivation: Derivation) -> Attributes:
        structured = _json_object(derivation.env.get(STRUCTURED))
        if structured is not None:
            return cls(structured, structured=True)
        return cls(derivation.env, structured=False)

    def boolean(self, name: str, *, default: bool) -> bool:
        """A JSON boolean, or a variable that is `1` when true."""
        value = self._values.get(name)
        if self._structured:
            return value if isinstance(value, bool) else default
        return default if value is None else value == "1"

    def strings(self, name: str) -> tuple[str, ...]:
        """A JSON list of strings, or a variable of words."""
        value = self._values.get(name)
        if isinstance(value, str):
            return tuple(value.split())
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()

    def seconds(self, name: str) -> int | None:
        """A positive whole number, also when it is written as text."""
        value = self._values.get(name)
        if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,10}\s*", value, re.ASCII):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            return None
        return value if 0 < value <= MAX_SECONDS else None

    def text(self, name: str) -> str | None:
        """A text that is not empty."""
        value = self._values.get(name)
        return _text(value) if isinstance(value, str) and value else None


def _required_features(derivation: Derivation, attributes: Attributes) -> tuple[str, ...]:
    features = {_text(feature) for feature in attributes.strings("requiredSystemFeatures")}
    if not derivation.has_known_outputs:
        features.add(CA_FEATURE)
    return tuple(sorted(features)[:MAX_FEATURES])


def _json_object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _text(value: str) -> str:
    """`value` without what PostgreSQL and UTF-8 refuse: NUL and lone surrogates become `?`."""
    return value[:MAX_TEXT].encode("utf-8", "replace").decode().replace("\0", "?")
