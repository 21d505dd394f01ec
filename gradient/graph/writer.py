"""The graph writer: one task, one channel, first in first out. Layer: graph.

Consecutive messages share one transaction, and no caller is answered before the commit: a commit costs
half a millisecond here and a build needs at least five messages. Large ones go alone. A content error
fails its own message, under a savepoint; a deadlock, a serialisation failure or a transaction that went
bad unnoticed retries the whole transaction. A connection lost at COMMIT leaves open whether that arrived:
the next run asks for the token the transaction left (docs/adr/0022). `Moves` are published after the
commit, synchronously.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar
from uuid import UUID, uuid4

import attrs
import structlog
import trio

from gradient.graph.evaluation_end import finish_evaluations
from gradient.graph.joint import in_groups
from gradient.graph.moves import Moves
from gradient.graph.pg import Connection, fetch_value
from gradient.graph.pg_errors import DATABASE_ERRORS, is_content_error, is_retryable
from gradient.graph.statements import Statement
from gradient.graph.transaction import Alone, Message, Transaction, graph_transaction

log = structlog.get_logger()
T = TypeVar("T")

# A shared transaction holds row locks while it runs: enough messages to hide the commit, few enough
# that the first caller does not wait for long.
SHARED_MESSAGES: Final = 32
# Budget of one transaction in seconds, all its tries included.
TRANSACTION_BUDGET: Final = 120.0
TRIES: Final = 3

# Waits for the transaction in doubt, should the database still be at it.
LAST_TOKEN: Final = Statement("last_commit_token", "SELECT token FROM writer_commit FOR UPDATE")


class WriterStopped(Exception):
    """The graph writer has stopped; nothing more can be recorded."""


# Why a message may not be recorded though nothing is wrong with it.
UNRECORDED: Final[tuple[type[Exception], ...]] = (*DATABASE_ERRORS, WriterStopped, TimeoutError)


class TransactionLost(RuntimeError):
    """A bug: a failed statement was swallowed in the middle of a transaction."""


@attrs.define(eq=False)
class _Request:
    """A message in the channel. Invariant: `done` is set exactly once, with `outcome` or `error` set."""

    message: Message[Any]
    done: trio.Event = attrs.field(factory=trio.Event)
    outcome: Any = None
    error: BaseException | None = None

    def succeed(self, outcome: Any) -> None:
        self.outcome = outcome
        self.done.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()


@attrs.frozen(eq=False)
class Reply(Generic[T]):
    """The answer to a posted message."""

    _request: _Request

    async def result(self) -> T:
        """Wait for the commit; raises as `GraphWriter.submit` does."""
        await self._request.done.wait()
        if self._request.error is not None:
            raise self._request.error
        outcome: T = self._request.outcome
        return outcome


@attrs.frozen(eq=False)
class _Doubt:
    """A transaction that was to be committed, and what follows if it was."""

    token: UUID
    answers: list[tuple[_Request, Any]]
    moves: Moves


@attrs.define(eq=False)
class GraphWriter:
    """Owns the one connection that moves the graph, to the database at `url`.

    `publish` receives what each transaction moved and must not block; `clock` gives the time of one.
    """

    url: str = attrs.field(repr=False)
    publish: Callable[[Moves], None]
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    _send: trio.MemorySendChannel[_Request] = attrs.field(init=False)
    _receive: trio.MemoryReceiveChannel[_Request] = attrs.field(init=False)
    # Requests taken from the channel whose transaction is not committed yet: a restart runs them again.
    _taken: list[_Request] = attrs.field(factory=list, init=False)
    # At most one that was taken too, but goes alone: in the next transaction.
    _next: list[_Request] = attrs.field(factory=list, init=False)
    _unanswered: int = attrs.field(default=0, init=False)
    # Set while a COMMIT is not answered; its requests are those in `_taken`.
    _doubt: _Doubt | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        # Unbounded only in form: every sender waits for its answer, so the number of callers bounds it.
        self._send, self._receive = trio.open_memory_channel[_Request](math.inf)

    async def submit(self, message: Message[T]) -> T:
        """Apply a message and return its result once it is committed.

        Raises GraphError (or another content error) when this message cannot be applied, WriterStopped
        when the writer has ended, TimeoutError when the transaction took too long and was given up. A
        caller cancelled while waiting does not undo its message.
        """
        return await self.post(message).result()

    def post(self, message: Message[T]) -> Reply[T]:
        """Put a message in the channel without waiting for it. Messages apply in the order of their
        posts, so a caller may post several and then await their replies. Raises WriterStopped."""
        request = _Request(message)
        try:
            self._send.send_nowait(request)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise WriterStopped("the server is stopping") from None
        self._unanswered += 1
        return Reply(request)

    @property
    def busy(self) -> bool:
        """Whether anybody waits for an answer."""
        return self._unanswered > 0

    def close(self) -> None:
        """Take no more messages; `run` returns when the channel is empty. For the drain."""
        self._send.close()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the channel until it is closed and empty.

        Raises DatabaseGone when the connection is lost: the supervisor runs this again, and messages
        that were not committed are applied then. Safe to cancel: an open transaction rolls back.
        """
        try:
            async with await Connection.connect(self.url) as connection:
                await self._settle_doubt(connection)
                task_status.started()
                while await self._take():
                    await self._transact(connection)
        except DATABASE_ERRORS:
            raise
        except BaseException:
            self.stop()
            raise
        self.stop()

    def stop(self) -> None:
        """Nobody runs this writer any more: whoever waits for an answer is told so. For who gives up
        running it again; stopping twice is fine."""
        self._send.close()
        waiting = [*self._taken, *self._next]
        with suppress(trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
            while True:
                waiting.append(self._receive.receive_nowait())
        self._receive.close()
        self._taken, self._next, self._unanswered = [], [], 0
        for request in waiting:
            request.fail(WriterStopped("the server is stopping"))

    async def _take(self) -> bool:
        """Fill `_taken` with the next messages; False when the channel is closed and empty."""
        if not self._taken:
            self._taken, self._next = self._next, []
        if not self._taken:
            try:
                self._taken.append(await self._receive.receive())
            except trio.EndOfChannel:
                return False
        while self._has_room():
            try:
                request = self._receive.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel):
                break
            goes = self._next if isinstance(request.message, Alone) else self._taken
            goes.append(request)
        return True

    def _has_room(self) -> bool:
        """Whether another message may share the transaction."""
        alone = self._next or isinstance(self._taken[0].message, Alone)
        return not alone and len(self._taken) < SHARED_MESSAGES

    async def _settle_doubt(self, connection: Connection) -> None:
        """Answer what the run before had committed without being told so."""
        doubt = self._doubt
        if doubt is not None:
            arrived = await fetch_value(connection, LAST_TOKEN) == doubt.token
            self._doubt = None
            log.warning("a commit was in doubt", arrived=arrived)
            if arrived:
                self._committed(doubt.answers, doubt.moves)

    async def _transact(self, connection: Connection) -> None:
        """One shared transaction with its tries; answers every request in `_taken`."""
        with trio.move_on_after(TRANSACTION_BUDGET) as budget:
            for attempt in range(1, TRIES + 1):
                try:
                    answers, moves = await self._attempt(connection)
                    break
                except Exception as error:
                    if not is_retryable(error) or attempt == TRIES:
                        if not is_content_error(error):
                            raise
                        self._answer([(request, error) for request in self._taken])
                        return
                    log.warning("graph transaction tried again", attempt=attempt, error=str(error))
        if budget.cancelled_caught:
            late = TimeoutError(f"not recorded within {TRANSACTION_BUDGET:.0f} s")
            self._answer([(request, late) for request in self._taken])
            return
        self._committed(answers, moves)

    def _committed(self, answers: list[tuple[_Request, Any]], moves: Moves) -> None:
        if not moves.empty:
            self.publish(moves)
        self._answer(answers)

    async def _attempt(self, connection: Connection) -> tuple[list[tuple[_Request, Any]], Moves]:
        """Everything in one go; only when some message is refused, again with a savepoint for each.

        Savepoints for messages that nearly always apply would be a third of all round trips.
        """
        try:
            return await self._apply_all(connection, alone=False)
        except Exception as error:
            if not is_content_error(error):
                raise
        return await self._apply_all(connection, alone=True)

    async def _apply_all(
        self, connection: Connection, *, alone: bool
    ) -> tuple[list[tuple[_Request, Any]], Moves]:
        answers: list[tuple[_Request, Any]] = []
        token = uuid4()
        async with graph_transaction(connection, self.clock(), token) as tx:
            if alone:
                for request in self._taken:
                    answers.append((request, await self._apply_alone(tx, request.message)))
            else:
                answers = await self._apply_together(tx)
            await finish_evaluations(tx)
            if connection.is_broken_transaction():
                # After an error that somebody swallowed, COMMIT would silently roll back.
                raise TransactionLost("a statement failed and nobody said so")
            self._doubt = _Doubt(token, answers, tx.moves)
        self._doubt = None
        return answers, tx.moves

    async def _apply_together(self, tx: Transaction) -> list[tuple[_Request, Any]]:
        """Apply all messages, joint ones by the group. One that fails fails all."""
        answers: list[tuple[_Request, Any]] = []
        for positions in in_groups([request.message for request in self._taken]):
            group = [self._taken[position] for position in positions]
            if len(group) == 1:
                answers.append((group[0], await group[0].message.apply(tx)))
            else:
                messages: list[Any] = [request.message for request in group]
                outcomes = await type(messages[0]).apply_together(tx, messages)
                answers += zip(group, outcomes, strict=True)
        return answers

    async def _apply_alone(self, tx: Transaction, message: Message[Any]) -> Any:
        """Apply one message under its own savepoint; a content error is its answer, not the others'."""
        step = Transaction(tx.connection, tx.now)
        try:
            async with tx.connection.transaction():
                outcome = await message.apply(step)
        except Exception as error:
            if not is_content_error(error):
                raise
            return error
        tx.moves.merge(step.moves)
        return outcome

    def _answer(self, answers: list[tuple[_Request, Any]]) -> None:
        self._taken = []
        self._unanswered -= len(answers)
        for request, outcome in answers:
            if isinstance(outcome, Exception):
                request.fail(outcome)
            else:
                request.succeed(outcome)
