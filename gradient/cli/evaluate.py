"""One evaluation for one user: create it, show it until it ends, say what became of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import attrs
import trio

from gradient.cli.api import Api
from gradient.cli.display import display_of
from gradient.cli.flake_arg import FlakeArg, Remote
from gradient.cli.follow import Follower
from gradient.cli.outcome import Outcome
from gradient.cli.output import Output
from gradient.cli.packing import PackedSource, hash_source, upload_source
from gradient.cli.progress import FAILED, Progress
from gradient.cli.started import seconds_since_start
from gradient.model import CachedSource


@attrs.frozen
class Order:
    """What is to be evaluated; a local source hashed, but not yet with the server."""

    what: PackedSource | str
    wildcards: tuple[str, ...]

    @property
    def flake(self) -> CachedSource | str:
        """What the server is to evaluate."""
        return self.what.source if isinstance(self.what, PackedSource) else self.what

    @property
    def title(self) -> str:
        """For people: `my-flake#hello`, or the URL with what is to be built of it."""
        name = self.what.name if isinstance(self.what, PackedSource) else self.what
        return f"{name}#{','.join(self.wildcards)}" if self.wildcards else name


async def prepare(flake: FlakeArg) -> Order:
    """What can be done without a server. Raises BadFlake, BadEnvironment."""
    if isinstance(flake.where, Remote):
        await trio.lowlevel.checkpoint()
        return Order(flake.where.url, flake.wildcards)
    return Order(await hash_source(flake.where), flake.wildcards)


async def evaluate(api: Api, order: Order, out: Output, give_up_after: float = math.inf) -> Outcome:
    """Have it evaluated and built, and follow that to its end; the progress goes to stderr.

    Raises what Api, upload_source and Follower raise. Cancelled, the evaluation goes on without us."""
    if isinstance(order.what, PackedSource):
        await upload_source(api, order.what)
    # Of a source that we upload, the server knows nothing but what it contains.
    comment = order.what.name if isinstance(order.what, PackedSource) else None
    created = await api.create_evaluation(order.flake, order.wildcards, comment)
    out.evaluation = created.evaluation
    out.note(f"evaluation {created.evaluation}: {created.page}")
    progress = Progress(started=time.time() - seconds_since_start(), title=order.title)
    follower = Follower(api, created.evaluation, progress, display_of(progress), give_up_after)
    await follower.run()
    tails = {build.id: build.tail.lines for build in progress.having(*FAILED)}
    return Outcome(await api.evaluation(created.evaluation), follower.gave_up, tails)


def report(outcome: Outcome, out: Output, hints: Iterable[str] = ()) -> None:
    """Say what became of it: lines for people, `hints` behind them, and the object of --json last."""
    for line in (*outcome.lines(), *hints):
        out.result(line)
    out.evaluated(outcome.status, outcome.entry_points, outcome.errors)
