"""Where objects lie: a local folder, or S3, GCS or Azure through obstore. Layer: nar, blocking IO.

Local files are ours rather than obstore's: its local store neither syncs nor adopts a finished file by
renaming it, and an object must be durable before a database row names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol
from uuid import uuid4

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import AzureStore, GCSStore, S3Store, from_url

from gradient.nar.durability import make_durable
from gradient.nar.errors import NoSuchObject, StoreUnavailable

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, RetryConfig

_READ_SIZE: Final = 2**19  # bytes; what one thread hop to the network is worth
# Keys are made by us; this only keeps a mistake from becoming a path outside the folder.
_KEY: Final = re.compile(r"[a-z0-9]+(/[A-Za-z0-9+_=-][A-Za-z0-9+._=-]*)+")
# A call runs in a thread that cannot be interrupted: it must give up by itself before a drain does.
_CLIENT: Final[ClientConfig] = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=30)}
_RETRIES: Final[RetryConfig] = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}


class Objects(Protocol):
    """Immutable objects by key. Every method blocks; StoreUnavailable means that nothing is known."""

    def adopt(self, file: Path, key: str) -> None:
        """Make the finished `file` the object, in one step for every reader; the file is gone after it."""

    def size(self, key: str) -> int:
        """Its size in bytes; raises NoSuchObject."""

    def read(self, key: str, start: int, stop: int | None) -> Generator[bytes, None, None]:
        """Its bytes from `start` to before `stop`; raises NoSuchObject at the first one."""

    def delete(self, key: str) -> None:
        """Remove it; one that is not there is no error."""

    def make_durable(self, keys: Collection[str]) -> None:
        """Return when these objects survive a power cut."""

    def signed_url(self, key: str, seconds: int) -> str | None:
        """A URL that lets anybody GET it for a while, where the store has such."""


class LocalObjects:
    """Objects as files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """Where the object lies or would lie."""
        return self.root / _checked(key)

    def adopt(self, file: Path, key: str) -> None:
        path = self.path(key)
        if path.exists():
            # A row may name the old object already: a power cut must leave the old one or the new one.
            make_durable(file.parent, (file,))
        try:
            file.replace(path)
        except FileNotFoundError:  # the first one in its folder
            path.parent.mkdir(parents=True, exist_ok=True)
            file.replace(path)

    def size(self, key: str) -> int:
        try:
            return self.path(key).stat().st_size
        except FileNotFoundError:
            raise _no_such(key) from None

    def read(self, key: str, start: int, stop: int | None) -> Generator[bytes, None, None]:
        try:
            file = FileIO(self.path(key))
        except FileNotFoundError:
            raise _no_such(key) from None
        with file:
            file.seek(start)
            left = file_size(file) - start if stop is None else stop - start
            while left > 0 and (chunk := file.read(min(left, _READ_SIZE))):
                left -= len(chunk)
                yield chunk

    def delete(self, key: str) -> None:
        self.path(key).unlink(missing_ok=True)

    def make_durable(self, keys: Collection[str]) -> None:
        make_durable(self.root, [self.path(key) for key in keys])

    def signed_url(self, key: str, seconds: int) -> str | None:
        return None


class RemoteObjects:
    """Objects in S3, GCS or Azure. What these have acknowledged is durable."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        client: ClientConfig = {**_CLIENT, "allow_http": options.get("endpoint", "").startswith("http://")}
        try:
            # Which of the stores' configurations `options` is, only the URL tells.
            self._store = from_url(url, config=dict(options), client_options=client, retry_config=_RETRIES)  # type: ignore[call-overload]
        except (BaseError, ValueError) as error:
            raise StoreUnavailable(f"{url} is no object store that could be used: {error}") from error

    def adopt(self, file: Path, key: str) -> None:
        with _errors(key):
            obstore.put(self._store, _checked(key), file)
        file.unlink()

    def size(self, key: str) -> int:
        with _errors(key):
            return obstore.head(self._store, _checked(key))["size"]

    def read(self, key: str, start: int, stop: int | None) -> Generator[bytes, None, None]:
        options: GetOptions = {"range": {"offset": start} if stop is None else (start, stop)}
        with _errors(key):
            result = obstore.get(self._store, _checked(key), options=options)
            for chunk in result.stream(_READ_SIZE):
                yield bytes(chunk)

    def delete(self, key: str) -> None:
        with suppress(NoSuchObject), _errors(key):
            obstore.delete(self._store, _checked(key))

    def make_durable(self, keys: Collection[str]) -> None:
        pass

    def signed_url(self, key: str, seconds: int) -> str | None:
        if not isinstance(self._store, S3Store | GCSStore | AzureStore):
            return None
        with _errors(key):
            return obstore.sign(self._store, "GET", _checked(key), timedelta(seconds=seconds))


class Spool:
    """A folder for files in the making, on the file system of the local objects."""

    def __init__(self, folder: Path) -> None:
        """Removes what an earlier process left: there is one server per data directory."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():
            leftover.unlink()

    @contextmanager
    def file(self) -> Iterator[FileIO]:
        """A new file to write; removed at the end unless a store adopted it."""
        path = self._folder / uuid4().hex
        try:
            with FileIO(path, "x") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)


def file_size(file: FileIO) -> int:
    """The size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of `data`, which one unbuffered write need not do."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


@contextmanager
def _errors(subject: str) -> Iterator[None]:
    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        raise _no_such(subject) from error
    except (BaseError, OSError) as error:
        raise StoreUnavailable(f"the object store failed at {subject}: {error}") from error


def _no_such(key: str) -> NoSuchObject:
    return NoSuchObject(f"the store has no object {key}")


def _checked(key: str) -> str:
    if _KEY.fullmatch(key) is None:
        raise ValueError(f"{key!r} is no key of an object")
    return key
