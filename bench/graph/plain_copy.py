"""The baseline of the import: a plain COPY of the rows it made, into the same tables.

Their indexes, keys and triggers are there, and so is what was in the database before the reports came.
"""

from __future__ import annotations

import time
from typing import Final, TypeAlias

from gradient.graph.pg import Connection

# What reports write, in the order of their foreign keys. The ledger of the counters comes by triggers.
TABLES: Final = (
    "derivation",
    "derivation_output",
    "derivation_dependency",
    "derivation_input_source",
    "derivation_build",
    "build_job",
    "entry_point",
)
Rows: TypeAlias = dict[str, bytes]


async def copied_out(url: str) -> Rows:
    """The rows of every table, as COPY writes them."""
    rows = {}
    async with await Connection.connect(url) as connection:
        for table in TABLES:
            async with connection.cursor().copy(f"COPY {table} TO STDOUT".encode()) as copy:
                rows[table] = b"".join([bytes(block) async for block in copy])
    return rows


async def copied_in(url: str, rows: Rows) -> float:
    """Copy them into a database without any, in one transaction; the seconds."""
    async with await Connection.connect(url) as connection:
        start = time.perf_counter()
        async with connection.transaction():
            for table in TABLES:
                async with connection.cursor().copy(f"COPY {table} FROM STDIN".encode()) as copy:
                    await copy.write(rows[table])
        return time.perf_counter() - start
