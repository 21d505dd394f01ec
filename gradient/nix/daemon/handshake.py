"""The greeting: agree on a protocol version, learn the daemon's Nix version and whether it trusts us.

Layer: rank 1, pure. Both ends are here: the client speaks to a daemon, the server half is for our
proxy. A handshake is a generator like a decoder, which may also yield bytes to send. We offer no
protocol feature: without them every version from 1.34 to 1.38 has one form of each message.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

import attrs

from gradient.nix.daemon.errors import DaemonProtocolError, DaemonTooOld
from gradient.nix.daemon.primitives import Decoder, read_string, read_strings, read_u64, string, strings, u64

T = TypeVar("T")
# Yields a number of bytes to read, or bytes to send; is sent what was read, or b"".
Dialogue: TypeAlias = Generator[int | bytes, bytes, T]

MAJOR: Final = 1
# BuildPathsWithResults appeared in 1.34 (Nix 2.8).
OLDEST_MINOR: Final = 34
NEWEST_MINOR: Final = 38

_CLIENT_MAGIC: Final = 0x6E697863
_DAEMON_MAGIC: Final = 0x6478696F
_TRUST: Final = {0: None, 1: True, 2: False}
# Real daemons know fewer than ten features and Nix versions are short.
_MAX_FEATURES: Final = 256
_MAX_VERSION_TEXT: Final = 256


@attrs.frozen
class DaemonInfo:
    """What the daemon said of itself. `minor` is the agreed protocol's; `trusted` None is unknown."""

    minor: int
    nix_version: str
    trusted: bool | None


def greet_daemon(newest: int = NEWEST_MINOR) -> Dialogue[DaemonInfo]:
    """The client's half, up to the messages that end it (read those until `Last`).

    Raises `DaemonTooOld` below 1.34, `DaemonProtocolError` for anything that is not a Nix daemon.
    """
    yield u64(_CLIENT_MAGIC) + u64(_wire(newest))
    if (yield from read_u64()) != _DAEMON_MAGIC:
        raise DaemonProtocolError("the other end is not a Nix daemon: its greeting is wrong")
    minor = min(newest, (yield from _read_minor()))
    if minor < OLDEST_MINOR:
        raise DaemonTooOld(
            f"the Nix daemon speaks protocol {MAJOR}.{minor}, but {MAJOR}.{OLDEST_MINOR} is needed: "
            "install Nix 2.8 or newer"
        )
    if minor >= 38:
        yield strings(())
        yield from read_strings(_MAX_FEATURES)
    yield u64(0) + u64(0)  # CPU affinity and reserved space, both obsolete
    nix_version = yield from read_string(_MAX_VERSION_TEXT)
    trusted = (yield from _read_trust()) if minor >= 35 else None
    return DaemonInfo(minor, nix_version, trusted)


def greet_client(daemon_minor: int) -> Dialogue[int]:
    """The server's half, first part: say the version of the daemon behind, return the agreed minor.

    An old client says its own version only after it has read ours. Raises `DaemonTooOld`.
    """
    if (yield from read_u64()) != _CLIENT_MAGIC:
        raise DaemonProtocolError("the other end is not a Nix client: its greeting is wrong")
    yield u64(_DAEMON_MAGIC) + u64(_wire(daemon_minor))
    minor = min(daemon_minor, (yield from _read_minor()))
    if minor < OLDEST_MINOR:
        raise DaemonTooOld(f"the Nix client speaks protocol {MAJOR}.{minor}: Nix 2.8 or newer is needed")
    return minor


def introduce(info: DaemonInfo) -> Dialogue[None]:
    """The server's half, second part: in the agreed version, what the daemon behind said of itself.

    `Last` has to be sent after it.
    """
    if info.minor >= 38:
        yield from read_strings(_MAX_FEATURES)
        yield strings(())
    if (yield from read_u64()) != 0:
        yield from read_u64()  # the CPU to bind to, ignored by every daemon
    yield from read_u64()  # reserved space
    yield string(info.nix_version)
    if info.minor >= 35:
        yield u64({None: 0, True: 1, False: 2}[info.trusted])


def _wire(minor: int) -> int:
    return MAJOR << 8 | minor


def _read_minor() -> Decoder[int]:
    version = yield from read_u64()
    if version >> 8 != MAJOR:
        raise DaemonProtocolError(f"the other end speaks protocol {version >> 8}.{version & 0xFF}, not 1.x")
    return version & 0xFF


def _read_trust() -> Decoder[bool | None]:
    value = yield from read_u64()
    if value not in _TRUST:
        raise DaemonProtocolError(f"the daemon sent the unknown trust level {value}")
    return _TRUST[value]
