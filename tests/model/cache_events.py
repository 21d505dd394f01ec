"""NARs come and go, and upstream caches answer.

Sources: seeds "Jobs" (Failures, InputsUnavailable), "Queueing and Counters" (Callers of update_need).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from gradient.model import (
    BuildStatus,
)
from tests.model import rules
from tests.model.repair_events import RepairEvents
from tests.model.settling import RUNNING

S = BuildStatus


class CacheEvents(RepairEvents):
    """What happens to the cache."""

    def commit(self, nars: Mapping[str, tuple[str, ...]]) -> None:
        """NARs land. What is there already stays as it is."""
        for path, references in nars.items():
            self.facts.cached.setdefault(path, references)
            self.facts.cached_at.setdefault(path, self.now)
        self.adopt_references()
        self.settle()

    def retire(self, paths: Collection[str], *, distrusted: bool = False) -> set[str]:
        """Paths leave the cache, and who made them is to make them again. What somebody could not use is
        `distrusted`: no upstream is believed about it, and a maker that failed is tried again, unless its
        builder failed it. Answers the makers."""
        facts = self.facts
        gone = set(paths) & set(facts.cached)
        makers = {
            n for n, d in facts.derivations.items() if n in facts.builds and set(d.outputs.values()) & gone
        }
        for path in gone:
            del facts.cached[path], facts.cached_at[path]
        for name in makers:
            build = facts.builds[name]
            if distrusted and not rules.is_assigned(facts, name):
                build.cache_available = False
            again = build.status in {S.FAILED_PERMANENT, S.FAILED_TIMEOUT} and distrusted
            if build.status in rules.SUCCESS or (again and not rules.failed_by_its_builder(facts, name)):
                build.attempt, build.substituted = 0, False
                self.status(name, S.CREATED)
        self.settle()
        return makers

    def made(self, path: str) -> bool:
        """Some derivation makes the path."""
        return any(path in d.outputs.values() for d in self.facts.derivations.values())

    def demote_missing_nar(self, paths: Collection[str]) -> None:
        """Objects are gone. What nobody makes takes along the outputs that refer to it."""
        orphans = {path for path in paths if not self.made(path)}
        referring = {
            path
            for path, refs in self.facts.cached.items()
            if self.made(path) and orphans & set(refs) - {path}
        }
        self.retire({*paths, *referring}, distrusted=True)
        self._unwalk_unsourced(orphans)

    def demote_path(self, paths: Collection[str], seen_at: datetime) -> set[str]:
        """Somebody could not use these: those that are made are made again, unless they came since."""
        since = {path for path, at in self.facts.cached_at.items() if at > seen_at}
        return self.retire({path for path in paths if self.made(path)} - since, distrusted=True)

    def demote_cache_claim(self, names: Iterable[str]) -> None:
        """No upstream has them after all."""
        for name in names:
            if not rules.is_assigned(self.facts, name):
                self.facts.builds[name].cache_available = False
        self.settle()

    def heal_missing_inputs(self, name: str, paths: Collection[str], seen_at: datetime) -> None:
        """A build failed for want of these paths. Makers that no evaluation names are found by the next walk,
        which must not stop above them."""
        facts = self.facts
        makers = self.demote_path(paths, seen_at)
        if makers:
            for evaluation, named in list(facts.names):
                if named == name and rules.is_live(facts, evaluation):
                    self.adopt_pending_closure(evaluation)
            self.settle()
        unnamed = {maker for maker in makers if not rules.is_named(facts, maker)}
        self.unwalk({h for (h, low), kind in facts.edges.items() if low in unnamed and rules.is_build(kind)})
        self._unwalk_unsourced(paths)

    def _unwalk_unsourced(self, paths: Collection[str]) -> None:
        """The next walk brings these input sources, where they are lost; but what waits to be built fails for
        want of its own first, in words."""
        facts, lost = self.facts, set(paths) - set(self.facts.cached)
        waits = self._in(*rules.BUILDERS) & rules.wanted(facts)
        self.unwalk({n for n in facts.builds if facts.derivations[n].sources & lost} - waits)

    def collect_paths(self, paths: Collection[str]) -> None:
        """Those that no derivation makes, is or has as a source, and no other path refers to."""
        facts = self.facts
        known = {f"{name}.drv" for name in facts.derivations}
        known |= {path for derivation in facts.derivations.values() for path in derivation.sources}
        referred = {
            ref for path, refs in facts.cached.items() if path[-4:] != ".drv" for ref in refs if ref != path
        }
        self.retire({path for path in paths if path not in known | referred and not self.made(path)})

    def unwalk(self, names: Collection[str]) -> None:
        """Forget that they were walked; whoever is walking may have stopped there."""
        walked = {name for name in names if self.facts.derivations[name].walked}
        for name in walked:
            self.facts.derivations[name].walked = False
        for row in self.facts.evaluations.values():
            if walked and row.status in RUNNING:
                row.walk_lost = True
        self.settle()

    def answer_probe(self, names: Iterable[str], *, served: bool) -> None:
        """The upstream caches answered. What one serves is fetched instead of built, a failure too; a success
        is neither."""
        for name in names:
            build = self.facts.builds[name]
            build.probed = True
            if served and build.status not in rules.SUCCESS and not build.cache_available:
                build.cache_available = True
                if build.status in rules.FAILURE:
                    build.attempt = 0
                    self.status(name, S.CREATED)
        self.settle()
