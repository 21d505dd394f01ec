"""The connection to PostgreSQL: psycopg 3 driven by trio, and five ways to ask.

Layer: rank 2. Owns everything that touches psycopg's private parts (`wait`, `_connect_gen`,
`_cancel_gen`, `_enter_gen`, `_exit_gen`), which move between its patch releases: psycopg is pinned
exactly and `tests/graph/test_pg_contract.py` has a test for each.

`pg_driver` stands in for psycopg's asyncio half. What this file adds to it:

- A cancelled statement is cancelled in PostgreSQL too, and the connection stays usable. Whether an
  autocommitted statement took effect before the cancellation arrived is not known to the caller.
- BEGIN, COMMIT and ROLLBACK are finished although cancelled, within `CLEANUP_LIMIT`: trio's
  cancellation is level-triggered, so without that a cancelled block would leave a transaction open.
- Cancellation within COPY or a pipeline closes the connection, because nobody knows what was sent.
- Connections are in autocommit mode; several statements that belong together are written
  `async with connection.transaction():`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar

import psycopg
import trio
from psycopg import pq
from psycopg._capabilities import capabilities
from psycopg._pipeline_async import AsyncPipeline
from psycopg.abc import AdaptContext, ConnDict, ConnParam, PQGen, Query
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import conninfo_attempts, conninfo_to_dict, make_conninfo
from psycopg.copy import AsyncCopy, AsyncWriter
from psycopg.errors import _WaitTimeout
from psycopg.rows import AsyncRowFactory, TupleRow
from psycopg.transaction import AsyncTransaction
from psycopg.waiting import Wait

from gradient.graph.adapt import ADAPTERS, rows_as
from gradient.graph.pg_driver import drive, drive_connecting, ready_now
from gradient.graph.pg_errors import BadDatabaseUrl, DatabaseDown, DatabaseGone, one_line
from gradient.graph.statements import Statement

T = TypeVar("T")
Parameters: TypeAlias = Mapping[str, Any] | Sequence[Any] | None

# psycopg complains about connections that break while they are thrown away; whoever used them has heard.
logging.getLogger("psycopg").addHandler(logging.NullHandler())

# Seconds that the end of a transaction, or the cancellation of a statement, may go on after the task
# was cancelled. A COMMIT waits for one disk flush; a server that needs longer is as good as gone.
CLEANUP_LIMIT: Final = 5.0
# Seconds to make a connection when the DSN does not say (libpq would wait for the kernel, minutes).
CONNECT_LIMIT: Final = 10
# Runs of a statement before it is prepared: what runs once (migrations, recovery) never pays the extra
# round trip, and a loop pays it once.
PREPARE_THRESHOLD: Final = 2
# Prepared statements a connection keeps, a few dozen kB each in the server. Above our number of
# statements, so that none is thrown out and prepared again.
PREPARED_MAX: Final = 500
# Added to each session. Times read back in UTC wherever the server stands; JIT compiles for longer than
# our statements run; a server that lost us over TCP frees our locks after a minute, not two hours. The
# graph is walked by index, and is in memory or on an SSD: with the default cost of a random page, tables
# that were never analysed (the first minutes of a server) are read whole for every step, 100 times slower.
SESSION_OPTIONS: Final = (
    "-c timezone=UTC -c jit=off -c random_page_cost=1.1 "
    "-c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"
)
# The client's end of the same, in libpq's words; a DSN may say otherwise.
CONNECT_DEFAULTS: Final[ConnDict] = {
    "application_name": "gradient",
    "connect_timeout": CONNECT_LIMIT,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}


class Connection(psycopg.AsyncConnection[TupleRow]):
    """A psycopg connection for trio, always in autocommit mode. Close it with `async with` or `close()`.

    One task at a time: a second one waits at `lock`. All methods raise `psycopg.Error`; those in
    `DATABASE_ERRORS` mean that the database, not the statement, is at fault.
    """

    def __init__(self, pgconn: pq.abc.PGconn, row_factory: AsyncRowFactory[Any] | None = None) -> None:
        super().__init__(pgconn)
        if row_factory is not None:
            self.row_factory = row_factory
        # asyncio's lock would work until the first contention and fail then.
        self.lock = trio.Lock()  # type: ignore[assignment]
        self.cursor_factory = _Cursor
        self._adapters = AdaptersMap(ADAPTERS)
        self._autocommit = True
        self.prepare_threshold = PREPARE_THRESHOLD
        self.prepared_max = PREPARED_MAX

    @classmethod
    async def connect(
        cls,
        conninfo: str = "",
        *,
        autocommit: bool = True,
        prepare_threshold: int | None = PREPARE_THRESHOLD,
        context: AdaptContext | None = None,
        row_factory: AsyncRowFactory[Any] | None = None,
        cursor_factory: type[psycopg.AsyncCursor[Any]] | None = None,
        **kwargs: ConnParam,
    ) -> Self:
        """Connect to the server that `conninfo` (a DSN or URL) names, trying each of its addresses.

        Raises `DatabaseDown`, in one line, when none answers within the DSN's `connect_timeout`
        (`CONNECT_LIMIT` by default, each address), and `BadDatabaseUrl`. Cancellation leaves nothing
        behind.
        """
        params = _parsed(conninfo, kwargs)
        options = f"{params.pop('options', None) or ''} {SESSION_OPTIONS}".strip()
        params = {**CONNECT_DEFAULTS, **params, "options": options}
        connection = await cls._first_answer(params)
        connection._autocommit = autocommit
        connection.prepare_threshold = prepare_threshold
        if context is not None:
            connection._adapters = AdaptersMap(context.adapters)
        connection.row_factory = row_factory or connection.row_factory
        connection.cursor_factory = cursor_factory or connection.cursor_factory
        return connection

    @classmethod
    async def _first_answer(cls, params: ConnDict) -> Self:
        failures: list[str] = []
        limit = float(params["connect_timeout"] or 0) or math.inf
        try:
            # Resolves host names, so it may block.
            attempts = await trio.to_thread.run_sync(conninfo_attempts, params, abandon_on_cancel=True)
        except psycopg.OperationalError as error:
            raise _down(params, [str(error)]) from error
        for attempt in attempts:
            try:
                with trio.move_on_after(limit):
                    return await drive_connecting(cls._connect_gen(make_conninfo("", **attempt)))
                failures.append(f"no answer within {limit:g} s")
            except psycopg.OperationalError as error:
                failures.append(one_line(error))
        raise _down(params, failures)

    async def wait(  # the signature is psycopg's: its `notifies(timeout=...)` passes one
        self,
        gen: PQGen[T],
        interval: float = 0.0,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> T:
        """Drive `gen`; psycopg calls this for whatever it does. Holds the rules of cancellation.

        `interval` is for drivers that poll and not used. Raises `_WaitTimeout` after `timeout` seconds.
        """
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            with trio.move_on_after(math.inf if timeout is None else timeout):
                result = await drive(gen, self.pgconn.socket)
                # A generator that never blocked has not let anybody else run.
                await trio.lowlevel.cancel_shielded_checkpoint()
                return result
        except trio.Cancelled:
            await self._cancel_statement(gen)  # shields itself  # noqa: ASYNC102
            raise
        raise _WaitTimeout("wait timeout expired")

    async def _cancel_statement(self, gen: PQGen[Any]) -> None:
        """Bring the connection back to rest after a cancellation, or close it. Shielded."""
        if self.pgconn.pipeline_status != pq.PipelineStatus.OFF:
            self.abandon()
        elif self._busy():
            # QueryCanceled is as wished; whatever else it is, the connection's state decides.
            with suppress(psycopg.Error), trio.move_on_after(CLEANUP_LIMIT, shield=True):
                await drive_connecting(self._cancel_gen())
                await drive(gen, self.pgconn.socket)
            if self._busy():
                self.abandon()

    def _busy(self) -> bool:
        return self.pgconn.transaction_status == pq.TransactionStatus.ACTIVE

    async def insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run `attempt`, and when cancelled run it again, shielded, for `CLEANUP_LIMIT` seconds.

        For what must not be left half done; `attempt` has to be resumable. Raises `DatabaseGone`, with
        the connection closed, when the limit passes; a cancellation that was lived through is not
        raised here but at the next checkpoint.
        """
        try:
            return await attempt()
        except trio.Cancelled:  # noqa: ASYNC103
            with trio.move_on_after(CLEANUP_LIMIT, shield=True):
                return await attempt()  # noqa: ASYNC104
        self.abandon()
        raise DatabaseGone(f"the database did not end the transaction within {CLEANUP_LIMIT:g} s")

    @contextmanager
    def _closing_if_cancelled(self) -> Iterator[None]:
        """Where statements are under way that cannot be called back one by one."""
        try:
            yield
        except trio.Cancelled:
            self.abandon()
            raise

    @asynccontextmanager
    async def pipeline(self) -> AsyncIterator[AsyncPipeline]:
        """Send statements without waiting for the answers. Cancellation closes the connection."""
        with self._closing_if_cancelled():
            async with super().pipeline() as pipeline:
                yield pipeline

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncIterator[AsyncTransaction]:
        """A transaction, or a savepoint within one: committed at the end, rolled back on any exception.

        However it is cancelled, the connection is idle after it (or closed) and all or nothing is done.
        """
        transaction = _Transaction(self, savepoint_name, force_rollback)
        if self._pipeline:
            async with self.pipeline(), transaction, self.pipeline():
                yield transaction
        else:
            async with transaction:
                yield transaction

    async def cancel_safe(self, *, timeout: float = CLEANUP_LIMIT) -> None:  # noqa: ASYNC109
        """Cancel the running statement in the server. Raises `psycopg.errors.CancellationTimeout`."""
        capabilities.has_cancel_safe(check=True)
        if not self._should_cancel():
            return
        with trio.move_on_after(timeout):
            await drive_connecting(self._cancel_gen())
            return
        raise psycopg.errors.CancellationTimeout("cancellation timeout expired")

    def is_broken_transaction(self) -> bool:
        """Whether an error has failed the open transaction: its COMMIT would roll back, silently."""
        return self.pgconn.transaction_status == pq.TransactionStatus.INERROR

    def is_idle(self) -> bool:
        """Whether the connection is at rest and the server has said nothing since: a look, no question.

        What a server says unasked is that it ends the session (or news for who listens).
        """
        at_rest = self.pgconn.transaction_status == pq.TransactionStatus.IDLE
        return at_rest and not ready_now(self.pgconn.socket, Wait.R)

    def abandon(self) -> None:
        """Close the socket at once: PostgreSQL rolls back and frees what the session held."""
        if not self.closed:
            # Wakes a task that waits for this socket, before its number can be given to another.
            trio.lowlevel.notify_closing(self.pgconn.socket)
            self.pgconn.finish()

    async def close(self) -> None:
        """Close the connection; an open transaction is rolled back. Never blocks, never fails."""
        if not self.closed:
            self._closed = True
            self.abandon()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()  # never blocks  # noqa: ASYNC102


