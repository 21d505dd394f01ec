"""Offers: candidates as a worker sees them. Pure. Source: seed "Waiting and Recovery", Re-Offering."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gradient.graph.candidate_reads import BuildCandidate
from gradient.passes.candidates import JobCandidate
from gradient.wire.messages import Candidate, RequiredPath

# Candidates in one message.
PAGE: Final = 1000
# Candidates a worker has answered and that still wait: enough to choose from, few enough to keep for
# two hundred workers.
OFFER_WINDOW: Final = 2000


def pages(offer: Sequence[JobCandidate]) -> Iterator[Sequence[JobCandidate]]:
    """Cut an offer into messages."""
    for start in range(0, len(offer), PAGE):
        yield offer[start : start + PAGE]


def as_offer(candidate: JobCandidate) -> Candidate:
    """The candidate with what a worker needs to score it."""
    if isinstance(candidate, BuildCandidate):
        return Candidate(
            candidate.job_id,
            tuple(RequiredPath(path) for path in candidate.required_paths),
            tuple(output.path for output in candidate.outputs),
            candidate.architecture,
            candidate.required_features,
        )
    source = candidate.cached.store_path if candidate.cached else None
    return Candidate(candidate.job_id, (RequiredPath(source),) if source else ())
