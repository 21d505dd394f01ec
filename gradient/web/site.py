"""What the handlers work with: one value that `serve.py` fills. Layer: web."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import attrs

from gradient.graph.pg import Pool
from gradient.nar.grants import Grants
from gradient.nar.store import NarStore
from gradient.nursery.health import HealthTable
from gradient.passes.pool import WorkerPool
from gradient.sessions.live import LiveHub
from gradient.web.access import Gate
from gradient.web.uploads import Cache, Submit, Uploads


@attrs.frozen
class Urls:
    """Where this server is, as others reach it: `http://host:port` and `ws://host:port/proto`."""

    http: str
    proto: str

    def cache(self, name: str) -> str:
        """The substituter address of a cache."""
        return f"{self.http}/cache/{name}"

    def evaluation(self, evaluation: int) -> str:
        """The page of an evaluation."""
        return f"{self.http}/evaluations/{evaluation}"


@attrs.define(eq=False)
class Site:
    """Everything a handler may need. `urls` may be set once the port is known."""

    readers: Pool
    submit: Submit
    store: NarStore
    grants: Grants
    cache: Cache
    project: str
    live: LiveHub
    health: HealthTable
    workers: WorkerPool
    urls: Urls
    version: str
    data_version: int
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    gate: Gate = attrs.field(init=False)
    uploads: Uploads = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.gate = Gate(self.readers, self.grants, self.clock)
        self.uploads = Uploads(self.readers, self.submit, self.store, self.cache)
