"""Who this worker is: the id it keeps, its name, the server it belongs to, the token it shows. Layer: worker.

A worker on the server's host finds all of it in the data directory. Blocking: call from a worker thread.
"""

from __future__ import annotations

import socket
import uuid
from typing import Final

from gradient.settings import DataDir, Settings, SettingsError, read_secret, write_atomically

# An id or a URL; the files hold nothing else.
_MAX_LINE: Final = 4096  # characters


def worker_id(data: DataDir) -> str:
    """The UUID this worker is known by, made and kept at the first call. Raises OSError."""
    try:
        return str(uuid.UUID(data.worker_id.read_text()[:_MAX_LINE].strip()))
    except (FileNotFoundError, ValueError):
        pass
    data.root.mkdir(parents=True, exist_ok=True)
    made = str(uuid.uuid4())
    write_atomically(data.worker_id, f"{made}\n")
    return made


def worker_name(settings: Settings) -> str:
    """What people call this worker: the setting, else the host's name."""
    return settings.worker.name or socket.gethostname()


def server_url(settings: Settings) -> str:
    """The server's HTTP address: the setting, else that of a server which runs on this data directory,
    else where one would listen."""
    if settings.worker.server_url:
        return settings.worker.server_url.rstrip("/")
    try:
        return DataDir(settings.server.data_dir).http_url.read_text()[:_MAX_LINE].strip()
    except OSError:
        return settings.server.http.url()


def worker_token(settings: Settings) -> str:
    """The token to show. Raises SettingsError, in words, when there is none or others can read it."""
    file = settings.worker.token_file or DataDir(settings.server.data_dir).worker_token
    try:
        return read_secret(file).strip()
    except FileNotFoundError:
        raise SettingsError(
            f"{file}: there is no worker token: start the server on this host first, or name a file with "
            "its token (worker.tokenFile)"
        ) from None
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from error
