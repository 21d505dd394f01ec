"""Small files written whole or not at all, and secrets that nobody else can read.

Blocking: each call syncs to disk, some milliseconds. Async callers use a worker thread.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from gradient.settings.errors import InsecureSecret, SettingsError

SECRET_MODE: Final = 0o600
PUBLIC_MODE: Final = 0o644
# A key or a token is under a hundred bytes; a larger file is not one of ours.
MAX_SECRET: Final = 64 * 1024  # bytes


def write_secret(path: Path, text: str) -> None:
    """Make `path` hold `text`, readable by the owner only, before and after a crash."""
    write_atomically(path, text, mode=SECRET_MODE)


def write_atomically(path: Path, text: str, *, mode: int = PUBLIC_MODE) -> None:
    """Replace `path` by a synced file with `text` and `mode`. Raises OSError and leaves the old file.

    The file is new under a name of its own, so it never exists with a wider mode, and a symbolic link
    at `path` is replaced, not followed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, SECRET_MODE)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def read_secret(path: Path) -> str:
    """The text of a secret, without blanks around it.

    Raises InsecureSecret when everybody on this machine may read or write the file, SettingsError when
    it is no secret at all, and FileNotFoundError when there is none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_SECRET:
            raise SettingsError(f"{path}: not a secret: expected a file of at most {MAX_SECRET} bytes")
        if facts.st_mode & (stat.S_IROTH | stat.S_IWOTH):
            raise InsecureSecret(f"{path}: everybody on this machine can read it; run: chmod 600 {path}")
        data = os.read(descriptor, MAX_SECRET)
    finally:
        os.close(descriptor)
    try:
        text = data.decode("ascii").strip()
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: not a secret: expected text") from None
    # An empty token would let everybody in.
    if not text or not text.isprintable() or " " in text:
        raise SettingsError(f"{path}: not a secret: {'expected one word' if text else 'it is empty'}")
    return text


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
