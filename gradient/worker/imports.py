"""Import from derivation: what an evaluation wants built is built by the scheduler. Layer: worker.

The evaluator's own store connection asks for a build and waits; `DaemonProxy` turns that into a call
of `Imports.build`. The derivation is published like any other, the server is asked to have it built,
and its outputs are fetched into the local store. Then the evaluator finds them valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from gradient.nix.daemon.proxy import ImportFailed
from gradient.nix.derivation import EXTENSION
from gradient.worker.closure_walk import Found, ImportWanted
from gradient.worker.downloads import Downloader
from gradient.worker.drv_files import output_paths
from gradient.worker.job import Job
from gradient.worker.machine import Machine
from gradient.worker.store_info import invalid


class Imports:
    """The imports of one evaluation."""

    def __init__(
        self, job: Job, machine: Machine, downloader: Downloader, found: trio.MemorySendChannel[Found]
    ) -> None:
        self._job = job
        self._machine = machine
        self._downloader = downloader
        self._found = found

    async def build(self, paths: tuple[str, ...]) -> None:
        """Return when the outputs of these derivations, and plain paths among them, are valid.

        Raises ImportFailed when one cannot be built, JobFault when the server or its cache fail."""
        drv_paths = [path for path in paths if path.endswith(EXTENSION)]
        outputs = await trio.to_thread.run_sync(_outputs, drv_paths)
        if await invalid(self._machine, outputs):
            await self._have_built(drv_paths)
        plain = [path for path in paths if not path.endswith(EXTENSION)]
        await self._downloader.make_valid([*outputs, *plain])

    async def _have_built(self, drv_paths: Sequence[str]) -> None:
        wanted = ImportWanted(tuple(drv_paths))
        await self._found.send(wanted)
        await wanted.published.wait()
        result = await self._job.queries.import_built(*self._job.key, drv_paths)
        if result.failed_drv is not None:
            raise ImportFailed(result.failed_drv, result.reason or "its build failed")


def _outputs(drv_paths: Sequence[str]) -> list[str]:
    found: list[str] = []
    for drv_path in drv_paths:
        outputs = output_paths(drv_path)
        if not all(outputs.values()):
            raise ImportFailed(drv_path, "its output paths are only known after its build")
        found += outputs.values()
    return found
