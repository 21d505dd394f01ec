"""The source of a flake as a tree: a commit, a working tree with its changes, or a plain folder.

Layer: worker, IO. The trees are those that Nix makes of the same reference, so that store paths agree
with `nix flake prefetch`. A commit's files are git's blobs as they are: current Nix does the same,
while Nix 2.8 lets `git archive` apply `.gitattributes` (export-ignore, export-subst, line endings).
"""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final, TypeAlias

import attrs
import trio

from gradient.nar.errors import UnsupportedTree
from gradient.nar.files import read_tree
from gradient.nar.tree import Directory, Node, Regular, Symlink
from gradient.worker.git_process import Git, GitError
from gradient.worker.git_repo import Commit, NoSuchCommit, commit_facts

# One read of a blob; small ones come in one piece.
READ_SIZE: Final = 2**20  # bytes
# PATH_MAX of the kernels we run on: no file system holds a longer target.
MAX_SYMLINK: Final = 4096  # bytes

_EXECUTE: Final = 0o111


class NoFlake(Exception):
    """There is no flake at a local path."""


@attrs.frozen
class Source:
    """A flake's source. `tree` is read once, lazily, in a worker thread.

    What a flake can see of it: `rev` and `rev_count` only when every tracked file is as committed,
    `last_modified` in epoch seconds. `dir` is the folder of `flake.nix` below the tree, "" for its top.
    """

    tree: Node
    last_modified: int
    rev: str | None = None
    rev_count: int | None = None
    dir: str = ""


async def commit_source(git: Git, folder: Path, commit: Commit, *, dir: str = "") -> Source:
    """The tree of a commit that the repository at `folder` holds. Raises GitError."""
    tree = await commit_tree(git, folder, commit.rev)
    return Source(tree, commit.last_modified, commit.rev, commit.rev_count, dir)


async def local_source(git: Git, path: Path) -> Source:
    """The flake at a local path, as `nix build PATH` sees it.

    `flake.nix` is looked for at `path` and above it. In a git repository the source is the repository,
    with the content its tracked files have now: committed when nothing changed, else from the working
    tree, staged files included and deleted ones left out. Elsewhere it is the whole folder.
    Raises NoFlake, GitError, OSError.
    """
    flake, top = await trio.to_thread.run_sync(_locate, path)
    if top is None:
        return await folder_source(flake)
    below = flake.relative_to(top).as_posix()
    return await _repository_source(git, top, "" if below == "." else below)


async def folder_source(path: Path) -> Source:
    """A whole folder, as `path:` means it: `last_modified` is the newest time in it."""
    newest = await trio.to_thread.run_sync(_newest, path)
    return Source(await trio.to_thread.run_sync(read_tree, path), newest)


async def _repository_source(git: Git, top: Path, dir: str) -> Source:
    head = await _head(git, top)
    tracked = (await git.run(top, "ls-files", "-z", "--cached")).split(b"\0")[:-1]
    if os.fsencode(os.path.join(dir, "flake.nix")) not in tracked:
        raise NoFlake(f"{top / dir}/flake.nix is not tracked by git; run: git -C {top / dir} add flake.nix")
    changed = await git.run(
        top, "status", "--porcelain", "-z", "--untracked-files=no", "--ignore-submodules=all"
    )
    if head is not None and not changed:
        return await commit_source(git, top, head, dir=dir)
    tree = await trio.to_thread.run_sync(_working_tree, top, tracked)
    return Source(tree, head.last_modified if head else 0, dir=dir)


async def _head(git: Git, top: Path) -> Commit | None:
    """The commit that is checked out, None before the first one."""
    try:
        return await commit_facts(git, top, "HEAD")
    except NoSuchCommit:
        await git.run(top, "symbolic-ref", "-q", "HEAD")  # fails, and says why, if this is no repository
        return None


def _locate(path: Path) -> tuple[Path, Path | None]:
    """The folder of the `flake.nix` for `path`, and the top of the repository around it, if any."""
    start = path.resolve()
    if not start.exists():
        raise NoFlake(f"there is no {path}")
    for folder in (start, *start.parents):
        if (folder / "flake.nix").exists():
            return folder, next((above for above in (folder, *folder.parents) if _is_top(above)), None)
        if _is_top(folder):
            break
    raise NoFlake(f"no flake.nix in {path}, nor in a folder above it within its repository")


def _is_top(folder: Path) -> bool:
    return (folder / ".git").exists()


def _newest(path: Path) -> int:
    newest = path.lstat().st_mtime
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            newest = max(newest, os.lstat(os.path.join(folder, name)).st_mtime)
    return int(newest)


# --- names to trees -------------------------------------------------------------------------------

# Leaves by path, as nested tables in any order; a leaf is whatever makes its node.
Table: TypeAlias = "dict[bytes, Table | Leaf]"


@attrs.frozen
class Leaf:
    """A file, symlink or submodule of a tree, by its path below the top."""

    path: bytes
    mode: int = 0
    oid: bytes = b""


def _nested(leaves: Iterable[Leaf]) -> Table:
    """The leaves as nested tables. Raises UnsupportedTree when one path lies below another's leaf."""
    root: Table = {}
    for leaf in leaves:
        *folders, name = leaf.path.split(b"/")
        table = root
        for folder in folders:
            inner = table.setdefault(folder, {})
            if isinstance(inner, Leaf):
                raise UnsupportedTree(f"{inner.path!r} is a file and a folder at once")
            table = inner
        if name in table:
            raise UnsupportedTree(f"{leaf.path!r} is there twice")
        table[name] = leaf
    return root


