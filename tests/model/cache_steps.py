"""Steps of the cache: NARs come, are lost, found bad, and collected."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from gradient.graph.demote import DemoteCacheClaim, DemoteMissingNar, DemotePath
from gradient.graph.nar import CommitNars
from gradient.graph.path_gc import Ages, CollectPaths
from gradient.graph.upstream import AnswerProbe
from tests.graph.world import hash_part
from tests.model.pair import PICK, SELDOM, Pair
from tests.model.script import step
from tests.model.universe import signed

# Later than anything happens: nothing is too new to be collected.
AGE: Final = timedelta(days=1)
PICKS: Final = st.lists(PICK, min_size=1, max_size=3)


class CacheSteps(Pair):
    """What happens to the cache."""

    def _commit(self, nars: dict[str, tuple[str, ...]]) -> None:
        self._say(f"commit {', '.join(nars) or 'nothing'}")
        self._apply(CommitNars(1, tuple(signed(path, refs) for path, refs in nars.items())))
        self.model.commit(nars)
        self._check()

    @SELDOM
    @step(pick=PICK)
    def commit_drv(self, pick: int) -> None:
        self._commit({f"{self._choose(self.letters, pick)}.drv": ()})

    @step(picks=PICKS)
    def commit_output(self, picks: list[int]) -> None:
        """NARs that no build of ours made: an upload, or an evaluation's input."""
        chosen = self._some(list(self.universe.references), picks)
        self._commit({path: self.universe.references[path] for path in chosen})

    def _some(self, options: Sequence[str], picks: Sequence[int]) -> list[str]:
        return sorted({self._choose(options, pick) for pick in picks})

    @precondition(lambda self: self.model.facts.cached)
    @SELDOM
    @step(pick=PICK)
    def commit_again(self, pick: int) -> None:
        """Invariant 21: committing a backed NAR again changes no counter."""
        path = self._choose(sorted(self.model.facts.cached), pick)
        before = self.last
        self._commit({path: self.model.facts.cached[path]})
        self._unchanged("21 a NAR again", before)

    @precondition(lambda self: self.model.facts.cached)
    @step(picks=PICKS)
    def lose_nars(self, picks: list[int]) -> None:
        """Their objects are not in the store."""
        self._lose(self._some(sorted(self.model.facts.cached), picks))

    def _lose(self, paths: Sequence[str]) -> None:
        self._say(f"lose_nars {', '.join(paths)}")
        self._apply(DemoteMissingNar(tuple(map(hash_part, paths))))
        self.model.demote_missing_nar(paths)
        self._check()

    @precondition(lambda self: self._made())
    @step(pick=PICK)
    def retire_and_commit_again(self, pick: int) -> None:
        """Invariant 24: that restores all counters. What had been aborted may have been asked for meanwhile,
        and then blocks nobody any more."""
        path = self._choose(self._made(), pick)
        before, references = self.last, self.model.facts.cached[path]
        self._lose([path])
        self._commit({path: references})
        after = self.last
        self._same("24 counters", after.missing_runtime_deps, before.missing_runtime_deps)
        self._same("24 fetchable", after.fetchable & before.fetchable, before.fetchable)
        blocked = {name for name, n in after.blocking_deps.items() if n > before.blocking_deps[name]}
        self._same("24 blocking_deps", blocked, set())

    def _made(self) -> list[str]:
        """Paths in the cache whose makers have all succeeded."""
        return [
            path
            for path in sorted(self.model.facts.cached)
            if self.model.made(path) and self.last.fetchable >= set(self._makers(path))
        ]

    def _makers(self, path: str) -> list[str]:
        return [n for n, d in self.model.facts.derivations.items() if path in d.outputs.values()]

    @precondition(lambda self: self.model.facts.cached)
    @step(picks=PICKS, ago=st.integers(0, 20))
    def demote_path(self, picks: list[int], ago: int) -> None:
        """Somebody could not use them, some messages ago."""
        cached = sorted(self.model.facts.cached)
        paths = self._some([path for path in cached if self.model.made(path)] or cached, picks)
        seen_at = self.graph.now - timedelta(seconds=ago)
        self._say(f"demote_path {', '.join(paths)} as of {ago} s ago")
        makers = self._apply(DemotePath(tuple(map(hash_part, paths)), seen_at))
        letters = {self.last.derivation_ids[maker] for maker in makers}
        self._same("DemotePath", letters, self.model.demote_path(paths, seen_at))
        self._check()

    @precondition(lambda self: self.model.facts.builds)
    @step(picks=PICKS)
    def demote_cache_claim(self, picks: list[int]) -> None:
        """No upstream has them after all."""
        builds = sorted(self.model.facts.builds)
        claimed = [name for name in builds if self.model.facts.builds[name].cache_available]
        names = self._some(claimed or builds, picks)
        if not claimed and self.model.upstream:
            self._answer_probe(names, served=True)
        self._say(f"demote_cache_claim {', '.join(names)}")
        self._apply(DemoteCacheClaim(tuple(map(self._id, names))))
        self.model.demote_cache_claim(names)
        self._check()

    def _answer_probe(self, names: list[str], *, served: bool) -> None:
        self._say(f"answer_probe {', '.join(names)}: {'served' if served else 'missed'}")
        ids = tuple(map(self._id, names))
        self._apply(AnswerProbe(served=ids) if served else AnswerProbe(missed=ids))
        self.model.answer_probe(names, served=served)
        self._check()

    @precondition(lambda self: self.model.facts.cached)
    @step(picks=PICKS)
    def collect_paths(self, picks: list[int]) -> None:
        paths = self._some(sorted(self.model.facts.cached), picks)
        self._say(f"collect_paths {', '.join(paths)}")
        later = self.graph.now + AGE
        self._apply(CollectPaths(tuple(map(hash_part, paths)), Ages(later, later)))
        self.model.collect_paths(paths)
        self._check()
