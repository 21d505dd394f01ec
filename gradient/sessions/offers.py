"""Offers: candidates as a worker sees them. Pure. Source: seed "Waiting and Recovery", Re-Offering."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gradient.graph.candidate_reads import BuildCandidate
from gradient.passes.candidates import JobCandidate
from gradient.wire.messages import Candidate, RequiredPath

# Candidates in one message, and required paths of all of them together: a store path has at most 255
# bytes, so a full page is well below the limit of a frame.
PAGE: Final = 1000
PAGE_PATHS: Final = 20_000
# Required paths of one candidate. They only tell how warm a worker is, and a derivation with more direct
# inputs is rare: the rest is left out.
MAX_REQUIRED: Final = 10_000
# Candidates a worker has answered and that still wait: enough to choose from, few enough to keep for
# two hundred workers.
OFFER_WINDOW: Final = 2000


def pages(offer: Sequence[JobCandidate]) -> Iterator[Sequence[JobCandidate]]:
    """Cut an offer into messages."""
    page: list[JobCandidate] = []
    room = PAGE_PATHS
    for candidate in offer:
        paths = _paths(candidate)
        if page and (len(page) == PAGE or paths > room):
            yield page
            page, room = [], PAGE_PATHS
        page.append(candidate)
        room -= paths
    if page:
        yield page


def _paths(candidate: JobCandidate) -> int:
    if isinstance(candidate, BuildCandidate):
        return min(len(candidate.required_paths), MAX_REQUIRED) + len(candidate.outputs)
    return 1


def as_offer(candidate: JobCandidate) -> Candidate:
    """The candidate with what a worker needs to score it."""
    if isinstance(candidate, BuildCandidate):
        return Candidate(
            candidate.job_id,
            tuple(RequiredPath(path) for path in candidate.required_paths[:MAX_REQUIRED]),
            tuple(output.path for output in candidate.outputs),
            candidate.architecture,
            candidate.required_features,
        )
    source = candidate.cached.store_path if candidate.cached else None
    return Candidate(candidate.job_id, (RequiredPath(source),) if source else ())
