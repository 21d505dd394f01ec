"""Import from derivation: a worker waits for builds in the middle of its evaluation. Layer: sessions.

The worker has published the derivations as entry points, so they are wanted and built like any other;
here somebody only watches for their end.
Source: seed "Jobs", Evaluate.
"""

from __future__ import annotations

from typing import Final

import attrs
import structlog
import trio

from gradient.graph.moves import Moves
from gradient.graph.pg_errors import DATABASE_ERRORS
from gradient.graph.pg_pool import Pool
from gradient.graph.worker_reads import import_states
from gradient.model import REQUEUEABLE, BuildStatus
from gradient.nix.store_path import InvalidStorePath, StorePath
from gradient.wire.messages import ImportRequest, ImportResult

# Seconds after which a wait looks again whatever was said: a database that was away announces nothing.
LOOK_AGAIN: Final = 60.0
# Derivations one request may name: an evaluation imports from a handful.
MAX_DERIVATIONS: Final = 1000
MAX_PATH: Final = 300  # characters of a path in an answer

log = structlog.get_logger()


def _failed(request: ImportRequest, drv_path: str, why: str) -> ImportResult:
    return ImportResult(request.job_id, request.request_id, drv_path[:MAX_PATH], why)


@attrs.define(eq=False)
class ImportWaits:
    """Everybody who waits for builds; fed with `moved` from the graph writer."""

    readers: Pool
    _moved: trio.Event = attrs.field(factory=trio.Event, init=False)

    def moved(self, moves: Moves) -> None:
        """Some build changed: let the waiting look again. Never blocks."""
        if moves.builds:
            self._moved.set()
            self._moved = trio.Event()

    async def wait(self, request: ImportRequest) -> ImportResult:
        """Wait until every derivation of the request is in the cache, or one cannot come any more."""
        if len(request.drv_paths) > MAX_DERIVATIONS:
            return _failed(request, request.drv_paths[0], f"at most {MAX_DERIVATIONS} derivations at once")
        for path in request.drv_paths:
            try:
                StorePath.parse(path)
            except InvalidStorePath as error:
                return _failed(request, path, str(error))
        while True:
            moved = self._moved
            try:
                answer = await self._look(request)
            except DATABASE_ERRORS as error:
                log.warning("import not looked at yet", error=str(error))
                answer = None
            if answer is not None:
                return answer
            with trio.move_on_after(LOOK_AGAIN):
                await moved.wait()

    async def _look(self, request: ImportRequest) -> ImportResult | None:
        async with self.readers.connection() as connection:
            states = await import_states(connection, request.drv_paths)
        unknown = set(request.drv_paths) - {state.drv_path for state in states}
        if unknown:
            return _failed(request, min(unknown), "it was never published")
        for state in states:
            status = BuildStatus(state.status)
            if status in REQUEUEABLE:
                return _failed(request, state.drv_path, status.label)
        if all(state.fetchable for state in states):
            return ImportResult(request.job_id, request.request_id)
        return None
