"""The settings, one class per TOML table, with every default of the project. Pure values.

A field is written in TOML in camel case: `max_attempts` of `Build` is `maxAttempts` in `[build]`, as
the seed pages spell it. Durations are seconds, sizes are bytes; a field's name says which.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Any, Final

import attrs

from gradient.settings.address import Address
from gradient.settings.data_dir import default_data_dir

# The metadata key under which a field says the least value that makes sense.
LEAST: Final = "least"

MIB: Final = 2**20
GIB: Final = 2**30


def _number(default: int, *, least: int = 1) -> Any:
    """A whole number of at least `least`."""
    return attrs.field(default=default, metadata={LEAST: least})


def _cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Sixteen evaluators saturate what one flake can use; more only cost memory.
MAX_DEFAULT_EVALUATORS: Final = 16


def evaluators(cores: int, ram: int, max_rss: int) -> int:
    """How many evaluators to run by default: one a core, together at most three quarters of `ram` bytes."""
    return max(1, min(cores, MAX_DEFAULT_EVALUATORS, ram * 3 // 4 // max_rss))


def _ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class ScoringPolicy(Enum):
    """How jobs are scored for a worker."""

    SIMPLE = "simple"
    RESOURCE_AWARE = "resource-aware"


@attrs.frozen
class Server:
    """`[server]`: where the server keeps its files and listens.

    `url` is its public address (`https://ci.example.org`) behind a reverse proxy that joins both listeners;
    without it each client is told the host name by which it came.
    """

    data_dir: Path = attrs.field(factory=lambda: default_data_dir(os.environ))
    http: Address = attrs.field(default=Address("127.0.0.1", 3000))
    proto: Address = attrs.field(default=Address("127.0.0.1", 3001))
    url: str | None = None


@attrs.frozen
class Database:
    """`[database]`: a PostgreSQL of one's own; without `url` the server runs an embedded one."""

    url: str | None = attrs.field(default=None, repr=False)  # may hold a password


@attrs.frozen
class Build:
    """`[build]`: limits of a build that its derivation does not set, and when it is tried again."""

    default_timeout_secs: int = _number(14400)
    default_max_silent_secs: int = _number(3600)
    max_attempts: int = _number(3)
    retry_backoff_secs: int = _number(30, least=0)
    inputs_unavailable_max_loops: int = _number(3)
    substitute_miss_escalation_threshold: int = _number(2)


@attrs.frozen
class Scheduler:
    """`[scheduler]`: who gets which job."""

    scoring_policy: ScoringPolicy = ScoringPolicy.RESOURCE_AWARE
    cluster_prepare_timeout_secs: int = _number(30)


@attrs.frozen
class Proto:
    """`[proto]`: the listener of the workers."""

    worker_heartbeat_timeout_secs: int = _number(120)
    max_connections: int = _number(256)


@attrs.frozen
class Nar:
    """`[nar]`: the binary cache's objects. Without `url` they are files below the data directory."""

    url: str | None = None
    # A grant is good for one upload of one batch; an hour lets a slow line finish a large one.
    grant_ttl_secs: int = _number(3600)


@attrs.frozen
class Eval:
    """`[eval]`: how many ended evaluations a project keeps of those without a task; 0 keeps all. A task
    says for itself."""

    max_keep: int = _number(30, least=0)


@attrs.frozen
class Gc:
    """`[gc]`: when what nothing needs any more is deleted. `interval_secs` 0 turns it off.

    `nar_ttl_hours` is for cached paths, from their last use, 0 keeps all; `nar_upload_grace_hours` for what
    a worker was told that it need not upload or walk; `orphan_derivation_hours` for derivations, from when
    they came. An evaluation older than `wedged_eval_hours` no longer keeps its task's old ones.
    """

    interval_secs: int = _number(3600, least=0)
    nar_ttl_hours: int = _number(336, least=0)
    nar_upload_grace_hours: int = _number(24)
    orphan_derivation_hours: int = _number(24)
    wedged_eval_hours: int = _number(24)


@attrs.frozen
class Metrics:
    """`[metrics]`: how often the server checks itself. 0 turns a check off."""

    graph_consistency_interval_secs: int = _number(300, least=0)


@attrs.frozen
class WorkerBuild:
    """`[worker.build]`."""

    max_concurrent: int = attrs.field(factory=_cores, metadata={LEAST: 0})


@attrs.frozen
class WorkerEval:
    """`[worker.eval]`: `fork_workers` evaluator children of at most `max_rss` bytes each."""

    max_concurrent: int = _number(1, least=0)
    max_rss: int = _number(2 * GIB, least=64 * MIB)
    fork_workers: int = attrs.field(metadata={LEAST: 1})
    # Used where the job itself names no limit.
    timeout_secs: int = _number(3600)

    @fork_workers.default
    def _as_many_as_fit(self) -> int:
        return evaluators(_cores(), _ram(), self.max_rss)


@attrs.frozen
class WorkerLog:
    """`[worker.log]`: how much build log one job may send; what is above is dropped and said so."""

    burst_bytes_per_min: int = _number(8 * MIB)
    sustained_bytes_per_hour: int = _number(64 * MIB)


@attrs.frozen
class Worker:
    """`[worker]`: one worker. Without `server_url` and `token_file` it looks for a server on this host;
    without `name` people see it under the host's name.

    `nix` is the `nix` binary; its neighbours are `nix-daemon` and `nix-store`. Set, builds go through
    that daemon as a child process, never through a socket. An empty `gcroots_dir` keeps no roots.
    """

    name: str | None = None
    server_url: str | None = None
    token_file: Path | None = None
    nix: Path | None = None
    gcroots_dir: str = "/nix/var/nix/gcroots/gradient"
    zone: str | None = None
    endpoint: str | None = None
    build: WorkerBuild = attrs.field(factory=WorkerBuild)
    eval: WorkerEval = attrs.field(factory=WorkerEval)
    log: WorkerLog = attrs.field(factory=WorkerLog)


@attrs.frozen
class Settings:
    """Everything that can be set. The defaults are the values of the classes above."""

    server: Server = attrs.field(factory=Server)
    database: Database = attrs.field(factory=Database)
    build: Build = attrs.field(factory=Build)
    scheduler: Scheduler = attrs.field(factory=Scheduler)
    proto: Proto = attrs.field(factory=Proto)
    nar: Nar = attrs.field(factory=Nar)
    eval: Eval = attrs.field(factory=Eval)
    gc: Gc = attrs.field(factory=Gc)
    metrics: Metrics = attrs.field(factory=Metrics)
    worker: Worker = attrs.field(factory=Worker)
