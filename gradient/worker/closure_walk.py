"""The walk itself: findings of the evaluator in, batches out. Layer: worker.

Walking begins with the first finding. While nothing new comes, a partly filled batch does not wait for
more: the last attribute may take minutes, and what was found before it can build meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

import attrs
import trio

from gradient.model import MAX_ATTR, EntryPoint, MessageLevel
from gradient.nix.attr_path import render_attr_path
from gradient.nix.derivation import EXTENSION
from gradient.nix.evaluator.findings import AttributeFailed, Evaluated, Finding, TargetUnmatched
from gradient.nix.store_path import StorePath
from gradient.wire.messages import EvalMessage
from gradient.worker.drv_files import Unreadable, read_derivations
from gradient.worker.errors import MAX_TEXT
from gradient.worker.job import Job
from gradient.worker.publish import Publisher
from gradient.worker.walk import Batcher, Read, Walk

# How long a partly filled batch waits for the next finding: as long as publishing it takes.
FLUSH_AFTER: Final = 0.05  # seconds
# How long to wait for more after the first finding: each wave costs a question to the server, and an
# evaluator finds dozens of small attributes in this time.
GATHER: Final = 0.05  # seconds
# Warnings and traces of one evaluation that are kept, and characters of each.
MAX_WARNINGS: Final = 100
MAX_WARNING: Final = 2000


@attrs.define(eq=False)
class ImportWanted:
    """Evaluation waits for these derivations: publish them first, with all they need.

    `published` is set when the server has been sent everything they need."""

    drv_paths: tuple[str, ...]
    published: trio.Event = attrs.field(factory=trio.Event)


Found: TypeAlias = Finding | ImportWanted


class ClosureWalk:
    """One evaluation's walk. `full`: walk also what the graph knows completely."""

    def __init__(
        self, job: Job, publisher: Publisher, found: trio.MemoryReceiveChannel[Found], *, full: bool
    ) -> None:
        self._job = job
        self._publisher = publisher
        self._found = found
        self._full = full
        self._walk = Walk()
        self._batcher = Batcher()
        self._imports: set[str] = set()
        # Roots that cannot be read, and why.
        self._unreadable: dict[str, str] = {}
        self._seen_warnings: dict[str, None] = {}
        # Derivations read so far; attributes that led to one.
        self.derivations = 0
        self.attributes = 0
        # Attributes that evaluated to something that is none.
        self.failed = 0
        # Targets that matched nothing.
        self.unmatched: list[TargetUnmatched] = []

    @property
    def warnings(self) -> tuple[str, ...]:
        """What Nix said beside the values, each once."""
        return tuple(self._seen_warnings)

    async def run(self) -> None:
        """Walk until the findings end and everything below them is published."""
        with self._publisher:
            while await self._take_some():
                await self._wave()
            await self._walk_all()

    # --- what comes in ------------------------------------------------------------------------------

    async def _take_some(self) -> bool:
        """Take what was found meanwhile; wait for it when nothing is left to read. False at its end."""
        try:
            if self._walk.idle:
                await self._take(await self._next())
                await self._gather()
            while True:
                await self._take(self._found.receive_nowait())
        except trio.WouldBlock:
            return True
        except trio.EndOfChannel:
            return False

    async def _gather(self) -> None:
        """Take what comes within a moment. Raises EndOfChannel at once at the end."""
        until = trio.current_time() + GATHER
        while True:
            with trio.move_on_at(until) as moment:
                found = await self._found.receive()
            if moment.cancelled_caught:
                return
            await self._take(found)

    async def _next(self) -> Found:
        """Wait for the next finding, and publish what is there when that takes long."""
        if not self._batcher.is_empty:
            with trio.move_on_after(FLUSH_AFTER):
                return await self._found.receive()
            await self._flush()
        return await self._found.receive()

    async def _take(self, found: Found) -> None:
        match found:
            case Evaluated(attr, _, _) if len(attr.encode()) > MAX_ATTR:
                self.failed += 1
                await self._fail(attr, f"its attribute path is longer than {MAX_ATTR} bytes")
            case Evaluated(attr, drv_path, _) if drv_path in self._unreadable:
                self.failed += 1
                await self._fail(attr, self._unreadable[drv_path])
            case Evaluated(attr, drv_path, remarks):
                self.attributes += 1
                self._batcher.enter(EntryPoint(attr, drv_path))
                self._walk.found([drv_path])
                self._warn(remarks)
            case AttributeFailed(attr, message):
                await self._fail(attr, message)
            case TargetUnmatched():
                self.unmatched.append(found)
            case ImportWanted():
                await self._publish_import(found)

    async def _fail(self, attr: str, message: str) -> None:
        """Tell of an attribute that failed; the others go on."""
        source = f"nix-eval:{attr}"[:MAX_ATTR]
        await self._job.send(EvalMessage(*self._job.key, MessageLevel.ERROR, source, message[:MAX_TEXT]))

    def _warn(self, remarks: str) -> None:
        text = remarks.strip()[:MAX_WARNING]
        if text and len(self._seen_warnings) < MAX_WARNINGS:
            self._seen_warnings[text] = None

    # --- what goes out ------------------------------------------------------------------------------

    async def _wave(self) -> None:
        """Read the newest derivations, and find what they need."""
        wave = self._walk.next_wave()
        if not wave:
            return
        known = await self._known(wave)
        for path in known:
            self._batcher.known(path)
        reads = await trio.to_thread.run_sync(read_derivations, [p for p in wave if p not in known])
        for read in reads:
            if isinstance(read, Unreadable):
                await self._pass_over(read)
                continue
            self.derivations += 1
            self._walk.found(read.record.dependencies)
            batch = self._batcher.read(self._marked(read))
            if batch is not None:
                await self._publisher.publish(batch)

    async def _pass_over(self, unreadable: Unreadable) -> None:
        """A flake may call anything a derivation: that costs the attribute. What derivations need is one, and
        if it cannot be read the job cannot go on."""
        entry_points = self._batcher.give_up(unreadable.drv_path)
        if not entry_points:
            raise unreadable.fault
        self._unreadable[unreadable.drv_path] = str(unreadable.fault)
        self.attributes -= len(entry_points)
        self.failed += len(entry_points)
        for entry_point in entry_points:
            await self._fail(entry_point.attr, str(unreadable.fault))

    async def _known(self, wave: Iterable[str]) -> frozenset[str]:
        """Those whose closure the graph has. What an import waits for is told in any case."""
        asked = [path for path in wave if path not in self._imports]
        if self._full or not asked:
            return frozenset()
        return await self._job.queries.known(self._job.job_id, asked) & frozenset(asked)

    async def _walk_all(self) -> None:
        """Read everything below what was found so far, and publish it."""
        while not self._walk.idle:
            await self._wave()
        await self._flush()

    async def _flush(self) -> None:
        if batch := self._batcher.flush():
            await self._publisher.publish(batch)

    # --- import from derivation ---------------------------------------------------------------------

    async def _publish_import(self, wanted: ImportWanted) -> None:
        """Walk everything found so far, these last found and so first read, and have all of it sent."""
        for path in wanted.drv_paths:
            self._imports.add(path)
            self._walk.again(path)
        await self._walk_all()
        await self._publisher.settled()
        wanted.published.set()

    def _marked(self, read: Read) -> Read:
        record = read.record
        if record.drv_path not in self._imports:
            return read
        name = StorePath.parse(record.drv_path).name.removesuffix(EXTENSION)
        attr = render_attr_path(("other", record.architecture, name))
        self._batcher.enter(EntryPoint(attr, record.drv_path))
        return attrs.evolve(read, record=attrs.evolve(record, ifd=True))
