"""The locked inputs of a flake into the local store, before its evaluation needs them. Layer: worker.

What the store has is left alone, what the cache has comes from there, and the rest is fetched by Nix:
one input at a time from each second-level domain, different domains side by side. An input that cannot
be had is no error here: perhaps no attribute needs it, and if one does, its evaluation says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
import trio

from gradient.model import CachedSource, MessageLevel
from gradient.nix.evaluator.errors import EvaluatorError
from gradient.nix.evaluator.flake import fetch_tree
from gradient.nix.evaluator.messages import headline
from gradient.nix.evaluator.settings import Role
from gradient.nix.flake_lock import MAX_SIZE, LockedInput, parse_flake_lock
from gradient.wire.messages import EvalMessage
from gradient.worker.downloads import Downloader
from gradient.worker.job import Job
from gradient.worker.machine import Machine
from gradient.worker.store_info import invalid


@attrs.frozen
class Inputs:
    """The locked inputs of one flake. `lock` is the lock file as it is, None without one."""

    lock: bytes | None
    locked: Mapping[str, LockedInput]


async def read_inputs(source: CachedSource) -> Inputs:
    """Read the lock file beside the source's `flake.nix`. Raises BadFlakeLock."""
    file = Path(source.store_path, source.dir, "flake.lock")
    lock = await trio.to_thread.run_sync(_read, file)
    return Inputs(lock, {} if lock is None else parse_flake_lock(lock).locked_inputs)


async def fetch_inputs(inputs: Inputs, job: Job, machine: Machine, downloader: Downloader) -> list[str]:
    """Get what is missing; the store paths of the inputs that are valid now, to be uploaded."""
    by_path = {str(locked.store_path): locked for locked in inputs.locked.values() if locked.store_path}
    if not by_path:
        return []
    missing = await invalid(machine, by_path)
    if missing:
        left = await downloader.pull(missing)
        await _fetch_by_domain([by_path[path] for path in missing if path in left], job, machine)
        missing = await invalid(machine, missing)
    return [path for path in by_path if path not in missing]


async def _fetch_by_domain(inputs: Iterable[LockedInput], job: Job, machine: Machine) -> None:
    domains: defaultdict[str, list[LockedInput]] = defaultdict(list)
    for locked in inputs:
        domains[locked.domain].append(locked)
    async with trio.open_nursery() as nursery:
        for queue in domains.values():
            nursery.start_soon(_fetch_each, queue, job, machine)


async def _fetch_each(queue: Iterable[LockedInput], job: Job, machine: Machine) -> None:
    for locked in queue:
        try:
            async with machine.evaluators.lend(None, Role.FETCH) as child:
                await fetch_tree(child, locked.attributes)
        except EvaluatorError as error:
            text = f"the input {locked.url or locked.problem} was not fetched: {headline(str(error))}"
            await job.send(EvalMessage(*job.key, MessageLevel.WARNING, "fetch", text))


def _read(file: Path) -> bytes | None:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_SIZE + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
