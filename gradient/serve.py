"""`gradient serve`: the composition root of the server. Every long-lived task of the process is named in
`_start`, and how they stop in `_stop_phases`; follow any one of them downward.

    root nursery
    ├── database          embedded PostgreSQL, unless a DSN is set
    ├── instance lock     one server per database
    ├── graph writer      one channel in, stopped last
    ├── passes            builds, evaluations, waiting, retries, resync, consistency, garbage: a budget each
    ├── proto listener    one session nursery a worker
    └── http              API, cache, pages
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import attrs
import trio

from gradient.graph.access import FIRST_CACHE
from gradient.graph.embedded import EmbeddedPostgres
from gradient.graph.pg_pool import Pool
from gradient.graph.writer import TRANSACTION_BUDGET
from gradient.nursery.drain import Phase
from gradient.nursery.root import Task, run_root
from gradient.nursery.signals import Stop
from gradient.server import Server
from gradient.server_files import prepare_data_dir
from gradient.sessions.sessions import DRAIN_LIMIT as SESSIONS_DRAIN
from gradient.settings import DataDir, Settings, write_atomically
from gradient.settings.address import Address
from gradient.web.app import make_app
from gradient.web.serve_http import serve_http
from gradient.web.site import Urls
from gradient.wire.listener import serve_links

# Descriptors for a flood of clients on both listeners, with room for the database and files. Many systems
# hand out 1024, of which HTTP alone takes all.
DESCRIPTORS: Final = 4096
# Connections for reads: passes, questions of workers, and pages never wait for each other long.
READERS: Final = 8


@attrs.frozen
class Serving:
    """Where a running server is, as clients on this machine reach it."""

    http_url: str
    proto_url: str
    cache_url: str
    public_key: str


class CannotListen(Exception):
    """An address cannot be listened on: somebody else does, or it is none of this machine's."""


async def serve(  # noqa: ASYNC128  # `_start` says when it serves
    settings: Settings, stop: Stop, *, task_status: trio.TaskStatus[Serving] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a server until `stop`, then drain it.

    Raises, in a group, what keeps it from starting: DataDirUnusable, SettingsError, PortInUse,
    CannotListen, DatabaseDown, DatabaseInUse, DatabaseTooNew, EmbeddedFailed. Cancelling it stops at once;
    the next start recovers.
    """
    _more_descriptors()
    data = DataDir(settings.server.data_dir)
    files = await trio.to_thread.run_sync(prepare_data_dir, data)
    embedded = None if settings.database.url else EmbeddedPostgres(data.postgres)
    url = embedded.url if embedded else str(settings.database.url)
    async with Pool.open(url, READERS) as readers:
        server = Server(settings, data, files, url, readers)
        try:
            await run_root(partial(_start, server, embedded, task_status), stop)
        finally:
            if server.announced:  # else the file is another server's, which keeps us from starting
                data.http_url.unlink(missing_ok=True)


def _more_descriptors() -> None:
    """Raise this process's limit of open files to DESCRIPTORS, or as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


@attrs.frozen
class _Tasks:
    """The tasks that the drain stops one by one."""

    database: Task = attrs.field(factory=lambda: Task("database"))
    lock: Task = attrs.field(factory=lambda: Task("instance lock"))
    writer: Task = attrs.field(factory=lambda: Task("graph writer"))
    passes: Task = attrs.field(factory=lambda: Task("passes"))
    proto: Task = attrs.field(factory=lambda: Task("proto listener"))
    http: Task = attrs.field(factory=lambda: Task("http"))
    stop_http: trio.Event = attrs.field(factory=trio.Event)


async def _start(
    server: Server,
    embedded: EmbeddedPostgres | None,
    task_status: trio.TaskStatus[Serving],
    root: trio.Nursery,
) -> Sequence[Phase]:
    """Start every task of the process, in order; returns how they stop."""
    tasks, listen = _Tasks(), server.settings.server
    if embedded is not None:
        await root.start(partial(tasks.database.serve, partial(server.run_database, embedded)))
    await root.start(partial(tasks.lock.serve, server.hold_lock))
    await server.prepare()
    with _listening_on(listen.proto, "--proto"):
        limit = server.settings.proto.max_connections
        links = partial(
            serve_links,
            server.sessions.serve,
            host=listen.proto.host,
            port=listen.proto.port,
            connection_limit=limit,
        )
        bound = await root.start(partial(tasks.proto.serve, links))
    with _listening_on(listen.http, "--http"):
        pages = partial(
            serve_http, make_app(server.site), listen.http.host, listen.http.port, stop=tasks.stop_http
        )
        port = await root.start(partial(tasks.http.serve, pages))
    # After the listeners, which may not come about: nothing is then interrupted in its work. What a first
    # caller wants recorded waits in the writer's channel.
    root.start_soon(tasks.writer.run, server.run_writer)
    root.start_soon(tasks.passes.run, server.run_passes)
    http, proto = Address(listen.http.host, port), Address(listen.proto.host, bound[0][1])
    task_status.started(await _announce(server, http, proto))
    return _stop_phases(server, tasks, has_database=embedded is not None)


def _stop_phases(server: Server, tasks: _Tasks, *, has_database: bool) -> Sequence[Phase]:
    """The drain: nothing is lost when it is cut short, so each phase has an end."""

    async def end_sessions() -> None:
        server.scheduler.draining = True
        server.hub.stop()
        await server.sessions.drain()
        await tasks.proto.stop()

    async def end_http() -> None:
        tasks.stop_http.set()
        await tasks.http.wait()

    async def end_writer() -> None:
        await tasks.passes.stop()
        server.writer.close()
        await tasks.writer.wait()

    async def end_database() -> None:
        server.readers.close()
        await tasks.lock.stop()
        if has_database:
            await tasks.database.stop()

    return (
        Phase("sessions", end_sessions, SESSIONS_DRAIN + 5, server.sessions.waiting_for),
        Phase("http", end_http, 10),
        Phase("graph writer", end_writer, TRANSACTION_BUDGET),
        Phase("database", end_database, 60),
    )


@contextmanager
def _listening_on(address: Address, option: str) -> Iterator[None]:
    """Name the address when it cannot be bound, and the option for another."""
    try:
        yield
    except OSError as error:
        why = f"cannot listen on {address}: {error.strerror}; another can be given with {option}"
        raise CannotListen(why) from error


async def _announce(server: Server, http: Address, proto: Address) -> Serving:
    """Say where the server is: to the handlers, in the data directory, to the caller."""
    urls = Urls(http.url(), proto.url("ws") + "/proto")
    public = server.settings.server.url
    server.site.urls = Urls.public(public) if public else urls
    server.announced = True
    await trio.to_thread.run_sync(write_atomically, server.data.http_url, urls.http + "\n")
    return Serving(urls.http, urls.proto, urls.cache(FIRST_CACHE), server.site.cache.public_key)
