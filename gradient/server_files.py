"""The server's own files: made on the first start, checked on every start. Layer: rank 6, blocking.

Secrets are files of mode 0600 in the data directory. A data directory of a newer version is refused
before anything in it is touched.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import attrs

from gradient.graph.access import new_token
from gradient.nar.errors import InvalidKey
from gradient.nar.grants import Grants
from gradient.nar.signing import SecretKey
from gradient.settings.data_dir import DataDir
from gradient.settings.secrets import read_secret, write_atomically, write_secret

# The layout of the data directory that this program writes; a higher number on disk is refused.
DATA_VERSION: Final = 1
# Bytes of the key behind upload grants.
GRANT_SECRET: Final = 32
MAX_VERSION: Final = 100  # bytes

T = TypeVar("T")


class DataDirUnusable(Exception):
    """The data directory cannot be used."""


class DataTooNew(DataDirUnusable):
    """The data directory was written by a newer Gradient."""


@attrs.frozen
class ServerFiles:
    """What the files say. The signing key's name is what clients see in `trusted-public-keys`."""

    admin_token: str = attrs.field(repr=False)
    worker_token: str = attrs.field(repr=False)
    signing_key: SecretKey = attrs.field(repr=False)
    grants: Grants = attrs.field(repr=False)


def prepare_data_dir(data: DataDir, key_name: str = "gradient-1") -> ServerFiles:
    """Make what is missing and read the rest. Raises DataDirUnusable and SettingsError in one line."""
    try:
        _check_name(data)
        data.root.mkdir(parents=True, exist_ok=True)
        _check_version(data)
        return ServerFiles(
            admin_token=_secret(data.admin_token, new_token, str),
            worker_token=_secret(data.worker_token, new_token, str),
            signing_key=_secret(
                data.signing_key, lambda: SecretKey.generate(key_name).text(), SecretKey.parse
            ),
            grants=_secret(
                data.grant_secret,
                lambda: secrets.token_hex(GRANT_SECRET),
                lambda text: Grants(bytes.fromhex(text)),
            ),
        )
    except OSError as error:
        raise DataDirUnusable(f"cannot use the data directory {data.root}: {error.strerror}") from error


def _check_name(data: DataDir) -> None:
    """PostgreSQL is told the place of its socket in UTF-8."""
    try:
        str(data.root).encode()
    except UnicodeEncodeError:
        raise DataDirUnusable(
            f"cannot use the data directory {str(data.root)!r}: its name is not UTF-8"
        ) from None


def _check_version(data: DataDir) -> None:
    try:
        text = data.version.read_bytes()[:MAX_VERSION].strip()
    except FileNotFoundError:
        write_atomically(data.version, f"{DATA_VERSION}\n")
        return
    if not text.isdigit():
        raise DataDirUnusable(
            f"{data.version} does not hold a number: this is no data directory of Gradient's"
        )
    if int(text) > DATA_VERSION:
        raise DataTooNew(
            f"{data.root} was written by a newer Gradient (data version {int(text)}, this one knows"
            f" {DATA_VERSION}): use the newer program, or another --data-dir"
        )


def _secret(path: Path, make: Callable[[], str], parse: Callable[[str], T]) -> T:
    if not path.exists():
        write_secret(path, make() + "\n")
    text = read_secret(path)
    try:
        return parse(text)
    except (InvalidKey, ValueError):
        # Not what was wrong with it: that could tell a part of it.
        raise DataDirUnusable(f"{path} is damaged: restore it, or remove it to have a new one made") from None