class _Transaction(AsyncTransaction):
    """BEGIN, COMMIT and ROLLBACK that a cancellation cannot interrupt, all three through `insist`."""

    _conn: Connection

    async def __aenter__(self) -> Self:
        async with self._conn.lock:
            self._check_enter()
            try:
                await self._finish(self._enter_gen())
            except psycopg.Error as error:
                # Leaving will not be called: undo what entering counted.
                if self.pgconn.status == pq.ConnStatus.OK:
                    await self._finish(self._exit_gen(type(error), error, None))  # noqa: ASYNC120
                else:
                    self.status = self.Status.FAILED
                raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool:
        if self.pgconn.status != pq.ConnStatus.OK:
            self.status = self.Status.FAILED
            return False
        await self._conn.insist(self._conn.lock.acquire)  # noqa: ASYNC102
        try:
            return await self._finish(self._exit_gen(exc_type, exc_val, exc_tb))  # noqa: ASYNC102
        finally:
            self._conn.lock.release()

    async def _finish(self, gen: PQGen[T]) -> T:
        return await self._conn.insist(partial(drive, gen, self.pgconn.socket))


class _Cursor(psycopg.AsyncCursor[Any]):
    """A cursor whose COPY closes the connection when it is cancelled."""

    _conn: Connection

    @asynccontextmanager
    async def copy(
        self, statement: Query, params: Any = None, *, writer: AsyncWriter | None = None
    ) -> AsyncIterator[AsyncCopy]:
        """COPY in or out. An exception in the block ends the COPY; cancellation closes the connection."""
        with self._conn._closing_if_cancelled():
            async with super().copy(statement, params, writer=writer) as copy:
                yield copy

    def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        """Refused: it would await the server in a `finally`, where a cancelled task must not."""
        raise psycopg.NotSupportedError("stream() does not survive cancellation; page with keys or use COPY")


