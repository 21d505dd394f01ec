"""Tokens and who may use them: API tokens, worker registrations, the rows of a first start. Layer: graph.

A token is 48 random bytes in base64 and only its SHA-256 is stored: nobody guesses 384 bits, so a slow
hash would protect nothing and cost every request.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from datetime import datetime
from typing import Final
from uuid import UUID

import attrs

from gradient.graph.pg import Connection, execute, fetch_as, fetch_one, fetch_value
from gradient.graph.statements import Statement

TOKEN_BYTES: Final = 48
# Everything belongs to one project with one cache until somebody makes more.
FIRST_PROJECT: Final = "main"
FIRST_CACHE: Final = "main"
FIRST_TOKEN: Final = "administrator"

ENSURE_PROJECT: Final = Statement(
    "ensure_project",
    """
    INSERT INTO project (name, created_at) VALUES (%(name)s, %(now)s) ON CONFLICT (name) DO NOTHING
    """,
)
ENSURE_CACHE: Final = Statement(
    "ensure_cache",
    "INSERT INTO cache (name, created_at) VALUES (%(name)s, %(now)s) ON CONFLICT (name) DO NOTHING",
)
FIRST_IDS: Final = Statement(
    "first_ids",
    """
    SELECT p.id, c.id FROM project p, cache c WHERE p.name = %(project)s AND c.name = %(cache)s
    """,
)
SUBSCRIBE_PROJECT: Final = Statement(
    "subscribe_project",
    """
    INSERT INTO project_cache (project, cache) VALUES (%(project)s, %(cache)s) ON CONFLICT DO NOTHING
    """,
)
# A token that was revoked stays revoked, whatever lies in the data directory.
ENSURE_API_TOKEN: Final = Statement(
    "ensure_api_token",
    """
    INSERT INTO api_token (name, token_hash, created_at) VALUES (%(name)s, %(hash)s, %(now)s)
    ON CONFLICT (token_hash) DO NOTHING
    """,
)
ENSURE_WORKER_REGISTRATION: Final = Statement(
    "ensure_worker_registration",
    """
    INSERT INTO worker_registration (project, token_hash, created_at)
    SELECT %(project)s, %(hash)s, %(now)s
    WHERE NOT EXISTS (SELECT FROM worker_registration r
                      WHERE r.project = %(project)s AND r.token_hash = %(hash)s AND r.worker_id IS NULL)
    """,
)
FIND_API_TOKEN: Final = Statement(
    "find_api_token",
    "SELECT name FROM api_token WHERE token_hash = %(hash)s AND revoked_at IS NULL",
)
WORKER_REGISTRATIONS: Final = Statement(
    "worker_registrations",
    """
    SELECT p.name AS project, r.worker_id, r.token_hash, r.enable_fetch, r.enable_eval, r.enable_build
    FROM worker_registration r JOIN project p ON p.id = r.project
    WHERE r.active ORDER BY r.id
    """,
)


@attrs.frozen
class FirstRows:
    """Ids of the project and the cache that a first start makes."""

    project: int
    cache: int


@attrs.frozen
class WorkerRegistration:
    """What a worker may do for a project; `worker_id` None is any worker that knows the token."""

    project: str
    worker_id: UUID | None
    token_hash: bytes = attrs.field(repr=False)
    enable_fetch: bool = True
    enable_eval: bool = True
    enable_build: bool = True


def new_token() -> str:
    """A fresh token: 64 characters."""
    return base64.b64encode(secrets.token_bytes(TOKEN_BYTES)).decode()


def hash_token(token: str) -> bytes:
    """What is stored of a token. Compare with `hmac.compare_digest`."""
    return hashlib.sha256(token.encode()).digest()


async def ensure_first_rows(
    connection: Connection, now: datetime, admin_hash: bytes, worker_hash: bytes
) -> FirstRows:
    """Make what an empty database needs to be of use, in one transaction; what is there already stays.

    Both hashes are of `hash_token`. Run it at every start: a token file that was made anew becomes valid.
    """
    async with connection.transaction():
        await execute(connection, ENSURE_PROJECT, {"name": FIRST_PROJECT, "now": now})
        await execute(connection, ENSURE_CACHE, {"name": FIRST_CACHE, "now": now})
        ids = await fetch_one(connection, FIRST_IDS, {"project": FIRST_PROJECT, "cache": FIRST_CACHE})
        assert ids is not None
        rows = FirstRows(*ids)
        await execute(connection, SUBSCRIBE_PROJECT, attrs.asdict(rows))
        await execute(connection, ENSURE_API_TOKEN, {"name": FIRST_TOKEN, "hash": admin_hash, "now": now})
        worker = {"project": rows.project, "hash": worker_hash, "now": now}
        await execute(connection, ENSURE_WORKER_REGISTRATION, worker)
    return rows


async def find_api_token(connection: Connection, token_hash: bytes) -> str | None:
    """The name of the API token with this hash; None when there is none or it was revoked."""
    name: str | None = await fetch_value(connection, FIND_API_TOKEN, {"hash": token_hash})
    return name


async def worker_registrations(connection: Connection) -> list[WorkerRegistration]:
    """Every active registration, oldest first: what a handshake challenges a worker with."""
    return await fetch_as(connection, WorkerRegistration, WORKER_REGISTRATIONS)
