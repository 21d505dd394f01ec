"""What the handlers work with: one value that `serve.py` fills. Layer: web."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

import attrs

from gradient.graph.pg_pool import Pool
from gradient.graph.transaction import Submit
from gradient.nar.claims import PathClaims
from gradient.nar.grants import Grants
from gradient.nar.store import NarStore
from gradient.nursery.health import HealthTable
from gradient.passes.pool import WorkerPool
from gradient.sessions.live import LiveHub
from gradient.web.access import Gate
from gradient.web.uploads import Cache, Uploads

# A host name or address with an optional port, as a Host header may hold it; anything else is not echoed.
_HOST: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


@attrs.frozen
class Urls:
    """Where this server is: `http://host:port` and `ws://host:port/proto`.

    `fixed` says that these are its public addresses (`server.url`); otherwise they are where it listens,
    and a client is told the host name by which it reached us.
    """

    http: str
    proto: str
    fixed: bool = False

    @classmethod
    def public(cls, url: str) -> Urls:
        """The addresses behind a reverse proxy that joins both listeners at `url`."""
        base = url.rstrip("/")
        return cls(base, f"ws{base.removeprefix('http')}/proto", fixed=True)

    def seen_by(self, host: str | None) -> Urls:
        """The same as the client sees it that sent this Host header."""
        named = _HOST.fullmatch(host or "")
        if self.fixed or named is None:
            return self
        proto_port = urlsplit(self.proto).port
        return Urls(f"http://{named[0]}", f"ws://{named[1]}:{proto_port}/proto")

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
    claims: PathClaims = attrs.field(factory=PathClaims)
    # Called with the hash part of a path whose object is not there.
    suspect: Callable[[str], None] = lambda _: None
    # Called with the file hash of a NAR that somebody fetches.
    fetched: Callable[[str], None] = lambda _: None
    gate: Gate = attrs.field(init=False)
    uploads: Uploads = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.gate = Gate(self.readers, self.grants, self.clock)
        self.uploads = Uploads(self.readers, self.submit, self.store, self.cache, self.claims, self.clock)
