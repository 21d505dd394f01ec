"""`gradient work`: the composition root of a worker. Every long-lived task of the process is named in
`_start`; follow any one of them downward.

    root nursery
    ├── signal listener   the first signal drains, the second stops at once
    ├── evaluator pool    nix repl children, and the watch over their memory
    ├── connection sweep  closes old connections to the Nix daemon, and with them their temporary roots
    └── connection loop   one session at a time
        └── session       reader, heartbeat, scoring, and a cancel scope for each job

Stopping is one phase: say so, abort the jobs, wait five seconds at most for their reports.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from gradient.http.client import HttpClient
from gradient.nix.daemon.address import find_daemon
from gradient.nix.daemon.build_hook import declining_hook
from gradient.nix.daemon.errors import DaemonGone, NixMissing
from gradient.nix.daemon.options import DaemonOptions
from gradient.nix.daemon.pool import DaemonPool
from gradient.nix.evaluator.pool import EvaluatorPool
from gradient.nix.evaluator.settings import EvaluatorSettings
from gradient.nursery.drain import Phase
from gradient.nursery.root import Task, run_root
from gradient.nursery.signals import Stop, listen
from gradient.nursery.stop_window import STOP_WINDOW
from gradient.settings import DataDir, Settings
from gradient.wire.messages import WorkerCapabilities
from gradient.wire.transport import Link
from gradient.worker.capabilities import find_host, worker_capabilities
from gradient.worker.connection import Credentials, Uplink
from gradient.worker.git_process import Git
from gradient.worker.git_repo import GitCache
from gradient.worker.identity import server_url, worker_id, worker_name, worker_token
from gradient.worker.jobs import execute
from gradient.worker.machine import Machine
from gradient.worker.session import Session

log = structlog.get_logger(__name__)

# Questions are answered in less than a millisecond; imports hold a connection for as long as they write.
STORE_CONNECTIONS: Final = 8
# A daemon answers in milliseconds; one that is busy starting up, or swapped out, in a few seconds.
GREETING_LIMIT: Final = 20.0
# Closing the link takes what is queued along; the transport gives itself two seconds.
CLOSE_LIMIT: Final = 3.0  # seconds
SWEEP_INTERVAL: Final = 60.0  # seconds
EVALUATOR_HOME: Final = "evaluator"


async def work(settings: Settings, stop: Stop, *, signals: bool = True) -> None:
    """Run a worker until `stop`, then report every job as stopped and end, within six seconds.

    With `signals` it listens for SIGTERM and SIGINT itself: for the main thread only. Raises NixMissing
    and DaemonTooOld when there is no Nix to work with, OSError for a data directory that cannot be
    written, TokenRefused when the server does not know its token; alone or in a group. A server that is
    away is waited for.
    """
    data = DataDir(settings.server.data_dir)
    nix = find_nix(settings.worker.nix)
    daemon = await find_daemon(None if settings.worker.nix is None else str(nix))
    identity = await trio.to_thread.run_sync(worker_id, data)
    local = DaemonOptions(extra=await trio.to_thread.run_sync(declining_hook, data.build_hook.absolute()))
    async with (
        HttpClient() as http,
        DaemonPool(daemon, STORE_CONNECTIONS) as store,
        DaemonPool(daemon, max(1, settings.worker.build.max_concurrent), local) as builders,
    ):
        evaluators = EvaluatorPool(
            EvaluatorSettings(nix, data.root / EVALUATOR_HOME),
            size=settings.worker.eval.fork_workers,
            memory_budget=settings.worker.eval.max_rss,
        )
        machine = Machine(
            settings=settings.worker,
            host=await find_host(nix),
            store=store,
            builders=builders,
            http=http,
            evaluators=evaluators,
            git=GitCache(data.git, Git.hardened(os.environ)),
        )
        nix_version = await _nix_version(store)
        uplink = Uplink(
            identity,
            partial(trio.to_thread.run_sync, _credentials, settings),
            http,
            partial(_session, machine, worker_capabilities(machine.host, settings.worker, nix_version)),
            name=worker_name(settings),
        )
        await run_root(partial(_start, machine, uplink, stop if signals else None), stop)


async def _nix_version(store: DaemonPool) -> str:
    """The version of the daemon's Nix. Raises DaemonGone when it does not even say that."""
    with trio.move_on_after(GREETING_LIMIT):
        async with store.connection() as connection:
            return connection.info.nix_version
    raise DaemonGone(f"the Nix daemon did not answer within {GREETING_LIMIT:g} s")


async def _start(
    machine: Machine, uplink: Uplink, signals: Stop | None, root: trio.Nursery
) -> Sequence[Phase]:
    """Start every task of the process; returns how they stop."""
    if signals is not None:
        await root.start(listen, signals)
    await root.start(machine.evaluators.run)
    root.start_soon(_sweep, machine)
    connection = Task("connection loop")
    root.start_soon(connection.run, uplink.run)
    return (
        Phase("jobs", uplink.stop, STOP_WINDOW, uplink.waiting_for),
        Phase("connection", connection.stop, CLOSE_LIMIT),
    )


async def _sweep(machine: Machine) -> None:
    while True:
        await trio.sleep(SWEEP_INTERVAL)
        await machine.store.sweep()
        await machine.builders.sweep()


def _session(machine: Machine, capabilities: WorkerCapabilities, link: Link, base_url: str) -> Session:
    return Session(link, base_url, capabilities, machine.store, partial(execute, machine))


def _credentials(settings: Settings) -> Credentials:
    return Credentials(server_url(settings), worker_token(settings))


def find_nix(given: Path | None) -> Path:
    """The `nix` to evaluate with: the given one, else that of PATH. Raises NixMissing."""
    found = shutil.which(given or "nix")
    if found is None:
        where = f"{given} is not a program that can be run" if given else "there is no nix on PATH"
        raise NixMissing(f"{where}: install Nix 2.8 or newer, or name a nix binary")
    return Path(found)
