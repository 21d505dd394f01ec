"""What the local store knows of paths a job works with. Layer: worker, IO."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gradient.model import FailureKind
from gradient.nix.daemon.path_info import PathInfo
from gradient.worker.errors import JobFault
from gradient.worker.machine import Machine


async def path_infos(machine: Machine, paths: Collection[str]) -> list[PathInfo]:
    """The path info of each. Raises JobFault (Transient) for one that is not valid any more."""
    if not paths:
        return []
    found = []
    async with machine.store.connection() as store:
        for path in paths:
            info = await store.query_path_info(path)
            if info is None:
                raise JobFault(FailureKind.TRANSIENT, f"{path} is not valid in the local store any more")
            found.append(info)
    return found


async def invalid(machine: Machine, paths: Iterable[str]) -> list[str]:
    """Those of `paths` that are not valid, in their order."""
    asked = list(paths)
    if not asked:
        return []
    async with machine.store.connection() as store:
        valid = await store.query_valid_paths(asked)
    return [path for path in asked if path not in valid]
