"""Reading build logs. Layer: graph, reads only.

A log is the rows of `build_log_chunk` of one attempt, in order: raw bytes as the builder wrote them. Rows
are only ever added, and all of them before the attempt is closed; so who has read everything after
the attempt ended has the whole log.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs

from gradient.graph.pg import Connection, fetch_all, fetch_as, fetch_value
from gradient.graph.statements import Statement
from gradient.model import AttemptOutcome

# Rows of one read: at 256 KiB a row, 4 MiB in memory.
PAGE: Final = 16
# Rows that the tail of a log is looked for in, and how much of their end is read.
TAIL_CHUNKS: Final = 8
TAIL_BYTES: Final = 16 * 1024

NEWEST_LOG: Final = Statement(
    "newest_log",
    f"""
    SELECT a.id AS attempt, a.outcome = {int(AttemptOutcome.RUNNING)} AS running
    FROM build_attempt a
    WHERE a.derivation = %(derivation)s AND (
        (%(or_running)s AND a.outcome = {int(AttemptOutcome.RUNNING)})
        OR EXISTS (SELECT FROM build_log_chunk c WHERE c.build_attempt = a.id))
    ORDER BY a.id DESC LIMIT 1
    """,
)
ATTEMPT_RUNS: Final = Statement(
    "attempt_runs",
    f"SELECT outcome = {int(AttemptOutcome.RUNNING)} FROM build_attempt WHERE id = %(attempt)s",
)
LOG_CHUNKS: Final = Statement(
    "log_chunks",
    f"""
    SELECT chunk_index, data FROM build_log_chunk
    WHERE build_attempt = %(attempt)s AND chunk_index > %(after)s
    ORDER BY chunk_index LIMIT {PAGE}
    """,
)
LOG_CHUNKS_BEFORE: Final = Statement(
    "log_chunks_before",
    f"""
    SELECT chunk_index, data FROM build_log_chunk
    WHERE build_attempt = %(attempt)s AND chunk_index < %(before)s
    ORDER BY chunk_index DESC LIMIT {PAGE}
    """,
)
LOG_TAILS: Final = Statement(
    "log_tails",
    f"""
    SELECT own.derivation, substring(tail.data FROM greatest(1, length(tail.data) - {TAIL_BYTES} + 1))
    FROM unnest(%(ids)s::bigint[]) AS own (derivation)
    CROSS JOIN LATERAL (
        SELECT a.id FROM build_attempt a
        WHERE a.derivation = own.derivation
          AND EXISTS (SELECT FROM build_log_chunk c WHERE c.build_attempt = a.id)
        ORDER BY a.id DESC LIMIT 1
    ) attempt
    CROSS JOIN LATERAL (
        SELECT string_agg(c.data, ''::bytea ORDER BY c.chunk_index) AS data FROM (
            SELECT chunk_index, data FROM build_log_chunk WHERE build_attempt = attempt.id
            ORDER BY chunk_index DESC LIMIT {TAIL_CHUNKS}
        ) c
    ) tail
    """,
)
FIND_DERIVATION: Final = Statement(
    "find_derivation", "SELECT id FROM derivation WHERE hash = %(hash)s AND name = %(name)s"
)


@attrs.frozen
class Log:
    """The attempt whose log is shown, and whether it may still grow."""

    attempt: int
    running: bool


@attrs.frozen
class LogChunk:
    """A row of a log."""

    index: int
    data: bytes


async def find_derivation(connection: Connection, hash_part: str, name: str) -> int | None:
    """The id of the derivation with this `.drv` path; `name` without `.drv`."""
    found: int | None = await fetch_value(connection, FIND_DERIVATION, {"hash": hash_part, "name": name})
    return found


async def newest_log(connection: Connection, derivation: int, *, or_running: bool = False) -> Log | None:
    """The newest attempt that has a log, or may yet get one where `or_running`; None when there is none."""
    parameters = {"derivation": derivation, "or_running": or_running}
    logs = await fetch_as(connection, Log, NEWEST_LOG, parameters)
    return logs[0] if logs else None


async def attempt_runs(connection: Connection, attempt: int) -> bool:
    """Whether the attempt is still running."""
    return bool(await fetch_value(connection, ATTEMPT_RUNS, {"attempt": attempt}))


async def log_chunks(connection: Connection, attempt: int, after: int = -1) -> list[LogChunk]:
    """The next rows after index `after`, at most PAGE; empty at the end of what is written."""
    rows = await fetch_all(connection, LOG_CHUNKS, {"attempt": attempt, "after": after})
    return [LogChunk(index, bytes(data)) for index, data in rows]


async def log_tail(connection: Connection, attempt: int, lines: int, max_bytes: int) -> tuple[bytes, int]:
    """The last `lines` lines, at most `max_bytes` of them, and the index of the last row read (-1: none).

    Reads backwards, and no more than it needs."""
    tail = b""
    last, before = -1, 2**31 - 1
    while tail.count(b"\n") <= lines and len(tail) < max_bytes:
        rows = await fetch_all(connection, LOG_CHUNKS_BEFORE, {"attempt": attempt, "before": before})
        if not rows:
            break
        last, before = max(last, rows[0][0]), rows[-1][0]
        tail = b"".join(bytes(data) for _, data in reversed(rows)) + tail
    return _last_lines(tail, lines)[-max_bytes:], last


async def log_tails(connection: Connection, derivations: Collection[int]) -> dict[int, bytes]:
    """The end of the newest log of each build that has one, at most TAIL_BYTES each."""
    rows = await fetch_all(connection, LOG_TAILS, {"ids": list(derivations)})
    return {derivation: bytes(data) for derivation, data in rows}


def _last_lines(text: bytes, lines: int) -> bytes:
    """The end of `text` from the start of its `lines`-th last line on; an unfinished line counts."""
    position = len(text) - text.endswith(b"\n")
    for _ in range(lines):
        position = text.rfind(b"\n", 0, position)
        if position < 0:
            return text
    return text[position + 1 :]
