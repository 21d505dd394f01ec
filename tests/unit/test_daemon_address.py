"""Which daemon is chosen: the neighbour of a named nix, a socket that answers, or a child from PATH."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gradient.nix.daemon.address import SocketAddress, StdioAddress, find_daemon
from gradient.nix.daemon.connection import connect
from gradient.nix.daemon.errors import DaemonGone, NixMissing


def program(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\necho 'error: the store is on fire' >&2; exit 1\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": str(tmp_path / "bin"), "NIX_DAEMON_SOCKET_PATH": str(tmp_path / "socket")}


async def test_a_named_nix_means_its_neighbour(tmp_path: Path, environ: dict[str, str]) -> None:
    nix, daemon = program(tmp_path / "bin", "nix"), program(tmp_path / "bin", "nix-daemon")
    expected = StdioAddress((str(daemon), "--stdio"))
    assert await find_daemon(str(nix), environ) == expected
    assert await find_daemon("nix", environ) == expected


async def test_a_linked_nix_may_have_its_neighbour_behind_the_link(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    nix, daemon = program(tmp_path / "store", "nix"), program(tmp_path / "store", "nix-daemon")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nix").symlink_to(nix)
    assert await find_daemon("nix", environ) == StdioAddress((str(daemon), "--stdio"))


async def test_a_socket_that_answers_comes_first(tmp_path: Path, environ: dict[str, str]) -> None:
    daemon = program(tmp_path / "bin", "nix-daemon")
    path = environ["NIX_DAEMON_SOCKET_PATH"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        assert await find_daemon(None, environ) == SocketAddress(path)
    # Its file is still there, but nobody answers.
    assert await find_daemon(None, environ) == StdioAddress((str(daemon), "--stdio"))


async def test_no_nix_is_said_in_clear_words(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(NixMissing, match=r"install Nix 2\.8 or newer"):
        await find_daemon(None, environ)
    with pytest.raises(NixMissing, match="is not a program"):
        await find_daemon(str(tmp_path / "nix"), environ)
    with pytest.raises(NixMissing, match="no nix-daemon beside it"):
        await find_daemon(str(program(tmp_path / "bin", "nix")), environ)
    with pytest.raises(NixMissing, match="cannot be started"):
        await connect(StdioAddress((str(tmp_path / "nix-daemon"), "--stdio")))
    with pytest.raises(NixMissing, match="can be reached"):
        await connect(SocketAddress(str(tmp_path / "socket")))


async def test_a_store_of_somebody_else_is_said_in_clear_words(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nix, daemon = program(tmp_path / "bin", "nix"), program(tmp_path / "bin", "nix-daemon")
    (tmp_path / "state" / "db").mkdir(parents=True)
    environ |= {"NIX_STATE_DIR": str(tmp_path / "state")}
    assert await find_daemon(None, environ) == StdioAddress((str(daemon), "--stdio"))
    access = os.access  # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    for named in (None, str(nix)):
        with pytest.raises(NixMissing, match="who may not write to the Nix store"):
            await find_daemon(named, environ)
    assert await find_daemon(None, environ | {"NIX_REMOTE": "/elsewhere"})


async def test_the_last_words_of_a_child_are_quoted(tmp_path: Path) -> None:
    daemon = program(tmp_path / "bin", "nix-daemon")
    with pytest.raises(DaemonGone, match="error: the store is on fire"):
        await connect(StdioAddress((str(daemon), "--stdio")))
