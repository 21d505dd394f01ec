"""Store paths as the cache spells them (base names) and as the daemon does (full). Layer: worker, pure."""

from __future__ import annotations

from collections.abc import Iterable

from gradient.nix.store_path import STORE_DIR, StorePath


def base_name(path: str) -> str:
    """`<hash>-<name>` of a full store path."""
    return path.rpartition("/")[2]


def base_names(paths: Iterable[str]) -> tuple[str, ...]:
    """The base names of full store paths, sorted."""
    return tuple(sorted(map(base_name, paths)))


def full_path(name: str) -> str:
    """The full path of a base name. Raises InvalidStorePath: it came from a peer."""
    return StorePath.from_base(name.removeprefix(f"{STORE_DIR}/")).path()
