"""When NARs of the cache were last fetched, and how often: the collection of paths goes by it. Layer: graph.

Told by the content's file hash, as clients ask for it: whichever paths have that content were fetched.
"""

from __future__ import annotations

from typing import Final

import attrs

from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction

# In path order.
STAMP_FETCHED: Final = Statement(
    "stamp_fetched",
    """
    WITH fetched AS (
        SELECT s.cached_path, f.times FROM unnest(%(file_hashes)s::text[], %(times)s::bigint[])
            AS f (file_hash, times)
        JOIN cached_path p ON p.file_hash = f.file_hash
        JOIN cached_path_signature s ON s.cached_path = p.id AND s.cache = %(cache)s
        ORDER BY s.cached_path FOR NO KEY UPDATE OF s
    )
    UPDATE cached_path_signature s
    SET last_fetched_at = %(now)s, fetch_count = s.fetch_count + f.times
    FROM fetched f WHERE s.cached_path = f.cached_path AND s.cache = %(cache)s
    """,
)


@attrs.frozen
class RecordFetches:
    """NARs of a cache, by file hash, were fetched so many times since the last of these (writer message)."""

    cache: int
    times: tuple[tuple[str, int], ...]

    async def apply(self, tx: Transaction) -> None:
        """Stamp the signatures of their paths; what has been retired meanwhile has none."""
        await tx.run(
            STAMP_FETCHED,
            cache=self.cache,
            file_hashes=[file_hash for file_hash, _ in self.times],
            times=[times for _, times in self.times],
            now=tx.now,
        )
