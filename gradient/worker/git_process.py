"""Runs git as a child process: what it may be asked, what it may see, and how it ends.

Layer: worker, IO. URLs, refs and repositories come from strangers, so git sees a small environment of
ours and no configuration of the user, speaks only the protocols listed here, never asks questions and
runs no hooks. Each child leads a process group, because a cancelled fetch must not leave its helpers.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import trio

# `ext` would run commands, and the others are nobody's flake.
PROTOCOLS: Final = ("https", "http", "ssh", "git", "file")

# The list of the files of a tree is the largest answer: a million files of 100 bytes each fit.
MAX_OUTPUT: Final = 128 * 2**20  # bytes
# git says what went wrong at the end; progress and warnings before it are dropped.
STDERR_TAIL: Final = 16 * 2**10  # bytes
# git removes its lock files on SIGTERM, which takes it milliseconds.
TERMINATION_LIMIT: Final = 2.0  # seconds

# What git needs of our environment to find its programs, the network and the user's SSH keys.
_PASSED_ON: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "SSH_AUTH_SOCK",
    "http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH",
)  # fmt: skip

_SAFE_CONFIGURATION: Final = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    # A bare clone belongs to the worker's data directory, whoever runs the worker.
    "safe.directory": "*",
    "fetch.recurseSubmodules": "false",
    # Collecting garbage is welcome, but not in a process that outlives ours.
    "gc.autoDetach": "false",
    "maintenance.autoDetach": "false",
}

# Variables that point a git at another repository than the folder it runs in.
_REDIRECTING: Final = frozenset(
    {
        "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_CEILING_DIRECTORIES",
    }
)  # fmt: skip

_REASON: Final = ("fatal:", "error:")
_CHATTER: Final = ("warning:", "hint:", "remote: Enumerating", "remote: Counting", "remote: Compressing")


class GitError(Exception):
    """git could not do it; the text is git's own last line, or ours."""


@attrs.frozen
class Git:
    """How to run git: the environment it sees. `hardened` for what is fetched, `of_the_user` for a
    working tree of the person at the keyboard."""

    environment: Mapping[str, str] = attrs.field(repr=False)

    @classmethod
    def hardened(cls, environ: Mapping[str, str]) -> Git:
        """No user configuration, no prompts, no hooks, only the listed protocols."""
        kept = {name: environ[name] for name in _PASSED_ON if name in environ}
        return cls(
            kept
            | _quiet()
            | {
                "GIT_CONFIG_GLOBAL": "/dev/null",
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_ALLOW_PROTOCOL": ":".join(PROTOCOLS),
                "GIT_ATTR_NOSYSTEM": "1",
                "GIT_ASKPASS": "true",
                "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
                "GIT_CONFIG_COUNT": str(len(_SAFE_CONFIGURATION)),
            }
            | _numbered(_SAFE_CONFIGURATION)
        )

    @classmethod
    def of_the_user(cls, environ: Mapping[str, str]) -> Git:
        """The user's own configuration; the repository is the folder's, and nothing is written to it."""
        kept = {name: value for name, value in environ.items() if name not in _REDIRECTING}
        return cls(kept | _quiet() | {"GIT_OPTIONAL_LOCKS": "0"})

    async def run(self, folder: Path, *arguments: str, pass_fds: Sequence[int] = ()) -> bytes:
        """Run `git arguments` in `folder` to its end and return what it printed.

        `pass_fds` stay open in git and its children. Raises GitError when git fails, is not installed
        or prints more than MAX_OUTPUT. Cancelled, it ends the whole process group first.
        """
        code, output, stderr = await self._run(folder, arguments, pass_fds)
        if code is None:
            raise GitError(f"git {arguments[0]} printed more than {MAX_OUTPUT} bytes")
        if code != 0:
            raise GitError(_last_words(stderr) or f"git {arguments[0]} failed with exit code {code}")
        return output

    async def _run(
        self, folder: Path, arguments: Sequence[str], pass_fds: Sequence[int]
    ) -> tuple[int | None, bytes, bytes]:
        """Exit code (None: too much output), stdout, and the end of stderr."""
        stdout, stderr = _Collected(MAX_OUTPUT), _Tail()
        start = partial(
            trio.run_process,
            ["git", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=False,
            cwd=folder,
            env=dict(self.environment),
            start_new_session=True,
            pass_fds=pass_fds,
            deliver_cancel=_end_group,
        )
        process: trio.Process | None = None
        try:
            async with trio.open_nursery() as nursery:
                process = await nursery.start(start)
                assert process.stdout is not None
                assert process.stderr is not None
                nursery.start_soon(stderr.read, process.stderr)
                await stdout.read(process.stdout)
                if stdout.overflowed:
                    nursery.cancel_scope.cancel()
        except* FileNotFoundError as group:
            raise GitError("git is not installed, or the folder it should run in is gone") from group
        return None if stdout.overflowed else process.returncode, bytes(stdout.data), bytes(stderr.data)


@attrs.define(eq=False)
class _Collected:
    """All of a stream, up to `limit` bytes."""

    limit: int
    data: bytearray = attrs.field(factory=bytearray, init=False)
    overflowed: bool = attrs.field(default=False, init=False)

    async def read(self, stream: trio.abc.ReceiveStream) -> None:
        async for chunk in stream:
            if len(self.data) + len(chunk) > self.limit:
                self.overflowed = True
                return
            self.data += chunk


@attrs.define(eq=False)
class _Tail:
    """The last STDERR_TAIL bytes of a stream."""

    data: bytearray = attrs.field(factory=bytearray, init=False)

    async def read(self, stream: trio.abc.ReceiveStream) -> None:
        async for chunk in stream:
            self.data += chunk
            del self.data[:-STDERR_TAIL]


async def _end_group(process: trio.Process) -> None:
    """End git and its helpers: politely, so that lock files go, then for certain."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with trio.move_on_after(TERMINATION_LIMIT, shield=True):
            await process.wait()
        os.killpg(process.pid, signal.SIGKILL)


def _quiet() -> dict[str, str]:
    return {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat"}


def _numbered(configuration: Mapping[str, str]) -> dict[str, str]:
    """git configuration as it is given in the environment, which hooks and children inherit."""
    return {
        variable: text
        for number, (key, value) in enumerate(configuration.items())
        for variable, text in ((f"GIT_CONFIG_KEY_{number}", key), (f"GIT_CONFIG_VALUE_{number}", value))
    }


def _last_words(stderr: bytes) -> str:
    """Why git failed: its last `fatal:` or `error:` line, after the line of the helper that failed it."""
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines()]
    telling = [line for line in lines if line and not line.startswith(_CHATTER)]
    while telling and not telling[-1].startswith(_REASON):
        telling.pop()
    return "; ".join(line.removeprefix("fatal: ").removeprefix("error: ") for line in telling[-2:])
