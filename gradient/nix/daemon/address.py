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
        return _neighbour(nix, environ)
    socket_path = environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET
    if await _answers(socket_path):
        return SocketAddress(socket_path)
    program = shutil.which("nix-daemon", path=environ.get("PATH"))
    if program is None:
        raise NixMissing(
            f"no Nix daemon answers on {socket_path} and there is no nix-daemon on PATH: "
            "install Nix 2.8 or newer, or name a nix binary"
        )
    return StdioAddress((program, "--stdio"))


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
