"""Where a Nix daemon is, and which one to use. Layer: rank 1.

A daemon is reached through its Unix socket, or is a child of ours that speaks on its standard input
and output (`nix-daemon --stdio`), for machines where none runs and for a Nix named by the user.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import trio

from gradient.nix.daemon.errors import NixMissing

DEFAULT_SOCKET: Final = "/nix/var/nix/daemon-socket/socket"
# Nix itself reads this name, for a daemon that listens elsewhere.
SOCKET_VARIABLE: Final = "NIX_DAEMON_SOCKET_PATH"

# The store's own files, where only its owner writes; and a store that is elsewhere altogether.
DEFAULT_STATE: Final = "/nix/var/nix"
STATE_VARIABLE: Final = "NIX_STATE_DIR"
REMOTE_VARIABLE: Final = "NIX_REMOTE"


@attrs.frozen
class SocketAddress:
    """A daemon that listens on the Unix socket `path`."""

    path: str


@attrs.frozen
class StdioAddress:
    """A daemon to start as a child, one for each connection: `argv[0]` is a path or a name on PATH."""

    argv: tuple[str, ...]


DaemonAddress: TypeAlias = SocketAddress | StdioAddress


async def find_daemon(nix: str | None = None, environ: Mapping[str, str] = os.environ) -> DaemonAddress:
    """The daemon to use. Raises `NixMissing` with words for the user.

    Given an explicit `nix` binary, always its neighbour `nix-daemon` as a child. Otherwise the socket
    if something accepts connections there, else `nix-daemon` of PATH as a child.
    """
    if nix is not None:
        child = _neighbour(nix, environ)
        _check_rights(environ, f"{child.argv[0]} is started as this user")
        return child
    socket_path = environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET
    if await _answers(socket_path):
        return SocketAddress(socket_path)
    program = shutil.which("nix-daemon", path=environ.get("PATH"))
    if program is None:
        raise NixMissing(
            f"no Nix daemon answers on {socket_path} and there is no nix-daemon on PATH: "
            "install Nix 2.8 or newer, or name a nix binary"
        )
    _check_rights(environ, f"no Nix daemon lets this user connect to {socket_path}")
    return StdioAddress((program, "--stdio"))


def _check_rights(environ: Mapping[str, str], why: str) -> None:
    """A daemon of our own needs the rights that the Nix store asks for; it would say so in its own terms."""
    database = Path(environ.get(STATE_VARIABLE) or DEFAULT_STATE, "db")
    if database.exists() and not os.access(database, os.W_OK) and not environ.get(REMOTE_VARIABLE):
        raise NixMissing(
            f"{why}, who may not write to the Nix store ({database}): start the nix-daemon service and let "
            "this user connect to it, or run this as the owner of the store"
        )


def _neighbour(nix: str, environ: Mapping[str, str]) -> StdioAddress:
    binary = shutil.which(nix, path=environ.get("PATH"))
    if binary is None:
        raise NixMissing(f"{nix} is not a program that can be run")
    # Beside the name as given first: the binary behind a symlink may have other neighbours.
    for folder in (Path(binary).absolute().parent, Path(binary).resolve().parent):
        program = folder / "nix-daemon"
        if os.access(program, os.X_OK):
            return StdioAddress((str(program), "--stdio"))
    raise NixMissing(f"{nix} has no nix-daemon beside it")


async def _answers(socket_path: str) -> bool:
    try:
        stream = await trio.open_unix_socket(socket_path)
    except OSError:
        return False
    await stream.aclose()
    return True
