"""Everything that can go wrong with a Nix daemon, by who has to act.

Layer: rank 1 (`nix.daemon`). `DaemonError` is the daemon's own answer; the others say that the daemon
is absent, gone, too old or does not speak the protocol.
"""

from __future__ import annotations

import re
from typing import Final

# Colours and cursor moves (CSI), and titles or links (OSC, ended by BEL or ST): Nix prints both into errors.
_ANSI: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]")


class DaemonFailure(Exception):
    """An operation on a Nix daemon did not succeed. The connection it ran on is closed."""


class DaemonError(DaemonFailure):
    """The daemon refused or failed the operation; `message` is its text without escape sequences."""

    def __init__(self, message: str) -> None:
        self.message = strip_ansi(message).strip()
        super().__init__(self.message)


class DaemonGone(DaemonFailure):
    """The daemon closed the connection or died in the middle. Trying again on a new one may work."""


class DaemonProtocolError(DaemonFailure):
    """The other end sent bytes that are not the Nix daemon protocol."""


class DaemonTooOld(DaemonFailure):
    """The daemon speaks a protocol older than 1.34: Nix 2.8 or newer is needed."""


class NixMissing(DaemonFailure):
    """No Nix daemon and no `nix-daemon` program was found where one was expected."""


class ConnectionUnusable(DaemonFailure):
    """The connection was closed, failed before, or is busy with another operation: take a new one."""


def strip_ansi(text: str) -> str:
    """`text` without terminal escape sequences."""
    return _ANSI.sub("", text)
