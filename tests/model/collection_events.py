"""What is old is deleted.

Source: seed "Queueing and Counters" (Naming and Adoption, Walk Completeness).
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.model import rules
from tests.model.cache_events import CacheEvents


class CollectionEvents(CacheEvents):
    """Evaluations and derivations go."""

    def collect_evaluations(self, evaluations: Iterable[int]) -> set[int]:
        """Ended ones go with what they named. Who still waits for any of that names it, where it is wanted.
        Answers which went."""
        facts = self.facts
        gone = {v for v in evaluations if not rules.is_live(facts, v)}
        opened = rules.wanted(facts) & {name for v, name in facts.names if v in gone}
        facts.evaluations = {v: row for v, row in facts.evaluations.items() if v not in gone}
        facts.names = {key: mark for key, mark in facts.names.items() if key[0] not in gone}
        facts.entry_points = {key: name for key, name in facts.entry_points.items() if key[0] not in gone}
        for row in facts.evaluations.values():
            row.recovers = None if row.recovers in gone else row.recovers
        for assignment in facts.assignments.values():
            assignment.evaluation = None if assignment.evaluation in gone else assignment.evaluation
        for attempt in facts.attempts:
            attempt.evaluation = None if attempt.evaluation in gone else attempt.evaluation
        self.settle()
        if opened:
            for evaluation in facts.evaluations:
                if rules.is_live(facts, evaluation):
                    self.adopt_pending_closure(evaluation)
            self.settle()
        return gone

    def collect_derivations(self, candidates: Iterable[str]) -> int:
        """Those that nothing reaches from a name, an entry point or a job on a worker. What needs one of them
        and stays is to be walked again. Answers how many went."""
        facts = self.facts
        kept = {name for _, name in facts.names} | set(facts.entry_points.values())
        kept |= {name for name in facts.builds if rules.is_assigned(facts, name)}
        due = set(kept)
        while due:
            lows = {low for low, _ in rules.below(facts, due.pop())}
            due |= lows - kept
            kept |= lows
        gone = set(candidates) - kept
        stay = {
            high for (high, low), kind in facts.edges.items() if low in gone and rules.is_build(kind)
        } - gone
        self.unwalk(stay)
        facts.derivations = {name: d for name, d in facts.derivations.items() if name not in gone}
        facts.builds = {name: build for name, build in facts.builds.items() if name not in gone}
        facts.edges = {pair: kind for pair, kind in facts.edges.items() if not gone & set(pair)}
        facts.assignments = {i: a for i, a in facts.assignments.items() if a.derivation not in gone}
        facts.attempts = [attempt for attempt in facts.attempts if attempt.derivation not in gone]
        self.settle()
        return len(gone)
