"""Jobs of a worker on a real Nix, without a server: what it asks is answered from a script, what it uploads
is parsed and kept, what it reports is a list."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from gradient.http.connection import Response
from gradient.model import BuildKind, BuildSpec, JobKind, OutputPath
from gradient.nar.bundle import BundleParser, EntryBegins, EntryEnds, EntryHeader
from gradient.nar.pack import PackResult
from gradient.nix.daemon.address import find_daemon
from gradient.nix.daemon.pool import DaemonPool
from gradient.nix.derivation import parse_derivation
from gradient.nix.evaluator.pool import EvaluatorPool
from gradient.nix.evaluator.settings import EvaluatorSettings
from gradient.settings.tables import Worker
from gradient.wire import messages as wire
from gradient.wire.codec import Message
from gradient.worker.capabilities import find_host, native_system
from gradient.worker.git_process import Git
from gradient.worker.git_repo import GitCache
from gradient.worker.job import Job
from gradient.worker.machine import Machine
from gradient.worker.queries import Queries

NIX = os.environ.get("GRADIENT_TEST_NIX") or shutil.which("nix") or "nix"
UPLOADS = "http://cache.test/uploads"
M = TypeVar("M", bound=Message)


@attrs.define(eq=False)
class Cache:
    """The server's cache and its HTTP side. `held` are paths it has; `files` answers downloads by URL."""

    held: dict[str, wire.CachedPathInfo] = attrs.field(factory=dict)
    files: dict[str, bytes | int] = attrs.field(factory=dict)
    uploaded: dict[str, tuple[EntryHeader, PackResult]] = attrs.field(factory=dict)
    # The paths of each request, in the order of their ends.
    requests: list[list[str]] = attrs.field(factory=list)
    # Statuses for the next uploads; 200 when empty.
    statuses: list[int] = attrs.field(factory=list)

    async def upload(
        self,
        url: str,
        *,
        token: str,
        body: AsyncIterable[bytes] | bytes,
        method: str,
        headers: dict[str, str],
    ) -> Response:
        assert (url, token, method) == (UPLOADS, "token", "POST")
        parser, begun, found = BundleParser(), None, {}
        for piece in [body] if isinstance(body, bytes) else [piece async for piece in body]:
            for event in parser.feed(piece):
                if isinstance(event, EntryBegins):
                    begun = event.header
                elif isinstance(event, EntryEnds):
                    assert begun is not None
                    found[begun.store_path] = (begun, event.result)
        parser.close()
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return Response(status, {}, b'{"error": "as scripted"}')
        self.requests.append(list(found))
        self.uploaded |= found
        return Response(200, {}, b"{}")

    @asynccontextmanager
    async def download(self, url: str) -> AsyncIterator[_Download]:
        await trio.lowlevel.checkpoint()
        found = self.files.get(url, 404)
        yield _Download(found if isinstance(found, int) else 200, found if isinstance(found, bytes) else b"")

    def status(self, query: wire.CacheQuery) -> wire.CacheStatus:
        infos = []
        for path in query.paths:
            known = self.held.get(path)
            infos.append(known or wire.CachedPathInfo(path, path in self.uploaded))
        grant = wire.UploadGrant(UPLOADS, "token", 2**40) if query.mode is wire.QueryMode.PUSH else None
        return wire.CacheStatus(query.query_id, tuple(infos), grant)


class _Download:
    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self._pieces = [body[start : start + 1000] for start in range(0, len(body), 1000)]

    def __aiter__(self) -> _Download:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.pop(0)


