"""What the binary cache asks of the graph. Layer: graph, reads only.

A path is visible in a cache when that cache has signed it and its object is stored: both in one row,
found by one index.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs

from gradient.graph.pg import Connection, fetch_all, fetch_one
from gradient.graph.statements import Statement
from gradient.model import NarRecord
from gradient.nix.store_path import StorePath

SERVED_PATHS: Final = Statement(
    "served_paths",
    """
    SELECT p.hash, p.package, p.nar_hash, p.nar_size, p.file_hash, p.file_size, p."references", p.deriver,
           p.ca, s.signature
    FROM cached_path p JOIN cached_path_signature s ON s.cached_path = p.id AND s.cache = %(cache)s
    WHERE p.hash = ANY(%(hashes)s) AND p.file_hash IS NOT NULL
    """,
)
# Equal content has equal objects: any path with this file hash will do.
SERVED_NAR: Final = Statement(
    "served_nar",
    """
    SELECT p.hash, p.package, p.file_size
    FROM cached_path p JOIN cached_path_signature s ON s.cached_path = p.id AND s.cache = %(cache)s
    WHERE p.file_hash = %(file_hash)s ORDER BY p.id LIMIT 1
    """,
)
HELD_PATHS: Final = Statement(
    "held_paths",
    "SELECT p.hash FROM cached_path p WHERE p.hash = ANY(%(hashes)s) AND p.file_hash IS NOT NULL",
)


@attrs.frozen
class ServedPath:
    """A path of a cache and the cache's signature of it."""

    record: NarRecord
    signature: str


@attrs.frozen
class ServedNar:
    """A path whose object has the file hash asked for, and the object's size in bytes."""

    store_path: str
    file_size: int


async def served_paths(
    connection: Connection, cache: int, hash_parts: Collection[str]
) -> dict[str, ServedPath]:
    """Those of the paths that the cache serves, by hash part."""
    rows = await fetch_all(connection, SERVED_PATHS, {"cache": cache, "hashes": list(hash_parts)})
    return {row[0]: _served(*row) for row in rows}


async def served_nar(connection: Connection, cache: int, file_hash: str) -> ServedNar | None:
    """The object with this file hash (`sha256:<nix32>`), None when the cache serves no such."""
    row = await fetch_one(connection, SERVED_NAR, {"cache": cache, "file_hash": file_hash})
    if row is None:
        return None
    hash_part, name, file_size = row
    return ServedNar(StorePath(hash_part, name).path(), file_size)


async def held_paths(connection: Connection, hash_parts: Collection[str]) -> set[str]:
    """The hash parts of those paths whose object is stored, whichever cache they are in."""
    return {row[0] for row in await fetch_all(connection, HELD_PATHS, {"hashes": list(hash_parts)})}


def _served(
    hash_part: str,
    name: str,
    nar_hash: str,
    nar_size: int,
    file_hash: str,
    file_size: int,
    references: list[str],
    deriver: str | None,
    ca: str | None,
    signature: str,
) -> ServedPath:
    record = NarRecord(
        store_path=StorePath(hash_part, name).path(),
        nar_hash=nar_hash,
        nar_size=nar_size,
        file_hash=file_hash,
        file_size=file_size,
        references=tuple(references),
        deriver=deriver,
        ca=ca,
    )
    return ServedPath(record, signature)
