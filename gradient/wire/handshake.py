"""Who is there, which version, which projects: both ends of the handshake as generators. Pure.

A side yields what it needs (`Send`, `Receive`, on the server also `FindPeers` and `CheckTokens`) and is
sent the answer; it returns `Established` or raises `HandshakeRefused`. So the sequence reads from top
to bottom, a test drives it without a socket, and token hashing and the database live elsewhere.
`greeting.py` is the driver on a link. Source: "Handshake" in docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar
from uuid import UUID

import attrs

from gradient.wire.codec import Message
from gradient.wire.errors import HandshakeRefused
from gradient.wire.messages import (
    PROTOCOL_NEWEST,
    PROTOCOL_OLDEST,
    AuthChallenge,
    AuthResponse,
    Capabilities,
    FailedPeer,
    InitAck,
    InitConnection,
    PeerToken,
    Reject,
)

MALFORMED: Final = 400
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
NO_CACHE: Final = 495
ALREADY_CONNECTED: Final = 496

# A host name; a longer one would not fit into a row of a table.
MAX_NAME: Final = 64  # characters

# The peer name of a token that serves every challenged peer without a token of its own.
ANY_PEER: Final = "*"

M = TypeVar("M", bound=Message)


@attrs.frozen
class Versions:
    """The protocol versions one end speaks, both ends included."""

    oldest: int = PROTOCOL_OLDEST
    newest: int = PROTOCOL_NEWEST

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"


OURS: Final = Versions()


@attrs.frozen
class Established:
    """A session that stands. On the server `capabilities` is what the worker may be used for."""

    version: int
    worker_id: str
    capabilities: Capabilities
    authorized_peers: tuple[str, ...]
    failed_peers: tuple[FailedPeer, ...]
    # The worker's, fit for a line of text; "" when it has none.
    name: str = ""


@attrs.frozen
class Send:
    """Send this; the answer is None."""

    message: Message


@attrs.frozen
class Receive:
    """The answer is the peer's next message."""


@attrs.frozen
class FindPeers:
    """Which peers registered this worker? The answer is their names, or a `Reject` that says why it
    may not connect at all (unknown, deactivated, connected already, no cache)."""

    worker_id: str


@attrs.frozen
class CheckTokens:
    """Are these the tokens of those peers? The answer maps each peer to None, or to why not.

    `tokens` holds challenged peers only; a peer the worker had no token for is not in it.
    """

    worker_id: str
    tokens: Mapping[str, str] = attrs.field(repr=False)


Step: TypeAlias = Send | Receive | FindPeers | CheckTokens


def agree(ours: Versions, theirs: Versions) -> int | None:
    """The version both speak: the smaller newest. None where the ranges do not meet."""
    version = min(ours.newest, theirs.newest)
    return version if version >= max(ours.oldest, theirs.oldest) else None


def server_side(
    granted: Capabilities, *, accepting: bool = True, versions: Versions = OURS
) -> Generator[Step, Any, Established]:
    """The server's end. `granted` is what this server lets a worker do; `accepting` False refuses
    everybody with 403 (draining). One valid peer keeps the session."""
    init = _expect(InitConnection, (yield Receive()))
    version = _agreed_version(versions, Versions(init.oldest, init.newest))
    worker_id = _checked_worker_id(init.worker_id)
    if not accepting:
        raise HandshakeRefused(FORBIDDEN, "the server is stopping and takes no workers")
    peers = yield FindPeers(worker_id)
    if isinstance(peers, Reject):
        raise HandshakeRefused(peers.code, peers.reason)
    yield Send(AuthChallenge(version, tuple(peers)))
    response = _expect(AuthResponse, (yield Receive()))
    verdicts = yield CheckTokens(worker_id, _tokens_for(peers, response.tokens))
    authorized, failed = _sorted_verdicts(peers, verdicts)
    if not authorized:
        raise HandshakeRefused(UNAUTHORIZED, _no_valid_token(failed))
    capabilities = _both(granted, init.capabilities)
    session = Established(version, worker_id, capabilities, authorized, failed, _fit_name(init.name))
    yield Send(InitAck(session.capabilities, authorized, failed))
    return session


def worker_side(
    worker_id: str,
    capabilities: Capabilities,
    tokens: Sequence[PeerToken],
    *,
    name: str = "",
    versions: Versions = OURS,
) -> Generator[Step, Any, Established]:
    """The worker's end. Of `tokens` only those of challenged peers leave this machine."""
    yield Send(InitConnection(versions.oldest, versions.newest, worker_id, capabilities, name))
    challenge = _expect(AuthChallenge, _unless_rejected((yield Receive())))
    _agreed_version(versions, Versions(challenge.version, challenge.version))
    ours = _tokens_for(challenge.peers, tokens)
    yield Send(AuthResponse(tuple(PeerToken(peer, token) for peer, token in ours.items())))
    ack = _expect(InitAck, _unless_rejected((yield Receive())))
    return Established(
        challenge.version,
        worker_id,
        _both(capabilities, ack.capabilities),
        ack.authorized_peers,
        ack.failed_peers,
        name,
    )


def _expect(wanted: type[M], message: Message) -> M:
    if not isinstance(message, wanted):
        raise HandshakeRefused(
            MALFORMED, f"expected {wanted.__name__}, not {type(message).__name__}", close_code=1002
        )
    return message


def _unless_rejected(message: Message) -> Message:
    if isinstance(message, Reject):
        raise HandshakeRefused(message.code, message.reason)
    return message


def _agreed_version(ours: Versions, theirs: Versions) -> int:
    version = agree(ours, theirs)
    if version is None:
        raise HandshakeRefused(
            MALFORMED,
            f"no common protocol version: this end speaks {ours}, the other {theirs}",
            close_code=1002,
        )
    return version


def _checked_worker_id(text: str) -> str:
    """The id in its one canonical spelling, so that two spellings are not two workers."""
    try:
        return str(UUID(text))
    except ValueError:
        raise HandshakeRefused(MALFORMED, "the worker id is not a UUID") from None


def _fit_name(name: str) -> str:
    """A name decides nothing, so a bad one is mended and not refused."""
    return "".join(filter(str.isprintable, name))[:MAX_NAME].strip()


def _tokens_for(peers: Sequence[str], tokens: Sequence[PeerToken]) -> dict[str, str]:
    by_peer = {entry.peer: entry.token for entry in tokens}
    fallback = by_peer.get(ANY_PEER)
    found = {peer: by_peer.get(peer, fallback) for peer in peers}
    return {peer: token for peer, token in found.items() if token is not None}


def _sorted_verdicts(
    peers: Sequence[str], verdicts: Mapping[str, str | None]
) -> tuple[tuple[str, ...], tuple[FailedPeer, ...]]:
    """Authorized and failed peers; a peer without a verdict had no token, which is a failure."""
    why = {peer: verdicts.get(peer, "the worker has no token for it") for peer in peers}
    authorized = tuple(peer for peer, reason in why.items() if reason is None)
    failed = tuple(FailedPeer(peer, reason) for peer, reason in why.items() if reason is not None)
    return authorized, failed


def _no_valid_token(failed: Sequence[FailedPeer]) -> str:
    if not failed:
        return "no project has registered this worker"
    return "no valid token: " + "; ".join(f"{entry.peer}: {entry.reason}" for entry in failed)


def _both(granted: Capabilities, asked: Capabilities) -> Capabilities:
    return Capabilities(
        fetch=granted.fetch and asked.fetch,
        eval=granted.eval and asked.eval,
        build=granted.build and asked.build,
    )
