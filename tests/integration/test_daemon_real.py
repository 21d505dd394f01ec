"""The daemon client against real daemons: `nix-daemon --stdio` children, and one on a private socket."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from gradient.nix.daemon.address import DaemonAddress, SocketAddress, StdioAddress, find_daemon
from gradient.nix.daemon.build_hook import declining_hook
from gradient.nix.daemon.build_result import ResultStatus
from gradient.nix.daemon.connection import DaemonConnection, connect
from gradient.nix.daemon.errors import DaemonError, DaemonGone
from gradient.nix.daemon.operations import AddMethod
from gradient.nix.daemon.options import DaemonOptions
from gradient.nix.daemon.path_info import PathInfo
from gradient.nix.daemon.pool import DaemonPool
from gradient.nix.daemon.primitives import string
from gradient.nix.daemon.stderr import Message, log_line
from tests.patience import PATIENCE, until

pytestmark = pytest.mark.nix

NIX = os.environ.get("GRADIENT_TEST_NIX") or shutil.which("nix") or "nix"
# A builder that is to be killed: far longer than any of these tests.
FOREVER = 600  # seconds
MISSING = "/nix/store/00000000000000000000000000000000-missing"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that builders, which run as other users, may write to."""
    with tempfile.TemporaryDirectory(prefix="gradient-daemon-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.fixture
def stdio() -> StdioAddress:
    address = trio.run(find_daemon, NIX)
    assert isinstance(address, StdioAddress)
    return address


@pytest.fixture
def listening(folder: Path, stdio: StdioAddress) -> Iterator[SocketAddress]:
    """A daemon of our own that listens on a private socket."""
    path = folder / "socket"
    environment = os.environ | {"NIX_DAEMON_SOCKET_PATH": str(path)}
    with (folder / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [stdio.argv[0], "--option", "substitute", "false"], env=environment, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while not path.exists():
            assert process.poll() is None, (folder / "daemon.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield SocketAddress(str(path))
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture(params=["stdio", "socket"])
def address(request: pytest.FixtureRequest) -> DaemonAddress:
    kind: DaemonAddress = request.getfixturevalue("stdio" if request.param == "stdio" else "listening")
    return kind


def quoted(text: str) -> str:
    """A Nix string: JSON, but for interpolation."""
    return json.dumps(text).replace("${", "\\${")


def derivation(name: str, script: str) -> str:
    """Instantiate a derivation that runs `script` in /bin/sh, new in every run; the path of its `.drv`."""
    expression = (
        f'derivation {{ name = "{name}"; system = builtins.currentSystem; builder = "/bin/sh"; '
        f'PATH = "/usr/bin:/bin"; salt = "{time.time_ns()}"; args = [ "-c" {quoted(script)} ]; }}'
    )
    argv = [str(Path(NIX).parent / "nix-instantiate"), "--option", "substitute", "false", "-E", expression]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def nar_of(content: bytes) -> bytes:
    words = (b"nix-archive-1", b"(", b"type", b"regular", b"contents", content, b")")
    return b"".join(map(string, words))


def listener(log: list[str]) -> Callable[[Message], None]:
    def listen(message: Message) -> None:
        if (line := log_line(message)) is not None:
            log.append(line)

    return listen


async def test_questions_and_content(address: DaemonAddress) -> None:
    content = f"content {time.time_ns()}".encode()
    async with await connect(address) as connection:
        assert connection.info.minor >= 34
        text = await connection.add_to_store("text", AddMethod.TEXT, [content])
        flat = await connection.add_to_store("flat", AddMethod.FLAT, [content])
        tree = await connection.add_to_store("tree", AddMethod.RECURSIVE, [nar_of(content)], [])
        assert {text.nar_hash, flat.nar_hash, tree.nar_hash} == {hashlib.sha256(nar_of(content)).hexdigest()}
        user = await connection.add_to_store("user", AddMethod.TEXT, [text.path.encode()], [text.path])
        assert user.references == (text.path,)
        assert await connection.query_path_info(user.path) == user
        assert await connection.query_path_info(MISSING) is None
        assert await connection.is_valid_path(text.path)
        assert not await connection.is_valid_path(MISSING)
        assert await connection.query_valid_paths([text.path, MISSING]) == {text.path}
        async with connection.nar_from_path(text.path) as chunks:
            assert b"".join([chunk async for chunk in chunks]) == nar_of(content)
        await connection.add_temp_root(text.path)
        assert connection.is_usable


async def test_the_nar_of_a_missing_path_is_the_daemons_error(address: DaemonAddress) -> None:
    async with await connect(address) as connection:
        with pytest.raises(DaemonError, match="missing"):
            async with connection.nar_from_path(MISSING) as chunks:
                await anext(chunks)


async def nar_and_info(connection: DaemonConnection, content: bytes) -> tuple[bytes, PathInfo]:
    """A new path, and its NAR. The path is computed by the daemon for other content."""
    nar = nar_of(content)
    other = await connection.add_to_store("imported", AddMethod.TEXT, [content + b" but other"])
    path = other.path[:11] + other.path[11:43][::-1] + other.path[43:]
    return nar, PathInfo(path=path, nar_hash=hashlib.sha256(nar).hexdigest(), nar_size=len(nar))


async def test_nars_are_imported(address: DaemonAddress) -> None:
    async with await connect(address) as connection:
        items = []
        for index in range(3):
            nar, info = await nar_and_info(connection, f"{index} {time.time_ns()}".encode() * 10_000)
            items.append((info, nar))
        (info, nar), *rest = items
        halves = [nar[: len(nar) // 2], nar[len(nar) // 2 :]]
        await connection.add_to_store_nar(info, halves, dont_check_sigs=True)
        await connection.add_multiple_to_store([(more, [data]) for more, data in rest], dont_check_sigs=True)
        for info, nar in items:
            async with connection.nar_from_path(info.path) as chunks:
                assert b"".join([chunk async for chunk in chunks]) == nar


async def test_a_wrong_nar_is_refused_without_a_deadlock(address: DaemonAddress) -> None:
    with trio.fail_after(PATIENCE):
        async with await connect(address) as connection:
            nar, info = await nar_and_info(connection, bytes(8 << 20))
            broken = nar[:500_000] + b"!" + nar[500_001:]
            with pytest.raises(DaemonError, match="hash mismatch"):
                await connection.add_to_store_nar(info, [broken], dont_check_sigs=True)
        async with await connect(address) as connection:
            not_a_nar = [bytes([1]) * 100_000] * 200
            with pytest.raises((DaemonError, DaemonGone)):
                await connection.add_to_store_nar(info, not_a_nar, dont_check_sigs=True)


async def test_a_build_and_its_log(address: DaemonAddress) -> None:
    drv = derivation("works", "echo first; echo second >&2; echo x > $out")
    log: list[str] = []
    async with await connect(address) as connection:
        (result,) = await connection.build_paths_with_results([f"{drv}!*"], on_message=listener(log))
        assert (result.status, result.success, result.error) == (ResultStatus.BUILT, True, "")
        assert result.outputs == await connection.query_derivation_output_map(drv)
        assert {"first", "second"} <= set(log)
        (again,) = await connection.build_paths_with_results([f"{drv}!out"])
        assert (again.status, again.outputs) == (ResultStatus.ALREADY_VALID, result.outputs)
        await connection.add_build_log(drv, [b"a log ", b"from elsewhere"])


async def test_a_failed_build_is_a_result(address: DaemonAddress) -> None:
    drv = derivation("fails", "echo the reason; exit 7")
    log: list[str] = []
    async with await connect(address) as connection:
        (result,) = await connection.build_paths_with_results([f"{drv}!*"], on_message=listener(log))
        assert not result.success
        assert "failed with exit code 7" in result.error
        assert "the reason" in log
        assert connection.is_usable


async def test_options_reach_the_build(address: DaemonAddress) -> None:
    options = DaemonOptions(build_cores=3, extra=(("max-build-log-size", "1000"),))
    async with await connect(address, options) as connection:
        log: list[str] = []
        cores = derivation("cores", "echo cores $NIX_BUILD_CORES; echo > $out")
        await connection.build_paths_with_results([f"{cores}!*"], on_message=listener(log))
        assert "cores 3" in log
    async with await connect(address, options) as connection:
        chatty = derivation("chatty", "while :; do echo 0123456789; done")
        (result,) = await connection.build_paths_with_results([f"{chatty}!*"])
        assert result.status is ResultStatus.LOG_LIMIT_EXCEEDED
    async with await connect(address, DaemonOptions(timeout=1)) as connection:
        slow = derivation("slow", f"sleep {FOREVER}")
        (result,) = await connection.build_paths_with_results([f"{slow}!*"])
        assert result.status is ResultStatus.TIMED_OUT


def is_alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("after", [0.0, 0.3])
async def test_a_cancelled_build_leaves_no_process(
    address: DaemonAddress, folder: Path, after: float
) -> None:
    """At once after a line of the log is the hard case: see `DaemonConnection._follow`."""
    script = f"sleep {FOREVER} & one=$!; sleep {FOREVER} & echo $$ $one $! > {folder}/pids; echo up; wait"
    drv = derivation("endless", script)
    async with await connect(address) as connection:
        with trio.CancelScope() as scope:

            def listen(message: Message) -> None:
                if log_line(message) == "up":
                    scope.deadline = trio.current_time() + after if after else -float("inf")

            await connection.build_paths_with_results([f"{drv}!*"], on_message=listen)
        assert scope.cancelled_caught
        assert not connection.is_usable
    pids = (folder / "pids").read_text().split()
    assert len(pids) == 3
    await until(lambda: not any(map(is_alive, pids)))


async def test_a_daemon_that_is_killed_is_gone(stdio: StdioAddress, folder: Path) -> None:
    drv = derivation("orphan", f"echo $$ > {folder}/pid; echo up; exec sleep {FOREVER}")
    async with await connect(stdio) as connection:
        child = connection._stream.transport.child
        assert child is not None

        def listen(message: Message) -> None:
            if log_line(message) == "up":
                child._process.kill()

        with pytest.raises(DaemonGone):
            await connection.build_paths_with_results([f"{drv}!*"], on_message=listen)
    assert child._process.returncode == -9
    os.kill(int((folder / "pid").read_text()), 9)  # nobody else ends a builder whose daemon was killed


async def test_a_declining_hook_takes_the_place_of_the_configured_one(
    stdio: StdioAddress, folder: Path
) -> None:
    asked, hook = folder / "asked", folder / "hook"
    hook.write_text(f"#!/bin/sh\necho x >> {asked}\necho '# decline-permanently' >&2\n")
    hook.chmod(0o755)
    daemon = StdioAddress((*stdio.argv, "--option", "build-hook", str(hook)))
    ours = DaemonOptions(extra=declining_hook(folder / "declining"))
    for options, expected in ((DaemonOptions(), 1), (ours, 1)):
        async with await connect(daemon, options) as connection:
            drv = derivation("hooked", "echo built > $out")
            (result,) = await connection.build_paths_with_results([f"{drv}!*"])
            assert result.success
        assert len(asked.read_text().split()) == expected


async def test_a_closed_child_is_reaped_and_a_pool_replaces_a_dead_one(
    stdio: StdioAddress, mock_clock: MockClock
) -> None:
    """The clock stands still: a child ends because it was hung up on, before it would be killed."""
    async with DaemonPool(stdio, limit=1) as connections:
        async with connections.connection() as first:
            assert not await first.is_valid_path(MISSING)
        child = first._stream.transport.child
        assert child is not None
        child._process.kill()
        await child._process.wait()
        async with connections.connection() as second:
            assert not await second.is_valid_path(MISSING)
        assert second is not first
    child = second._stream.transport.child
    assert child is not None
    assert child._process.returncode == 0


async def test_roots_and_garbage_stay_in_a_store_of_their_own(stdio: StdioAddress, folder: Path) -> None:
    private = StdioAddress((*stdio.argv, "--option", "store", f"local?root={folder}/root"))
    async with await connect(private) as connection:
        kept = await connection.add_to_store("kept", AddMethod.TEXT, [b"kept"])
        lost = await connection.add_to_store("lost", AddMethod.TEXT, [b"lost"])
        link = folder / "link"
        link.symlink_to(kept.path)
        await connection.add_indirect_root(str(link))
    async with await connect(private) as connection:
        garbage = await connection.delete_dead_paths(2**40)
        assert lost.path in garbage.paths
        assert kept.path not in garbage.paths
        assert [await connection.is_valid_path(path) for path in (kept.path, lost.path)] == [True, False]