def _parsed(conninfo: str, more: ConnDict) -> ConnDict:
    try:
        return conninfo_to_dict(conninfo, **more)
    except psycopg.ProgrammingError as error:
        raise BadDatabaseUrl(
            f"the database URL is not understood ({one_line(error)}):"
            " write postgresql://USER:PASSWORD@HOST/DATABASE"
        ) from error


def _down(params: ConnDict, failures: Sequence[str]) -> DatabaseDown:
    where = params.get("host") or params.get("hostaddr") or "the default socket"
    what = f"database {params.get('dbname') or 'of the user'!s}"
    return DatabaseDown(f"cannot reach PostgreSQL ({what} at {where}): {'; '.join(failures)}")


# --- asking ---------------------------------------------------------------------------------------


async def execute(connection: Connection, statement: Statement | str, parameters: Parameters = None) -> int:
    """Run `statement`; how many rows it touched."""
    return (await _run(connection, statement, parameters)).rowcount


async def fetch_all(
    connection: Connection, statement: Statement | str, parameters: Parameters = None
) -> list[tuple[Any, ...]]:
    """All rows, as tuples."""
    return await (await _run(connection, statement, parameters)).fetchall()


async def fetch_one(
    connection: Connection, statement: Statement | str, parameters: Parameters = None
) -> tuple[Any, ...] | None:
    """The first row, or None."""
    return await (await _run(connection, statement, parameters)).fetchone()


async def fetch_value(
    connection: Connection, statement: Statement | str, parameters: Parameters = None
) -> Any:
    """The first column of the first row, or None when there is no row."""
    row = await fetch_one(connection, statement, parameters)
    return None if row is None else row[0]


async def fetch_as(
    connection: Connection, cls: type[T], statement: Statement | str, parameters: Parameters = None
) -> list[T]:
    """All rows, as values of the attrs class `cls`: columns go to its fields by name."""
    cursor = connection.cursor(row_factory=rows_as(cls))
    await cursor.execute(_text(statement), parameters)
    return await cursor.fetchall()


async def _run(
    connection: Connection, statement: Statement | str, parameters: Parameters
) -> psycopg.AsyncCursor[TupleRow]:
    return await connection.cursor().execute(_text(statement), parameters)


def _text(statement: Statement | str) -> bytes:
    return (statement.text if isinstance(statement, Statement) else statement).encode()
