"""`flake.lock`: the locked inputs of a flake, where each comes from and which store path it gives.

Layer: rank 0, pure. The file is whoever's repository it is: its size is bounded, its shape checked, and
references between its nodes are followed without recursion.

Source: NixOS/nix, src/nix/flake.md, "Lock files".
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import attrs

from gradient.nix.errors import NixError, excerpt
from gradient.nix.flake_ref import (
    FORGE_HOSTS,
    BadFlakeRef,
    FlakeKind,
    FlakeRef,
    make_flake_ref,
    parse_query,
    render_flake_ref,
)
from gradient.nix.hashes import Hash, InvalidHash
from gradient.nix.store_path import StorePath, make_source_path

# The largest lock files of real flakes have some hundred KiB.
MAX_SIZE: Final = 8 * 2**20  # bytes
VERSIONS: Final = (5, 6, 7)
# `follows` may point to an input that follows another; longer chains are cycles.
MAX_FOLLOWS: Final = 64

_KINDS: Final = {kind.value: kind for kind in FlakeKind if kind is not FlakeKind.FOLDER}
# The attributes that make up the location.
_LOCATION: Final = {
    FlakeKind.PATH: ("path",),
    FlakeKind.GIT: ("url",),
    FlakeKind.TARBALL: ("url",),
    FlakeKind.FILE: ("url",),
    **dict.fromkeys(FORGE_HOSTS, ("owner", "repo")),
}


class BadFlakeLock(NixError):
    """The bytes are no lock file that we read."""


@attrs.frozen
class LockedInput:
    """What one node is locked to.

    `attributes` are those of the lock file, as `builtins.fetchTree` takes them. `reference` is None for a
    source that only Nix may know how to fetch, and `problem` then says why. `store_path` is what `nar_hash`
    predicts; both are None without a `narHash`.
    """

    attributes: Mapping[str, str | int | bool]
    reference: FlakeRef | None
    problem: str | None
    nar_hash: Hash | None
    store_path: StorePath | None

    @property
    def url(self) -> str | None:
        """The locked flake URL, `narHash` included."""
        return None if self.reference is None else render_flake_ref(self.reference)

    @property
    def asked_urls(self) -> tuple[str, ...]:
        """What a restricted Nix looks for in its `allowed-uris`: the `url` attribute as it stands in the lock
        file, newer ones the whole locked URL."""
        plain = self.attributes.get("url")
        return tuple(url for url in (plain, self.url) if isinstance(url, str))

    @property
    def is_relative(self) -> bool:
        """Whether it is a folder of the flake that names it: part of that source, never fetched."""
        reference = self.reference
        return (
            reference is not None
            and reference.kind is FlakeKind.PATH
            and not reference.location.startswith("/")
        )

    @property
    def domain(self) -> str:
        """The second-level domain it downloads from (`github.com`), "" for a local one."""
        return "" if self.reference is None else download_domain(self.reference)


@attrs.frozen
class LockNode:
    """One node. An input is the key of another node, or a path of input names from the root (`follows`)."""

    inputs: Mapping[str, str | tuple[str, ...]]
    locked: LockedInput | None
    is_flake: bool


@attrs.frozen
class FlakeLock:
    """A whole lock file. `nodes` has every key that `root` and the nodes' inputs name."""

    version: int
    root: str
    nodes: Mapping[str, LockNode]

    @property
    def root_inputs(self) -> tuple[str, ...]:
        """The names of the flake's own inputs, sorted."""
        return tuple(sorted(self.nodes[self.root].inputs))

    @property
    def locked_inputs(self) -> dict[str, LockedInput]:
        """Node key -> what it is locked to, of every node that has a source of its own to fetch."""
        found = {key: node.locked for key, node in self.nodes.items() if node.locked is not None}
        return {key: locked for key, locked in found.items() if not locked.is_relative}

    def resolve(self, *path: str) -> str:
        """The key of the node that the input names `path` lead to from the root, `follows` followed.

        Raises BadFlakeLock when there is none, or when `follows` go round in a circle.
        """
        follows = 0
        node, remaining = self.root, list(path)
        while remaining:
            name = remaining.pop(0)
            target = self.nodes[node].inputs.get(name)
            if target is None:
                raise BadFlakeLock(f"flake.lock has no input {'/'.join(path)}: {excerpt(name)} is missing")
            if isinstance(target, str):
                node = target
                continue
            follows += 1
            if follows > MAX_FOLLOWS:
                raise BadFlakeLock(f"flake.lock follows {'/'.join(path)} in a circle")
            node, remaining = self.root, [*target, *remaining]
        return node


# --- reading --------------------------------------------------------------------------------------