def _in_order(table: Table) -> Iterator[Leaf]:
    """The leaves in the order in which a NAR writer asks for them."""
    for _, child in sorted(table.items()):
        if isinstance(child, Leaf):
            yield child
        else:
            yield from _in_order(child)


def _directory(table: Table, node: Callable[[Leaf], Node]) -> Directory:
    """The table as a directory, sorted by the bytes of its names (git sorts folders as `name/`)."""
    return Directory(
        (name, node(child) if isinstance(child, Leaf) else _directory(child, node))
        for name, child in sorted(table.items())
    )


# --- a working tree -------------------------------------------------------------------------------


def _working_tree(top: Path, names: Iterable[bytes]) -> Directory:
    """The tracked files that are there. Folders with none left are left out, and so are submodules."""
    there = _Presence(os.fsencode(top))
    table = _nested(Leaf(name) for name in dict.fromkeys(names) if there.is_file(name))
    return _directory(table, lambda leaf: read_tree(top / os.fsdecode(leaf.path)))


@attrs.define(eq=False)
class _Presence:
    """Which tracked names are files of the working tree, reached through real folders only."""

    top: bytes
    _folders: dict[bytes, bool] = attrs.field(factory=lambda: {b"": True}, init=False)

    def is_file(self, name: bytes) -> bool:
        """Whether a file or symlink is there; a folder in its place is a submodule or was swapped."""
        mode = self._mode(name) if self._is_folder(os.path.dirname(name)) else 0
        return mode != 0 and not stat.S_ISDIR(mode)

    def _is_folder(self, name: bytes) -> bool:
        if name not in self._folders:
            real = self._is_folder(os.path.dirname(name)) and stat.S_ISDIR(self._mode(name))
            self._folders[name] = real
        return self._folders[name]

    def _mode(self, name: bytes) -> int:
        try:
            return os.lstat(os.path.join(self.top, name)).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0


# --- a commit -------------------------------------------------------------------------------------


async def commit_tree(git: Git, folder: Path, rev: str) -> Directory:
    """The tree of the commit `rev` of the repository at `folder`; its blobs are read as it is iterated.

    Iterate it once, in order, in a worker thread: one `git cat-file` delivers the blobs in exactly the
    order of a NAR, and is ended when the iteration ends or is given up.
    """
    listed = await git.run(folder, "ls-tree", "-r", "-z", "--full-tree", "--end-of-options", rev)
    table = await trio.to_thread.run_sync(lambda: _nested(map(_leaf, listed.split(b"\0")[:-1])))
    return Directory(_read_commit(git, folder, table))


def _leaf(line: bytes) -> Leaf:
    """`MODE TYPE OID<tab>PATH`"""
    facts, _, path = line.partition(b"\t")
    mode, _, oid = facts.split(b" ")
    return Leaf(path, int(mode, 8), oid)


def _read_commit(git: Git, folder: Path, table: Table) -> Iterator[tuple[bytes, Node]]:
    wanted = [leaf.oid for leaf in _in_order(table) if not _is_submodule(leaf)]
    with _Blobs(git, folder, wanted) as blobs:
        yield from _directory(table, blobs.node).entries


def _is_submodule(leaf: Leaf) -> bool:
    return stat.S_IFMT(leaf.mode) == 0o160000


class _Blobs:
    """A `git cat-file --batch` that is asked for all blobs at once and answers in that order.

    It reads the questions from a file, so neither side can block the other.
    """

    def __init__(self, git: Git, folder: Path, oids: Sequence[bytes]) -> None:
        with tempfile.TemporaryFile() as questions:
            questions.write(b"".join(oid + b"\n" for oid in oids))
            questions.seek(0)
            self._process = subprocess.Popen(
                ["git", "cat-file", "--batch", "--buffer"],
                stdin=questions,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=dict(git.environment),
            )
        assert self._process.stdout is not None
        self._answers: IO[bytes] = self._process.stdout

    def __enter__(self) -> _Blobs:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._answers.close()
        self._process.wait()

    def node(self, leaf: Leaf) -> Node:
        """The node of the next leaf in order, whose blob is the next answer."""
        if _is_submodule(leaf):
            return Directory(())
        size = self._next_size(leaf)
        if not stat.S_ISLNK(leaf.mode):
            return Regular(size, bool(leaf.mode & _EXECUTE), self._contents(size))
        if size > MAX_SYMLINK:
            raise UnsupportedTree(f"the symlink {leaf.path!r} has a target of {size} bytes")
        return Symlink(b"".join(self._contents(size)))

    def _next_size(self, leaf: Leaf) -> int:
        """Read `OID TYPE SIZE`, the head of an answer."""
        head = self._answers.readline(256).split()
        if len(head) != 3 or head[:2] != [leaf.oid, b"blob"]:
            raise GitError(f"git did not deliver {leaf.path!r}: {b' '.join(head)!r}")
        return int(head[2])

    def _contents(self, size: int) -> Iterator[bytes]:
        """The bytes of an answer, and its newline."""
        left = size
        while left:
            chunk = self._answers.read(min(left, READ_SIZE))
            if not chunk:
                raise GitError("git ended in the middle of a file")
            left -= len(chunk)
            yield chunk
        self._answers.read(1)
