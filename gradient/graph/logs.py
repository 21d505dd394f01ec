"""Build logs in the database: appended chunk by chunk while the build runs. Layer: graph.

Written beside the graph writer, on a connection of the session's: a log moves nothing in the graph.
A chunk belongs to the attempt of an assignment; chunks are numbered by their writer.
"""

from __future__ import annotations

from typing import Final

from gradient.graph.pg import Connection, execute
from gradient.graph.statements import Statement

APPEND_LOG: Final = Statement(
    "append_log",
    """
    INSERT INTO build_log_chunk (build_attempt, chunk_index, data)
    SELECT a.id, %(index)s, %(data)s FROM build_attempt a WHERE a.dispatched_job = %(assignment)s
    ON CONFLICT (build_attempt, chunk_index) DO NOTHING
    """,
)


async def append_log(connection: Connection, assignment: int, index: int, data: bytes) -> None:
    """Append chunk `index` to the log of an assignment's attempt; again is a no-op."""
    await execute(connection, APPEND_LOG, {"assignment": assignment, "index": index, "data": data})
