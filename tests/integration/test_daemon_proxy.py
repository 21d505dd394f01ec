"""Real evaluators behind the proxy: what they import is built by the callback, everything else passes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from gradient.nix.daemon.address import DaemonAddress, StdioAddress, find_daemon
from gradient.nix.daemon.connection import connect
from gradient.nix.daemon.errors import NixMissing
from gradient.nix.daemon.proxy import DaemonProxy, ImportFailed
from tests.patience import PATIENCE

pytestmark = pytest.mark.nix

NIX = os.environ.get("GRADIENT_TEST_NIX") or shutil.which("nix") or "nix"
OPTIONS = ("--option", "substitute", "false", "--extra-experimental-features", "nix-command flakes")

OnBuild = Callable[[tuple[str, ...]], Awaitable[None]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that builders, which run as other users, may write to."""
    with tempfile.TemporaryDirectory(prefix="gradient-proxy-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


class Builder:
    """Builds what it is asked to with a connection of its own, and remembers what that was."""

    def __init__(self, daemon: DaemonAddress) -> None:
        self.daemon = daemon
        self.asked: list[str] = []

    async def __call__(self, paths: tuple[str, ...]) -> None:
        self.asked += paths
        async with await connect(self.daemon) as connection:
            for result in await connection.build_paths_with_results([f"{path}!*" for path in paths]):
                if not result.success:
                    raise ImportFailed(paths[0], result.error)


@asynccontextmanager
async def proxy(on_build: Callable[[DaemonAddress], OnBuild]) -> AsyncIterator[tuple[str, OnBuild]]:
    daemon = await find_daemon(NIX)
    callback = on_build(daemon)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            uri = await nursery.start(DaemonProxy(daemon, callback).run)
            yield uri, callback
            nursery.cancel_scope.cancel()


async def evaluate(
    expression: str, *arguments: str, remote: str | None = None
) -> subprocess.CompletedProcess[bytes]:
    argv = [NIX, "eval", *OPTIONS, "--impure", *arguments, "--expr", expression]
    environment = os.environ | ({"NIX_REMOTE": remote} if remote else {})
    return await trio.run_process(
        argv, capture_stdout=True, capture_stderr=True, check=False, env=environment
    )


def derivation(name: str, script: str) -> str:
    """A Nix expression for a derivation that no earlier run has built."""
    return (
        f'(derivation {{ name = "{name}"; system = builtins.currentSystem; builder = "/bin/sh"; '
        f'salt = "{time.time_ns()}"; args = [ "-c" {script} ]; }})'
    )


@pytest.mark.parametrize("how", ["--store", "NIX_REMOTE"])
async def test_an_import_is_built_by_the_callback(how: str) -> None:
    imported = derivation("imported", '"echo 42 > $out"')
    async with proxy(Builder) as (uri, builder):
        if how == "--store":
            result = await evaluate(f"import {imported} + 1", "--store", uri)
        else:
            result = await evaluate(f"import {imported} + 1", remote=uri)
    assert (result.stdout, result.returncode) == (b"43\n", 0), result.stderr
    assert isinstance(builder, Builder)
    assert [path[-13:] for path in builder.asked] == ["-imported.drv"]


async def test_an_import_that_needs_an_import(folder: Path) -> None:
    """With a source of several frames: what an evaluation adds to the store passes whole."""
    source = folder / "source"
    source.write_bytes(bytes(range(256)) * 2000)
    inner = derivation("inner", '"echo 20 > $out"')
    outer = derivation(
        "outer", '"read x < ${inner}; cat < ${source} > /dev/null; echo $((x + ${one})) > $out"'
    )
    bindings = f"inner = {inner}; source = {source}; one = toString (import inner - 19);"
    async with proxy(Builder) as (uri, builder):
        result = await evaluate(f"let {bindings} in import {outer}", "--store", uri)
    assert (result.stdout, result.returncode) == (b"21\n", 0), result.stderr
    assert isinstance(builder, Builder)
    assert [path.rpartition("-")[2] for path in builder.asked] == ["inner.drv", "outer.drv"]


async def test_a_failed_import_is_an_error_and_the_evaluator_goes_on() -> None:
    bad, good = derivation("bad", '"exit 9"'), derivation("good", '"echo 41 > $out"')
    async with proxy(Builder) as (uri, _):
        result = await trio.run_process(
            [NIX, "repl", *OPTIONS, "--store", uri],
            stdin=f"import {bad}\nimport {good} + 1\n".encode(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    assert b"-bad.drv is needed by this evaluation but was not built" in result.stderr
    assert b"exit code 9" in result.stderr
    assert b"42" in result.stdout


async def test_nothing_is_built_behind_the_callback(folder: Path) -> None:
    def lie(daemon: DaemonAddress) -> OnBuild:
        async def say_yes(paths: tuple[str, ...]) -> None:
            await trio.lowlevel.checkpoint()

        return say_yes

    witness = folder / "witness"
    secret = derivation("secret", f'"echo built > {witness}; echo 1 > $out"')
    async with proxy(lie) as (uri, _):
        result = await evaluate(f"import {secret}", "--store", uri, "--max-jobs", "4")
    assert result.returncode == 1
    assert not witness.exists()
    async with proxy(Builder) as (uri, _):
        result = await evaluate(f"import {secret}", "--store", uri)
    assert (result.stdout, witness.exists()) == (b"1\n", True), result.stderr


async def test_an_evaluator_that_leaves_cancels_its_build() -> None:
    asked, cancelled = trio.Event(), trio.Event()

    def wait(daemon: DaemonAddress) -> OnBuild:
        async def forever(paths: tuple[str, ...]) -> None:
            asked.set()
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()

        return forever

    async with proxy(wait) as (uri, _), trio.open_nursery() as nursery:
        argv = [NIX, "eval", *OPTIONS, "--impure", "--store", uri, "--expr"]
        argv.append("import " + derivation("never", '"echo 1 > $out"'))
        process: trio.Process = await nursery.start(
            partial(trio.run_process, argv, capture_stderr=True, check=False)
        )
        await asked.wait()
        process.kill()
        await cancelled.wait()


async def test_what_an_evaluation_has_no_use_for_is_refused() -> None:
    async with proxy(Builder) as (uri, _):
        collect = [str(Path(NIX).parent / "nix-store"), "--gc", "--max-freed", "1", "--store", uri]
        result = await trio.run_process(collect, capture_stdout=True, capture_stderr=True, check=False)
        assert result.returncode == 1
        assert b"an evaluation may not use operation 20 of the Nix daemon" in result.stderr


async def test_a_missing_path_is_asked_for_by_its_name() -> None:
    missing = "/nix/store/00000000000000000000000000000000-missing"

    def refuse(daemon: DaemonAddress) -> OnBuild:
        async def no(paths: tuple[str, ...]) -> None:
            await trio.lowlevel.checkpoint()
            raise ImportFailed(paths[0], "nobody has it")

        return no

    async with proxy(refuse) as (uri, _):
        realise = [str(Path(NIX).parent / "nix-store"), "--realise", missing, "--store", uri, *OPTIONS[:3]]
        result = await trio.run_process(realise, capture_stdout=True, capture_stderr=True, check=False)
        assert f"{missing} is needed by this evaluation but was not built: nobody has it" in str(
            result.stderr
        )


async def test_a_daemon_whose_version_is_known_is_not_asked() -> None:
    async def nothing(paths: tuple[str, ...]) -> None:
        raise AssertionError

    for newest, starts in ((34, True), (None, False)):
        served = DaemonProxy(StdioAddress(("/nowhere/nix-daemon", "--stdio")), nothing, newest)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(served.run)
                nursery.cancel_scope.cancel()
            assert starts
        except* NixMissing:
            assert not starts


async def test_the_socket_is_private_and_goes_away() -> None:
    async with proxy(Builder) as (uri, _):
        folder = Path(uri.removeprefix("unix://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


async def test_what_a_killed_proxy_left_goes_away_and_what_serves_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    left = folder / "gradient-proxy-left"
    left.mkdir()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left / "daemon"))
    async with proxy(Builder) as (first, _), proxy(Builder) as (second, _):
        names = {Path(uri.removeprefix("unix://")).parent.name for uri in (first, second)}
        assert set(os.listdir(folder)) == names
    assert os.listdir(folder) == []


async def test_a_long_folder_for_temporary_files_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = folder / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with proxy(Builder) as (uri, _):
        done = await evaluate("1 + 1", remote=uri)
        assert (done.returncode, done.stdout.strip()) == (0, b"2")
