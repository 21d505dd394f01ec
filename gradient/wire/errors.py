"""Everything that can go wrong between server and worker, under one base. Pure.

Two questions decide the class: whose fault is it, and is the link still alive. A `ProtocolError`
says somebody broke the rules, a `LinkClosed` that there is nobody to talk to any more.
"""

from __future__ import annotations


class WireError(Exception):
    """Base of all errors of this package."""


class ProtocolError(WireError):
    """A message that the protocol does not allow."""


class LocalProtocolError(ProtocolError):
    """We tried to send something illegal: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something illegal: its link closes with 1002, everybody else's lives on."""


class ConnectFailed(WireError):
    """No link came about: refused, unknown host, TLS, no WebSocket there. Try again later."""


class LinkClosed(WireError):
    """The link is over. `code` is a WebSocket close code (docs/protocol.md), 1006 when nobody said
    goodbye; `reason` is in words, the peer's if it gave one."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"link closed ({self.code}{': ' + self.reason if self.reason else ''})"


class SendStalled(LinkClosed):
    """The peer took no byte for the stall limit; the link is dead and what was queued is lost."""


class HandshakeRefused(WireError):
    """The session did not come about. `code` is a reject code (docs/protocol.md), `reason` in words;
    `close_code` is how the link ends after it."""

    def __init__(self, code: int, reason: str, close_code: int = 1008) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason
        self.close_code = close_code

    def __str__(self) -> str:
        return f"handshake refused ({self.code}): {self.reason}"


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in a group that is no group itself."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