@attrs.define(eq=False)
class Server:
    """Takes what a job sends. `known` derivations are complete in its graph."""

    cache: Cache
    reports: list[Message] = attrs.field(factory=list)
    queries: list[Message] = attrs.field(factory=list)
    known: set[str] = attrs.field(factory=set)
    on_import: Callable[[wire.ImportRequest], Awaitable[wire.ImportResult]] | None = None
    # Called with each report before it is kept.
    on_report: Callable[[Message], None] = lambda report: None
    job: Job = attrs.field(init=False)

    async def send(self, message: Message) -> None:
        await trio.lowlevel.checkpoint()
        match message:
            case wire.CacheQuery():
                self.queries.append(message)
                self.job.queries.answered(self.cache.status(message))
            case wire.QueryKnownDerivations(query_id=number, drv_paths=paths):
                self.queries.append(message)
                known = tuple(path for path in paths if path in self.known)
                self.job.queries.answered(wire.KnownDerivations(number, known))
            case wire.ImportRequest():
                self.queries.append(message)
                assert self.on_import is not None
                self.job.queries.answered(await self.on_import(message))
            case _:
                self.on_report(message)
                self.reports.append(message)

    def sent(self, kind: type[M]) -> list[M]:
        """The reports of one kind, in their order."""
        return [report for report in self.reports if isinstance(report, kind)]

    @property
    def log(self) -> str:
        """The build log."""
        return b"".join(chunk.data for chunk in self.sent(wire.LogChunk)).decode()


@attrs.frozen
class Bench:
    """A worker's machine and the other end of its jobs."""

    machine: Machine
    server: Server
    cache: Cache

    def job(self, kind: JobKind = JobKind.BUILD) -> Job:
        """A new job, whose reports go to `server`."""
        self.server.job = Job(
            "job:1", 1, kind, self.server.send, Queries(self.server.send, "http://cache.test")
        )
        return self.server.job


@asynccontextmanager
async def bench(folder: Path, **settings: Any) -> AsyncIterator[Bench]:
    """A machine on the tests' Nix, its files in `folder`."""
    cache = Cache()
    daemon = await find_daemon(NIX)
    worker = Worker(**settings)
    evaluators = EvaluatorPool(EvaluatorSettings(Path(NIX), folder / "evaluator"), size=2)
    async with DaemonPool(daemon, 4) as store, DaemonPool(daemon, 2) as builders:
        machine = Machine(
            settings=worker,
            host=await find_host(Path(NIX)),
            store=store,
            builders=builders,
            http=cache,  # type: ignore[arg-type]
            evaluators=evaluators,
            git=GitCache(folder / "git", Git.hardened(os.environ)),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(evaluators.run)
            yield Bench(machine, Server(cache), cache)
            nursery.cancel_scope.cancel()


def nix(program: str, *arguments: str) -> str:
    """What a program beside the tests' Nix prints."""
    options = ["--option", "substitute", "false"]
    features = ["--extra-experimental-features", "nix-command flakes"] if program == "nix" else []
    argv = [str(Path(NIX).parent / program), *arguments, *options, *features]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def quoted(text: str) -> str:
    """A Nix string: JSON, but for interpolation."""
    return json.dumps(text).replace("${", "\\${")


def derivation(script: str, name: str = "test", attributes: str = "") -> str:
    """A derivation that runs `script` in /bin/sh, as a Nix expression; new in every run."""
    return (
        f'(derivation {{ name = "{name}"; system = "{native_system()}"; builder = "/bin/sh"; '
        f'PATH = "/usr/bin:/bin"; salt = "{time.time_ns()}"; args = [ "-c" {quoted(script)} ]; '
        f"{attributes} }})"
    )


def instantiate(expression: str) -> str:
    """The path of its `.drv`."""
    return nix("nix-instantiate", "-E", expression)


def spec_of(drv_path: str, *, timeout: int = 60, silent: int = 60) -> BuildSpec:
    """The build job of a derivation."""
    drv = parse_derivation(Path(drv_path).read_bytes(), drv_path.partition("-")[2])
    outputs = tuple(OutputPath(output.name, output.path) for output in drv.outputs)
    return BuildSpec(7, drv_path, BuildKind.BUILD, outputs, drv.is_fixed_output, timeout, silent, drv.system)
