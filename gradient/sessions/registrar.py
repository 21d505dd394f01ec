"""Who may connect: the server's answers to the handshake. Layer: sessions.

Tokens are compared by their hashes in constant time and never logged.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from uuid import UUID

import attrs

from gradient.graph.access import WorkerRegistration, hash_token, worker_registrations
from gradient.graph.pg_pool import Pool
from gradient.passes.pool import WorkerPool
from gradient.wire.handshake import ALREADY_CONNECTED, FORBIDDEN
from gradient.wire.messages import Reject


@attrs.define(eq=False)
class Registrar:
    """Answers one handshake; keeps what the token was good for."""

    readers: Pool
    pool: WorkerPool
    _for_worker: list[WorkerRegistration] = attrs.field(factory=list, init=False)
    # Registrations whose token the worker proved.
    proven: list[WorkerRegistration] = attrs.field(factory=list, init=False)

    async def find_peers(self, worker_id: str) -> Sequence[str] | Reject:
        """The projects that registered this worker."""
        identity = UUID(worker_id)
        if any(worker.id == identity for worker in self.pool):
            return Reject(ALREADY_CONNECTED, "a worker with this id is connected already")
        async with self.readers.connection() as connection:
            known = await worker_registrations(connection)
        self._for_worker = [r for r in known if r.worker_id in (None, identity)]
        if not self._for_worker:
            return Reject(FORBIDDEN, "no project has registered this worker")
        return sorted({registration.project for registration in self._for_worker})

    async def check_tokens(self, worker_id: str, tokens: Mapping[str, str]) -> Mapping[str, str | None]:
        """For each project None, or why its token was refused."""
        verdicts: dict[str, str | None] = {}
        for project, token in tokens.items():
            good = [r for r in self._for_worker if r.project == project and _matches(r, token)]
            self.proven += good
            verdicts[project] = None if good else "wrong token"
        return verdicts


def _matches(registration: WorkerRegistration, token: str) -> bool:
    return hmac.compare_digest(hash_token(token), bytes(registration.token_hash))
