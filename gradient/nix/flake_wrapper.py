"""A flake around a flake, for a `flake.nix` in a folder of its source. Layer: rank 0, pure.

Nix 2.8 refuses `dir` in a `path:` URL, but takes it as an attribute of a flake input. So a source in the
store whose flake is not at its top is evaluated as the one input of a small flake, whose lock file is
the flake's own, moved one level down. Every Nix reads that, and the `.drv` paths are the same.
"""

from __future__ import annotations

import json
from typing import Any, Final

import attrs

from gradient.model import CachedSource
from gradient.nix.attr_path import nix_string
from gradient.nix.flake_lock import VERSIONS, parse_flake_lock

# The wrapped flake is this input: `(builtins.getFlake "path:WRAPPER").inputs.source`.
INPUT_NAME: Final = "source"


@attrs.frozen
class FlakeWrapper:
    """The two files of the wrapping flake."""

    flake_nix: str
    flake_lock: str


def wrap_flake(source: CachedSource, lock: bytes | None) -> FlakeWrapper:
    """Wrap the flake in `source.dir`; `lock` is its own `flake.lock`, None when it has none.

    Raises BadFlakeLock for a lock file that we do not read.
    """
    attributes = _attributes(source)
    assignments = " ".join(f"{name} = {_nix(value)};" for name, value in attributes.items())
    return FlakeWrapper(
        flake_nix=f"{{ inputs.{INPUT_NAME} = {{ {assignments} }}; outputs = _: {{ }}; }}\n",
        flake_lock=json.dumps(_move_down(_read(lock), attributes), indent=2) + "\n",
    )


def _attributes(source: CachedSource) -> dict[str, str | int]:
    values = {
        "type": "path",
        "path": source.store_path,
        "narHash": source.nar_hash,
        "dir": source.dir or None,
        "rev": source.rev,
        "lastModified": source.last_modified,
        "revCount": source.rev_count,
    }
    return {name: value for name, value in values.items() if value is not None}


def _read(lock: bytes | None) -> dict[str, Any]:
    if lock is None:
        return {"nodes": {"root": {}}, "root": "root", "version": VERSIONS[-1]}
    parse_flake_lock(lock)
    found: dict[str, Any] = json.loads(lock)
    return found


def _move_down(lock: dict[str, Any], attributes: dict[str, str | int]) -> dict[str, Any]:
    """`lock` with a new root above the old one: paths from the root get one name longer."""
    nodes = {key: _prefixed(node) for key, node in lock["nodes"].items()}
    nodes[lock["root"]] |= {"locked": attributes, "original": attributes}
    top = INPUT_NAME
    while top in nodes:
        top += "_"
    nodes[top] = {"inputs": {INPUT_NAME: lock["root"]}}
    return {"nodes": nodes, "root": top, "version": lock["version"]}


def _prefixed(node: dict[str, Any]) -> dict[str, Any]:
    moved = dict(node)
    if "inputs" in node:
        moved["inputs"] = {name: _prefixed_path(target) for name, target in node["inputs"].items()}
    if "parent" in node:  # of an input that is a folder of another
        moved["parent"] = _prefixed_path(node["parent"])
    return moved


def _prefixed_path(target: Any) -> Any:
    return [INPUT_NAME, *target] if isinstance(target, list) else target


def _nix(value: str | int) -> str:
    return nix_string(value) if isinstance(value, str) else str(value)
