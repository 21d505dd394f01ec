"""A whole worker against a server that is a script: found over HTTP, greeted over a real socket, stopped."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from gradient.model import FailureKind
from gradient.nix.daemon.errors import NixMissing
from gradient.nursery.signals import Stop
from gradient.settings import DataDir, Settings, load, write_secret
from gradient.wire import messages as wire
from gradient.wire.codec import Message
from gradient.wire.greeting import greet
from gradient.wire.listener import serve_links
from gradient.wire.transport import Link
from gradient.work import work
from tests.integration.http_support import Peer, serving
from tests.integration.worker_support import NIX, derivation, instantiate, spec_of
from tests.patience import PATIENCE

pytestmark = pytest.mark.nix


class Registrar:
    """One project, which takes the token `secret`."""

    async def find_peers(self, worker_id: str) -> list[str]:
        return ["p"]

    async def check_tokens(self, worker_id: str, tokens: Any) -> dict[str, str | None]:
        return {"p": None if tokens.get("p") == "secret" else "wrong token"}


@attrs.define(eq=False)
class Server:
    """Assigns `jobs` to the first worker, and keeps what it says."""

    jobs: list[wire.AssignJob]
    heard: list[Message] = attrs.field(factory=list)
    log_came: trio.Event = attrs.field(factory=trio.Event)
    gone: trio.Event = attrs.field(factory=trio.Event)

    async def serve(self, link: Link) -> None:
        await greet(link, Registrar(), wire.Capabilities())
        for job in self.jobs:
            await link.send(job)
        try:
            async for message in link:
                self.heard.append(message)
                if isinstance(message, wire.LogChunk):
                    self.log_came.set()
        finally:
            self.gone.set()

    @asynccontextmanager
    async def running(self, data: Path) -> AsyncIterator[Settings]:
        """The settings of a worker of this server."""
        async with trio.open_nursery() as nursery:
            listen = partial(serve_links, self.serve, host="127.0.0.1", port=0)
            ((_, port),) = await nursery.start(listen)

            async def answer(peer: Peer) -> None:
                assert (await peer.head()).startswith("GET /api/v1/server ")
                await peer.answer(200, json.dumps({"proto_url": f"ws://127.0.0.1:{port}/proto"}))

            async with serving(answer) as url:
                flags = {"server.dataDir": data, "worker.serverUrl": url, "worker.nix": NIX}
                yield load(environ={}, flags=flags)
            nursery.cancel_scope.cancel()


async def test_a_worker_that_is_stopped_reports_its_build_and_is_gone_in_time(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    mock_clock.rate = 0.1  # no machine is too slow for the stop window
    drv_path = instantiate(derivation("echo ready; sleep 600"))
    server = Server([wire.AssignJob("build:1", 4, build=spec_of(drv_path))])
    write_secret(DataDir(tmp_path).worker_token, "secret\n")
    stop = Stop()
    with trio.fail_after(PATIENCE):
        async with server.running(tmp_path) as settings, trio.open_nursery() as nursery:
            nursery.start_soon(partial(work, settings, stop, signals=False))
            await server.log_came.wait()
            began = trio.current_time()
            stop.request()
            await server.gone.wait()
    assert trio.current_time() - began < 6
    kinds = [type(message) for message in server.heard]
    assert kinds[0] is wire.WorkerCapabilities
    assert kinds.index(wire.Draining) < kinds.index(wire.JobFailed)
    (failed,) = [message for message in server.heard if isinstance(message, wire.JobFailed)]
    assert (failed.assignment_id, failed.kind) == (4, FailureKind.CANCELED)
    # Known by the same id when it comes back.
    assert DataDir(tmp_path).worker_id.read_text().strip()


async def test_a_worker_without_nix_says_so(tmp_path: Path) -> None:
    flags = {"server.dataDir": tmp_path, "worker.nix": tmp_path / "nothing"}
    with pytest.raises(NixMissing, match="not a program"):
        await work(load(environ={}, flags=flags), Stop(), signals=False)