def parse_flake_lock(data: bytes) -> FlakeLock:
    """Read the bytes of a `flake.lock`; raises BadFlakeLock with the node at fault."""
    top = _top(data)
    version = top.get("version")
    if version not in VERSIONS or isinstance(version, bool):
        known = f"{VERSIONS[0]} to {VERSIONS[-1]}"
        raise BadFlakeLock(f"flake.lock has version {excerpt(str(version))}, and only {known} are read")
    found = _object(top.get("nodes"), "its nodes")
    root = top.get("root")
    if not isinstance(root, str) or root not in found:
        raise BadFlakeLock("flake.lock has no root node")
    nodes = {key: _node(_object(value, f"node {excerpt(key)}"), key) for key, value in found.items()}
    _check_inputs(nodes)
    return FlakeLock(version, root, nodes)


def _top(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_SIZE:
        raise BadFlakeLock(f"flake.lock has {len(data)} bytes, more than the {MAX_SIZE} that are read")
    try:
        return _object(json.loads(data), "the file")
    except (ValueError, RecursionError) as error:
        raise BadFlakeLock(f"flake.lock is not JSON: {error}") from error


def _node(value: dict[str, Any], key: str) -> LockNode:
    inputs = _object(value.get("inputs", {}), f"the inputs of {excerpt(key)}")
    locked = value.get("locked")
    return LockNode(
        inputs={name: _target(target, f"{key}/{name}") for name, target in inputs.items()},
        locked=None if locked is None else _locked(_object(locked, f"the source of {excerpt(key)}"), key),
        is_flake=value.get("flake", True) is not False,
    )


def _target(value: object, where: str) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise BadFlakeLock(f"flake.lock: the input {excerpt(where)} is neither a node nor a list of inputs")


def _check_inputs(nodes: Mapping[str, LockNode]) -> None:
    for key, node in nodes.items():
        for name, target in node.inputs.items():
            if isinstance(target, str) and target not in nodes:
                raise BadFlakeLock(f"flake.lock: the input {excerpt(f'{key}/{name}')} names a missing node")


def _locked(value: dict[str, Any], key: str) -> LockedInput:
    attributes = {name: item for name, item in value.items() if isinstance(item, str | int)}
    if len(attributes) != len(value):
        raise BadFlakeLock(f"flake.lock: the source of {excerpt(key)} has values that are not plain")
    reference, problem = None, None
    try:
        reference = reference_of(attributes)
    except BadFlakeRef as error:
        problem = str(error)
    nar_hash = _nar_hash(attributes, key)
    store_path = None if nar_hash is None else make_source_path(nar_hash)
    return LockedInput(attributes, reference, problem, nar_hash, store_path)


def _nar_hash(attributes: Mapping[str, str | int | bool], key: str) -> Hash | None:
    value = attributes.get("narHash")
    try:
        return None if value is None else Hash.parse(str(value), "sha256")
    except InvalidHash as error:
        raise BadFlakeLock(f"flake.lock: the narHash of {excerpt(key)} is malformed: {error}") from error


def reference_of(attributes: Mapping[str, str | int | bool]) -> FlakeRef:
    """The reference that an attribute set describes; raises BadFlakeRef for a type that has no reference
    here, for a missing location, and for values that no such reference has."""
    rest = {name: _as_text(value) for name, value in attributes.items()}
    name = rest.pop("type", "")
    if name not in _KINDS:
        raise BadFlakeRef(f"sources of the type {excerpt(name)} are not supported")
    kind = _KINDS[name]
    parts = [rest.pop(part, "") for part in _LOCATION[kind]]
    if not all(parts):
        raise BadFlakeRef(f"a {kind.value} source without {' and '.join(_LOCATION[kind])}")
    location = "/".join(parts)
    if kind in (FlakeKind.GIT, FlakeKind.TARBALL, FlakeKind.FILE):
        location, _, query = location.partition("?")
        rest = {**parse_query(query), **rest}
    return make_flake_ref(kind, location, rest)


def _as_text(value: str | int | bool) -> str:
    return value if isinstance(value, str) else str(int(value))


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadFlakeLock(f"flake.lock: {what} is not an object")
    return value


def download_domain(reference: FlakeRef) -> str:
    """The second-level domain that a reference downloads from, "" when it needs no network.

    Downloads from one domain go one after the other, so a domain too wide only costs time.
    """
    if reference.kind in (FlakeKind.FOLDER, FlakeKind.PATH):
        return ""
    is_forge = reference.kind in FORGE_HOSTS
    url = f"//{reference.host or FORGE_HOSTS[reference.kind]}" if is_forge else reference.location
    return _second_level(urlsplit(url).hostname or "")


def _second_level(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ".".join(host.lower().rsplit(".", 2)[-2:])
