"""Who a worker is, which server it belongs to, which token it shows."""

from __future__ import annotations

import socket
import uuid
from pathlib import Path

import pytest

from gradient.settings import DataDir, InsecureSecret, Settings, SettingsError, load, write_secret
from gradient.worker.identity import server_url, worker_id, worker_name, worker_token


def settings(folder: Path, **flags: object) -> Settings:
    return load(environ={}, flags={"server.dataDir": folder, **flags})


def test_an_id_is_made_once_and_kept(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "new")
    first = worker_id(data)
    assert worker_id(data) == first == str(uuid.UUID(first))
    data.worker_id.write_text("no id")
    second = worker_id(data)
    assert second not in {first, "no id"}
    assert worker_id(data) == second


def test_the_server_is_the_one_that_was_named_or_that_runs_here_or_would(tmp_path: Path) -> None:
    assert server_url(settings(tmp_path)) == "http://127.0.0.1:3000"
    DataDir(tmp_path).http_url.write_text("http://127.0.0.1:4567\n")
    assert server_url(settings(tmp_path)) == "http://127.0.0.1:4567"
    named = settings(tmp_path, **{"worker.serverUrl": "https://ci.example.org/"})
    assert server_url(named) == "https://ci.example.org"


def test_a_worker_is_called_by_its_setting_or_its_host(tmp_path: Path) -> None:
    assert worker_name(settings(tmp_path)) == socket.gethostname()
    assert worker_name(settings(tmp_path, **{"worker.name": "big"})) == "big"


def test_the_token_is_the_servers_own_or_a_named_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no worker token"):
        worker_token(settings(tmp_path))
    write_secret(DataDir(tmp_path).worker_token, "local\n")
    assert worker_token(settings(tmp_path)) == "local"
    other = tmp_path / "other"
    write_secret(other, "named\n")
    named = settings(tmp_path, **{"worker.tokenFile": other})
    assert worker_token(named) == "named"
    other.chmod(0o644)
    with pytest.raises(InsecureSecret):
        worker_token(named)
