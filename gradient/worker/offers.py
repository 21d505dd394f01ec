"""Offers of the server, answered with what each candidate would cost here. Layer: worker.

The reader only puts candidates down; scoring asks the store once for all that have piled up. The server
hands out nothing that was not scored, so every candidate is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Final

import structlog

from gradient.nix.daemon.errors import DaemonFailure
from gradient.nix.daemon.pool import DaemonPool
from gradient.nursery.kick import Kick
from gradient.wire.messages import Candidate, CandidateScore, RequestJobChunk
from gradient.worker.queries import Send

# Candidates of one answer, as many as the server offers in one message.
PAGE: Final = 1000

log = structlog.get_logger(__name__)


class Offers:
    """The offers of one session. `scored` is called after each answer: jobs may be asked for now."""

    def __init__(self, store: DaemonPool, send: Send, scored: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._send = send
        self._scored = scored
        # In the order of their coming; the server offers each once, so its own list bounds this one.
        self._pending: dict[str, Candidate] = {}
        self._offered = Kick()

    def offered(self, candidates: Iterable[Candidate]) -> None:
        """Take an offer from the reader, an empty one included: it wants an answer, too."""
        self._pending.update((candidate.job_id, candidate) for candidate in candidates)
        self._offered.set()

    async def run(self) -> None:
        """Answer until cancelled. Raises LinkClosed."""
        while True:
            await self._offered.wait()
            await self._answer()
            await self._scored()

    async def _answer(self) -> None:
        is_final = False
        while not is_final:
            page = [self._pending.pop(job_id) for job_id in tuple(islice(self._pending, PAGE))]
            scores = await self._score(page)
            is_final = not self._pending
            await self._send(RequestJobChunk(scores, is_final))

    async def _score(self, page: Sequence[Candidate]) -> tuple[CandidateScore, ...]:
        paths = paths_of(page)
        valid: frozenset[str] = frozenset()
        if paths:
            try:
                async with self._store.connection() as store:
                    valid = await store.query_valid_paths(paths)
            except DaemonFailure as error:
                # Scored as if nothing were here: the job that comes finds out what is wrong.
                log.warning("the store does not tell what is valid", error=str(error))
        return tuple(score(candidate, valid) for candidate in page)


def paths_of(candidates: Iterable[Candidate]) -> list[str]:
    """Every path whose validity decides a score, once."""
    found: dict[str, None] = {}
    for candidate in candidates:
        found.update((required.path, None) for required in candidate.required_paths)
        found.update((path, None) for path in candidate.output_paths if path)
    return list(found)


def score(candidate: Candidate, valid: frozenset[str]) -> CandidateScore:
    """What the candidate lacks in a store where `valid` is valid. Unknown sizes count nothing."""
    missing = [required for required in candidate.required_paths if required.path not in valid]
    outputs = candidate.output_paths
    return CandidateScore(
        candidate.job_id,
        missing_count=len(missing),
        missing_nar_size=sum(required.nar_size or 0 for required in missing),
        outputs_present=bool(outputs) and all(path in valid for path in outputs),
    )
