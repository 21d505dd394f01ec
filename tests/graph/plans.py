"""Plans of statements as PostgreSQL ran them: what was read, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import attrs
from psycopg import sql

from gradient.graph.pg import Connection, execute, fetch_all, fetch_value
from gradient.graph.statements import Statement

# Rows from which on reading a table whole is a fault.
LARGE = 10_000
# Milliseconds until a plan that has gone wrong is given up. Right ones take two seconds on these graphs.
TIMEOUT_MS = 120_000


class Planned(Enum):
    """How a prepared statement is planned: for its values, or once for all of them."""

    FOR_VALUES = "force_custom_plan"
    FOR_ALL = "force_generic_plan"


@attrs.frozen
class Catalog:
    """What there is: large tables, and the indexes that hold a part of their table."""

    large: frozenset[str]
    partial: frozenset[str]

    @classmethod
    async def read(cls, connection: Connection) -> Catalog:
        large = "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND reltuples >= %(rows)s::integer"
        partial = "SELECT indexrelid::regclass::text FROM pg_index WHERE indpred IS NOT NULL"
        return cls(
            frozenset(row[0] for row in await fetch_all(connection, large, {"rows": LARGE})),
            frozenset(row[0] for row in await fetch_all(connection, partial)),
        )


@attrs.frozen
class Plan:
    """One run of a statement: its plan, and what it read that no plan shows."""

    root: dict[str, Any]
    # Tables that were read from one end to the other, by its functions, triggers and foreign keys too.
    scanned: frozenset[str]

    @property
    def pages(self) -> int:
        """Pages of 8 kB looked at, by its functions too."""
        return int(self.root["Shared Hit Blocks"]) + int(self.root["Shared Read Blocks"])

    def nodes(self) -> Iterator[dict[str, Any]]:
        due = [self.root]
        while due:
            node = due.pop()
            due += node.get("Plans", [])
            yield node

    def whole_tables(self, catalog: Catalog) -> set[str]:
        """The large tables it reads from one end to the other, over an index or not.

        A partial index is read whole by right: it holds what is alive.
        """
        found = set(self.scanned & catalog.large)
        for node in self.nodes():
            if "Scan" not in node["Node Type"] or "Index Cond" in node:
                continue
            index = node.get("Index Name")
            if index in catalog.partial or node["Node Type"] == "Bitmap Heap Scan":
                continue
            # A bitmap names its index alone, which has the name of its table in it.
            table = node.get("Relation Name") or next(
                (t for t in catalog.large if str(index).startswith(t)), ""
            )
            if table in catalog.large:
                found.add(table)
        return found


async def explain(
    connection: Connection,
    statement: Statement,
    values: Mapping[str, Any],
    planned: Planned,
    *,
    by_index: bool = False,
) -> Plan:
    """Prepare a statement, run it with these values, and take back what it did.

    With `by_index` no table is read whole that has an index to look in: this is what the input costs.
    """
    given = [sql.Literal(values[parameter]).as_string(connection) for parameter in statement.parameters]
    arguments = f"({', '.join(given)})" if given else ""
    async with connection.transaction(force_rollback=True):
        await execute(connection, "DEALLOCATE ALL")
        await execute(connection, f"SET LOCAL plan_cache_mode = {planned.value}")
        await execute(connection, f"SET LOCAL statement_timeout = {TIMEOUT_MS}")
        if by_index:
            await execute(connection, "SET LOCAL enable_seqscan = off")
        await execute(connection, f"PREPARE gated AS {statement.numbered}")
        before = await _sequential_scans(connection)
        answer = await fetch_value(
            connection, f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE gated{arguments}"
        )
        after = await _sequential_scans(connection)
    return Plan(answer[0]["Plan"], frozenset(table for table, n in after.items() if n > before.get(table, 0)))


async def _sequential_scans(connection: Connection) -> dict[str, int]:
    """How often each table was read whole, as this session has counted so far."""
    return dict(await fetch_all(connection, "SELECT relname::text, seq_scan FROM pg_stat_xact_user_tables"))
