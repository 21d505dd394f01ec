"""Retiring cached paths that nothing needs any more. Layer: graph.

A path is needed while a derivation makes it, is it (a `.drv`) or has it as an input source, while another
cached path refers to it, and while an evaluation has it as its flake. What is not needed stays for a
while all the same, counted from when it came and from when somebody last asked for it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

import attrs

from gradient.graph.pg import Connection, fetch_all
from gradient.graph.retire import retire_cached_paths
from gradient.graph.statements import Statement
from gradient.graph.transaction import Alone, Transaction


def _unneeded(p: str) -> str:
    """No derivation, path or evaluation needs the path, and its time is over. OFFSET 0 keeps the planner from
    reading a whole table to answer for a page."""
    return f"""({p}.created_at < %(unused_since)s
        AND coalesce({p}.promised_at < %(promised_since)s, true)
        AND NOT EXISTS (SELECT FROM derivation d WHERE d.hash = {p}.hash OFFSET 0)
        AND NOT EXISTS (SELECT FROM derivation_output o WHERE o.hash = {p}.hash OFFSET 0)
        AND NOT EXISTS (SELECT FROM derivation_input_source i WHERE i.hash = {p}.hash OFFSET 0)
        AND NOT EXISTS (SELECT FROM cached_path_reference r WHERE r.hash = {p}.hash OFFSET 0)
        AND NOT EXISTS (SELECT FROM cached_path_signature s
                        WHERE s.cached_path = {p}.id AND s.last_fetched_at >= %(unused_since)s OFFSET 0)
        AND NOT EXISTS (SELECT FROM evaluation v WHERE v.flake_source IS NOT NULL
                        AND substr(v.flake_source ->> 'store_path', 12, 32) = {p}.hash OFFSET 0))"""


UNNEEDED_PATHS: Final = Statement(
    "unneeded_paths",
    f"""
    WITH page AS MATERIALIZED (
        SELECT id, hash, created_at, promised_at FROM cached_path
        WHERE id > %(after)s ORDER BY id LIMIT %(size)s
    )
    SELECT (SELECT max(id) FROM page), ARRAY(SELECT p.hash FROM page p WHERE {_unneeded("p")})
    """,
)
STILL_UNNEEDED: Final = Statement(
    "still_unneeded_paths",
    f"""
    SELECT p.hash FROM cached_path p WHERE p.hash = ANY(%(hashes)s) AND {_unneeded("p")}
    ORDER BY p.hash FOR UPDATE
    """,
)


@attrs.frozen
class Ages:
    """Until when a path may have been made or fetched, and promised to somebody, to be collected."""

    unused_since: datetime
    promised_since: datetime


async def unneeded_paths(
    connection: Connection, ages: Ages, after: int, size: int
) -> tuple[int | None, list[str]]:
    """One page of the cache beyond the id `after`: its last id, None behind the end, and the hash parts in
    it that nothing needs."""
    params = {**attrs.asdict(ages), "after": after, "size": size}
    ((last, hashes),) = await fetch_all(connection, UNNEEDED_PATHS, params)
    return last, hashes


@attrs.frozen
class CollectPaths(Alone):
    """Retire those of the paths (hash parts) that nothing needs now (writer message).

    Answers what they referred to, which may be needed no more either.
    """

    hashes: tuple[str, ...]
    ages: Ages

    async def apply(self, tx: Transaction) -> frozenset[str]:
        """Retire them."""
        rows = await tx.rows(STILL_UNNEEDED, hashes=sorted(self.hashes), **attrs.asdict(self.ages))
        retired = await retire_cached_paths(tx, [row[0] for row in rows])
        return retired.references - set(retired.hashes)
