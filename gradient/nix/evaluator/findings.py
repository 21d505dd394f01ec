"""What discovery is given, asks, hears and reports. Layer: rank 1, values only."""

from __future__ import annotations

from typing import Final

import attrs

from gradient.nix.attr_path import AttrPath, render_attr_path
from gradient.nix.wildcard_match import Cursor


@attrs.frozen
class FlakeAddress:
    """Where a flake is: a locked flake URL, or an input of the flake at that URL, as
    `gradient.nix.flake_wrapper` makes them for a flake in a folder of its source.

    `input_urls` are the URLs of its locked inputs, as Nix asks for them: a Nix that cannot evaluate purely
    lets the flake fetch these and no others.
    """

    url: str
    input: str | None = None
    input_urls: tuple[str, ...] = ()


@attrs.frozen
class Question:
    """What stands at the cursor's attribute? `instantiate`: of a derivation, write the `.drv` and answer its
    path; `inside`: answer its attribute names too, as of any other set."""

    cursor: Cursor
    instantiate: bool
    inside: bool

    @property
    def path(self) -> AttrPath:
        """The attribute path below the flake's outputs."""
        return self.cursor.path

    @property
    def attr(self) -> str:
        """The path as people write it."""
        return render_attr_path(self.path)


@attrs.frozen
class Plain:
    """A value that is no set. `type` is Nix's name of it (`lambda`, `string`)."""

    type: str


@attrs.frozen
class Derivation:
    """A derivation; None and () for what the question did not ask."""

    drv_path: str | None = None
    names: tuple[str, ...] = ()


@attrs.frozen
class AttrSet:
    """A set with these attribute names, sorted. `typed`: it has a `_type`, as a NixOS configuration does."""

    names: tuple[str, ...]
    typed: bool = False


Standing = Plain | Derivation | AttrSet


@attrs.frozen
class Evaluated:
    """An attribute that is a derivation; its `.drv` is in the store. `remarks` are Nix's warnings and
    traces while it was evaluated, "" mostly."""

    attr: str
    drv_path: str
    remarks: str = ""


@attrs.frozen
class AttributeFailed:
    """An attribute that did not evaluate, and why. The others go on."""

    attr: str
    message: str


@attrs.frozen
class TargetUnmatched:
    """A target of the request, as written, that led to no derivation at all, and where it ended."""

    target: str
    why: str = ""

    @property
    def message(self) -> str:
        """What people read."""
        return f"{self.target}: {UNMATCHED}{self.why and ': '}{self.why}"


UNMATCHED: Final = "target matched no derivations"

Finding = Evaluated | AttributeFailed | TargetUnmatched


@attrs.define
class Progress:
    """Counts of a running discovery, for whoever watches it. `attributes_total` grows while sets are
    listed; it is None before the first attribute is known. `at` are the attributes that are being evaluated,
    also those that it was at when it was cancelled."""

    attributes_done: int = 0
    attributes_total: int | None = None
    derivations: int = 0
    failed: int = 0
    at: set[str] = attrs.field(factory=set)
