"""The server's own files: made once, kept, and refused in one line when they are not what they were."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gradient.server_files import DataDirUnusable, DataTooNew, prepare_data_dir
from gradient.settings import DataDir, SettingsError

SECRETS = ("admin-token", "worker-token", "signing-key", "grant-secret")


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    return DataDir(tmp_path / "data")


def test_secrets_are_made_once_and_kept(data: DataDir) -> None:
    first, second = prepare_data_dir(data), prepare_data_dir(data)
    assert first.admin_token == second.admin_token
    assert first.worker_token == second.worker_token
    assert first.signing_key.text() == second.signing_key.text()
    assert second.grants.check(first.grants.issue("upload", "x", 10), "upload", 0) == "x"
    for name in SECRETS:
        assert stat.S_IMODE((data.root / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["signing-key", "grant-secret"])
@pytest.mark.parametrize("text", ["garbage", "a:b", "zz", "00"])
def test_a_damaged_secret_is_named_and_not_shown(data: DataDir, name: str, text: str) -> None:
    prepare_data_dir(data)
    (data.root / name).write_text(text)
    with pytest.raises(DataDirUnusable) as refused:
        prepare_data_dir(data)
    said = str(refused.value)
    assert said == f"{data.root / name} is damaged: restore it, or remove it to have a new one made"


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("text", [b"", b"\n", b" \n", b"two words", b"two\nlines", b"\xff", "ü".encode()])
def test_what_is_no_secret_is_refused(data: DataDir, name: str, text: bytes) -> None:
    """An empty token would let everybody in."""
    prepare_data_dir(data)
    (data.root / name).write_bytes(text)
    with pytest.raises(SettingsError, match="not a secret"):
        prepare_data_dir(data)


@pytest.mark.parametrize("text", [b"", b"garbage", b"\xff\xfe", "²".encode(), b"-1", b"1.0"])
def test_a_version_that_is_none_is_refused(data: DataDir, text: bytes) -> None:
    prepare_data_dir(data)
    data.version.write_bytes(text)
    with pytest.raises(DataDirUnusable, match="does not hold a number"):
        prepare_data_dir(data)


@pytest.mark.parametrize("text", ["2", "9" * 10_000])
def test_a_newer_version_is_not_touched(data: DataDir, text: str) -> None:
    data.root.mkdir()
    data.version.write_text(text)
    with pytest.raises(DataTooNew):
        prepare_data_dir(data)
    assert os.listdir(data.root) == ["version"]


def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    data = DataDir(tmp_path / os.fsdecode(b"d\xff"))
    with pytest.raises(DataDirUnusable, match="its name is not UTF-8") as refused:
        prepare_data_dir(data)
    str(refused.value).encode()
    assert os.listdir(tmp_path) == []
