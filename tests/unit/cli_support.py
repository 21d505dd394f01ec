"""A server with scripted answers, in a thread of its own, and commands run against it.

The scripts speak the HTTP contract of docs/api.md; that the real server does too is what the tests of
tests/integration find out.
"""

from __future__ import annotations

import contextlib
import io
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import h11
import pytest
import trio

from gradient.cli.app import main

PUBLIC_KEY = "gradient-1:AAAA"


@attrs.frozen
class Request:
    """What came in."""

    method: str
    path: str
    token: str | None
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@attrs.frozen
class Answer:
    """What goes out; `hang` keeps the connection open after the body, as a stream of events does."""

    status: int = 200
    body: bytes = b""
    hang: bool = False


def answer(value: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


def lines(*events: dict[str, Any], hang: bool = False) -> Answer:
    """A stream of events; it ends after them unless it is to hang."""
    return Answer(200, b"".join(json.dumps(event).encode() + b"\n" for event in events), hang)


@attrs.define(eq=False)
class FakeServer:
    """Answers by `METHOD /path` (without query). A list of answers is used up, its last one stays."""

    routes: dict[str, list[Answer]]
    url: str = ""
    requests: list[Request] = attrs.field(factory=list)

    def asked(self, route: str) -> list[Request]:
        return [r for r in self.requests if f"{r.method} {r.path.partition('?')[0]}" == route]

    def respond(self, request: Request) -> Answer:
        self.requests.append(request)
        answers = self.routes.get(f"{request.method} {request.path.partition('?')[0]}")
        if answers is None:
            return answer({"error": "no such thing"}, 404)
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def serve(self, stream: trio.SocketStream) -> None:
        """One request a connection."""
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._converse(stream)

    async def _converse(self, stream: trio.SocketStream) -> None:
        http = h11.Connection(h11.SERVER)
        head: h11.Request | None = None
        body = b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await stream.receive_some())
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            else:
                break
        if head is None:
            return
        bearer = dict(head.headers).get(b"authorization", b"").decode()
        token = bearer.removeprefix("Bearer ") or None
        reply = self.respond(Request(head.method.decode(), head.target.decode(), token, body))
        headers = [("Connection", "close"), ("Transfer-Encoding", "chunked")]
        await stream.send_all(http.send(h11.Response(status_code=reply.status, headers=headers)) or b"")
        if reply.body:
            await stream.send_all(http.send(h11.Data(reply.body)) or b"")
        if reply.hang:
            await stream.receive_some()
            return
        await stream.send_all(http.send(h11.EndOfMessage()) or b"")


@contextmanager
def running(routes: dict[str, list[Answer]]) -> Iterator[FakeServer]:
    """The server, in a thread: a command runs a trio of its own in ours."""
    server = FakeServer(routes)
    started: queue.Queue[Callable[[], None]] = queue.Queue()

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            server.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            facts = {"version": "9", "cache_url": f"{server.url}/cache/main", "public_key": PUBLIC_KEY}
            server.routes.setdefault("GET /api/v1/server", [answer(facts)])
            token = trio.lowlevel.current_trio_token()
            started.put(lambda: token.run_sync_soon(nursery.cancel_scope.cancel))
            await trio.serve_listeners(server.serve, [listener])

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    stop = started.get()
    try:
        yield server
    finally:
        stop()
        thread.join()


@attrs.frozen
class Ran:
    """What a command did."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The object on the last line of stdout."""
        return json.loads(self.stdout.splitlines()[-1])


def gradient(*arguments: str | Path) -> Ran:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
    assert isinstance(exit.value.code, int)
    assert "Traceback" not in err.getvalue()
    return Ran(exit.value.code, out.getvalue(), err.getvalue())


# --- answers of the server ------------------------------------------------------------------------


def point(attr: str, status: str = "Completed", build: int | None = 1) -> dict[str, Any]:
    """An entry point, `hello` by its last name."""
    name = attr.rpartition(".")[2]
    outputs = {"out": f"/nix/store/{'0' * 32}-{name}"} if status == "Completed" else {}
    drv = None if build is None else f"/nix/store/{'1' * 32}-{name}.drv"
    return {"attr": attr, "status": status, "drv_path": drv, "outputs": outputs, "build": build}


def build(number: int, name: str, status: str, **more: Any) -> dict[str, Any]:
    """A build of a snapshot."""
    return {
        "build": number,
        "name": name,
        "drv_path": f"/nix/store/{'1' * 32}-{name}.drv",
        "status": status,
        "architecture": "x86_64-linux",
        "started_at": None,
        "finished_at": None,
        "error": None,
        "attempts": 0,
        "worker": None,
        "reason": None,
        "causes": [],
        **more,
    }


def snapshot(
    status: str,
    *,
    points: Sequence[dict[str, Any]] = (),
    builds: Sequence[dict[str, Any]] = (),
    messages: Sequence[dict[str, Any]] = (),
    waiting: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """An evaluation with the number 7."""
    return {
        "evaluation": 7,
        "status": status,
        "waiting": waiting,
        "created_at": "2026-01-01T00:00:00+00:00",
        "finished_at": None,
        "counters": {"named": len(builds), "active": 0, "failed": 0, "queued": 0, "building": 0},
        "entry_points": list(points),
        "messages": list(messages),
        "builds": list(builds),
        "builds_total": len(builds),
        "stats": {},
    }
