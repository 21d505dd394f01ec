"""Secrets: never readable by others, never half written; the layout of a data directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gradient.settings import (
    DataDir,
    InsecureSecret,
    SettingsError,
    default_data_dir,
    read_secret,
    write_atomically,
    write_secret,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_0600_whatever_the_umask_or_the_old_mode(tmp_path: Path) -> None:
    path = tmp_path / "admin-token"
    path.write_text("old")
    path.chmod(0o666)
    before = os.umask(0)
    try:
        write_secret(path, "token\n")
    finally:
        os.umask(before)
    assert mode(path) == 0o600
    assert read_secret(path) == "token"
    assert os.listdir(tmp_path) == ["admin-token"]


def test_a_public_file_is_0644_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "http-url", "http://127.0.0.1:3000\n")
    finally:
        os.umask(before)
    assert mode(tmp_path / "http-url") == 0o644


def test_the_file_never_exists_with_a_wider_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = os.fsync

    def watch(descriptor: int) -> None:
        seen.append([mode(path) for path in tmp_path.iterdir()])
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    write_secret(tmp_path / "key", "x")
    assert seen == [[0o600], [0o600]], "the file is synced before its rename, its folder after"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    write_secret(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_secret(path, "new")
    assert read_secret(path) == "old"
    assert os.listdir(tmp_path) == ["key"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    link = tmp_path / "key"
    link.symlink_to(target)
    write_secret(link, "secret")
    assert target.read_text() == "untouched"
    assert not link.is_symlink()


@pytest.mark.parametrize("bits", [0o604, 0o602, 0o644, 0o666])
def test_what_everybody_can_read_is_refused(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "key"
    path.write_text("x")
    path.chmod(bits)
    with pytest.raises(InsecureSecret, match="chmod 600"):
        read_secret(path)


def test_a_group_may_read_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("x")
    path.chmod(0o640)
    assert read_secret(path) == "x"


def test_what_is_no_secret_is_refused_without_reading_it(tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    huge.touch(0o600)
    os.truncate(huge, 2**40)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    binary.chmod(0o600)
    for path in (huge, pipe, tmp_path, binary):
        with pytest.raises(SettingsError, match="not a secret"):
            read_secret(path)
    with pytest.raises(FileNotFoundError):
        read_secret(tmp_path / "absent")


def test_the_data_directory() -> None:
    assert default_data_dir({"XDG_STATE_HOME": "/state", "HOME": "/h"}) == Path("/state/gradient")
    assert default_data_dir({"XDG_STATE_HOME": "state", "HOME": "/h"}) == Path("/h/.local/state/gradient")
    layout = DataDir(Path("/d"))
    paths = [getattr(layout, name) for name in dir(DataDir) if isinstance(getattr(DataDir, name), property)]
    assert len(set(paths)) == len(paths) == 11
    assert all(path.parent == Path("/d") for path in paths)
