"""Bare clones of the repositories that flakes come from: fetch, pin a commit, its facts.

Layer: worker, IO. One folder a URL below the data directory, no working tree: the source tree is read
straight from git's objects (`source_tree.py`). Several workers may share the folder; a file lock that
the git children inherit keeps them apart and goes with the last of them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import attrs
import trio

from gradient.worker.git_process import PROTOCOLS, Git, GitError

# Somebody else's fetch of the same URL takes seconds; asking four times a second costs nothing.
LOCK_RETRY: Final = 0.25  # seconds

_REV: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# What `git check-ref-format` forbids, and what has a meaning of its own in a refspec.
_BAD_REF: Final = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/$|^/|\.$|\.lock(/|$)|(^|/)\.|^-")


class NoSuchCommit(GitError):
    """The repository has no such branch, reference or commit."""


@attrs.frozen
class Commit:
    """A commit and what a flake can see of it: `last_modified` is the committer's time in epoch seconds.

    `rev_count` is the number of commits up to it, None where the history is cut (a shallow clone).
    """

    rev: str
    last_modified: int
    rev_count: int | None


@attrs.frozen
class Pinned:
    """A commit that the bare repository at `folder` holds with its whole tree."""

    folder: Path
    commit: Commit


@attrs.frozen
class GitCache:
    """The bare clones below `root`."""

    root: Path
    git: Git

    async def fetch(self, url: str, *, ref: str | None = None, rev: str | None = None) -> Pinned:
        """Make sure of a commit of the repository at `url`: `rev`, or what `ref`, else HEAD, names now.

        `ref` is a branch, or a whole name that begins with `refs/`. A `rev` that is held already costs
        no network; one that is not is fetched by its SHA, and with all branches and tags from a server
        that refuses this. Raises NoSuchCommit, or GitError for a bad URL or a fetch that failed.
        Cancelled, it ends git; what was fetched until then is dropped by git.
        """
        check_url(url)
        async with _exclusive(self._folder(url)) as (folder, lock):
            clone = _Clone(folder, self.git, lock)
            await clone.prepare()
            name = await (clone.by_rev(url, check_rev(rev)) if rev else clone.by_ref(url, full_ref(ref)))
            commit = await commit_facts(self.git, folder, name)
            await clone.pin(commit.rev)
        return Pinned(folder, commit)

    def _folder(self, url: str) -> Path:
        return self.root / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.git"


@attrs.frozen
class _Clone:
    """One bare repository, held exclusively: `lock` is the descriptor its children inherit."""

    folder: Path
    git: Git
    lock: int

    async def prepare(self) -> None:
        """Make it, or make it usable again after a crash: whoever held these lock files is gone."""
        await trio.to_thread.run_sync(_remove_stale_locks, self.folder)
        await self._run("init", "--bare", "--quiet", "--template=")

    async def by_ref(self, url: str, ref: str) -> str:
        """Fetch `ref` (a whole name, or HEAD); returns the name under which it is held here."""
        held = f"refs/gradient/ref/{hashlib.sha256(ref.encode()).hexdigest()[:16]}"
        try:
            await self._fetch(url, f"+{ref}:{held}")
        except GitError as error:
            if "couldn't find remote ref" in str(error):
                raise NoSuchCommit(f"{shown(url)} has no {ref.removeprefix('refs/heads/')}") from error
            raise
        return held

    async def by_rev(self, url: str, rev: str) -> str:
        """Fetch the commit `rev` unless it is held."""
        if await self._has(rev):
            return rev
        try:
            await self._fetch(url, f"+{rev}:refs/gradient/pin/{rev}")
        except GitError:  # either the server gives out no commits by SHA, or there is none: look at all
            await self._fetch(url, "+refs/heads/*:refs/gradient/heads/*", "+refs/tags/*:refs/gradient/tags/*")
        if not await self._has(rev):
            raise NoSuchCommit(f"{shown(url)} has no commit {rev}")
        return rev

    async def pin(self, rev: str) -> None:
        """Keep `rev` from git's garbage collection, whatever happens to its branch."""
        await self._run("update-ref", f"refs/gradient/pin/{rev}", rev)

    async def _has(self, rev: str) -> bool:
        try:
            await self._run("cat-file", "-e", f"{rev}^{{commit}}")
        except GitError:
            return False
        return True

    async def _fetch(self, url: str, *refspecs: str) -> None:
        # A local repository may itself be shallow; taking over where its history ends is then right.
        options = ("--quiet", "--no-tags", "--no-write-fetch-head", "--update-shallow")
        await self._run("fetch", *options, "--end-of-options", url, *refspecs)

    async def _run(self, *arguments: str) -> bytes:
        return await self.git.run(self.folder, *arguments, pass_fds=(self.lock,))


async def commit_facts(git: Git, folder: Path, name: str) -> Commit:
    """The commit that `name` (a full ref, HEAD or a rev) stands for in the repository at `folder`.

    Raises NoSuchCommit when it stands for none.
    """
    try:
        line = await git.run(
            folder,
            "log",
            "-1",
            "--no-show-signature",
            "--format=%H %ct",
            "--end-of-options",
            f"{name}^{{commit}}",
        )
    except GitError as error:
        raise NoSuchCommit(f"{name} is no commit: {error}") from error
    rev, last_modified = line.decode().split()
    shallow = (await git.run(folder, "rev-parse", "--is-shallow-repository")).strip() == b"true"
    count = None if shallow else int(await git.run(folder, "rev-list", "--count", "--end-of-options", rev))
    return Commit(rev, int(last_modified), count)


def check_url(url: str) -> str:
    """`url` if git may be given it. Raises GitError with a reason."""
    scheme = urlsplit(url).scheme
    if scheme not in PROTOCOLS or not url.startswith(f"{scheme}://"):
        raise GitError(
            f"cannot fetch {shown(url)}: a git URL begins with one of {', '.join(PROTOCOLS)} and ://"
        )
    if any(ord(mark) < 0x20 for mark in url):
        raise GitError(f"cannot fetch {shown(url)!r}: a URL holds no control characters")
    return url


def shown(url: str) -> str:
    """`url` as it may stand in a message: without user and password."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def check_rev(rev: str) -> str:
    """`rev` if it is a whole commit id. Raises GitError."""
    if not _REV.fullmatch(rev):
        raise GitError(f"not a commit: {rev!r}: expected 40 hexadecimal digits")
    return rev


def full_ref(ref: str | None) -> str:
    """The remote name that a flake reference's `ref` means. Raises GitError for what is no name."""
    if ref is None or ref == "HEAD":
        return "HEAD"
    if not ref or _BAD_REF.search(ref):
        raise GitError(f"not a branch or reference: {ref!r}")
    return ref if ref.startswith("refs/") else f"refs/heads/{ref}"


@asynccontextmanager
async def _exclusive(folder: Path) -> AsyncIterator[tuple[Path, int]]:
    """Make the folder and hold its lock, against this process and every other."""
    lock = _lock_file(folder)
    try:
        while not _try_lock(lock):  # noqa: ASYNC110 - another process may hold it: no event tells
            await trio.sleep(LOCK_RETRY)
        yield folder, lock
    finally:
        os.close(lock)


def _lock_file(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.open(folder / "gradient-in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _remove_stale_locks(folder: Path) -> None:
    for lock in [*folder.glob("*.lock"), *(folder / "refs").rglob("*.lock"), folder / "gc.pid"]:
        lock.unlink(missing_ok=True)
