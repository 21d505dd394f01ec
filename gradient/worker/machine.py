"""What every job of this process works with. Layer: worker, no logic; `work.py` makes the one there is."""

from __future__ import annotations

from functools import partial
from typing import Final

import attrs
import trio

from gradient.http.client import HttpClient
from gradient.nix.daemon.pool import DaemonPool
from gradient.nix.evaluator.pool import EvaluatorPool
from gradient.settings.tables import Worker
from gradient.worker.capabilities import Host
from gradient.worker.git_repo import GitCache
from gradient.worker.shared_requests import SharedRequests

# Uploads of all jobs together, and downloads: more do not fill a line any better.
MAX_UPLOADS: Final = 16
MAX_DOWNLOADS: Final = 8


@attrs.frozen
class Machine:
    """The tools of a worker. They outlive every session.

    `store` answers questions and takes imports, several jobs sharing its connections; `builders` are the
    connections of builds, each held by one build at a time.
    """

    settings: Worker
    host: Host
    store: DaemonPool
    builders: DaemonPool
    http: HttpClient
    evaluators: EvaluatorPool
    git: GitCache
    small_uploads: SharedRequests = attrs.field(factory=SharedRequests)
    uploads: trio.Semaphore = attrs.field(factory=partial(trio.Semaphore, MAX_UPLOADS))
    downloads: trio.CapacityLimiter = attrs.field(factory=partial(trio.CapacityLimiter, MAX_DOWNLOADS))
