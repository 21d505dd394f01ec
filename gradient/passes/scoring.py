"""Which pending job a worker gets: pure rules over what was told about it. Layer: passes, no IO.

Rules never read a clock. Ties go to the job that has waited longer, then to the smaller id.
Source: the scheduler's score is a sum of rules; a job below 0 is not handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

import attrs

from gradient.graph.candidate_reads import BuildCandidate
from gradient.passes.candidates import JobCandidate
from gradient.wire.messages import CandidateScore

PRIORITIZED: Final = 5000.0
# A minute of waiting, up to an hour: no job is passed over for ever by warmer ones.
WAIT_PER_MINUTE: Final = 60.0
WAIT_MAX: Final = 4000.0
# One point for every MiB that would have to be fetched first, so that warm workers win.
MISSING_PER_MIB: Final = 1.0
MISSING_MAX: Final = 3000.0
BASE: Final = 4000.0


@attrs.frozen
class Scored:
    """A candidate with its total."""

    candidate: JobCandidate
    total: float


def score(candidate: JobCandidate, answer: CandidateScore | None, now: datetime) -> float:
    """The sum of the rules for one candidate on one worker, which answered `answer` to its offer."""
    waited = max((now - candidate.queued_at).total_seconds(), 0.0)
    total = BASE + min(WAIT_MAX, WAIT_PER_MINUTE * waited / 60)
    if candidate.prioritized:
        total += PRIORITIZED
    if answer is not None and not answer.outputs_present:
        total -= min(MISSING_MAX, MISSING_PER_MIB * answer.missing_nar_size / 2**20)
    return total


def rank(
    candidates: Iterable[JobCandidate], answers: Mapping[str, CandidateScore], now: datetime
) -> list[Scored]:
    """Candidates best first."""
    scored = [Scored(c, score(c, answers.get(c.job_id), now)) for c in candidates]
    return sorted(scored, key=lambda s: (-s.total, s.candidate.queued_at, _number(s.candidate)))


def _number(candidate: JobCandidate) -> int:
    return candidate.derivation if isinstance(candidate, BuildCandidate) else candidate.evaluation
