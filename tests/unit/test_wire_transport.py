"""Links over memory streams, with the clock in hand: lanes, silence, stalls, closing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
import trio_websocket

from gradient.wire import messages as m
from gradient.wire.codec import FRAME_LIMIT_BEFORE_AUTH
from gradient.wire.errors import ConnectFailed, LinkClosed, RemoteProtocolError, SendStalled
from gradient.wire.lanes import Lane, Outbox, lane_of
from gradient.wire.transport import (
    WORKER_LIMITS,
    Limits,
    Link,
    accept,
    connect_over,
    link_over,
)

Body = Callable[[Link], Awaitable[None]]


@asynccontextmanager
async def pair(
    server_body: Body,
    *,
    limits: Limits = WORKER_LIMITS,
    streams: Callable[[], tuple[Any, Any]] = trio.testing.memory_stream_pair,
) -> AsyncIterator[tuple[Link, Any]]:
    """A worker's link in hand, its raw stream, and `server_body` at the other end."""
    near, far = streams()

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        async with accept(far) as link:
            await server_body(link)

    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        async with connect_over(near, limits=limits) as link:
            yield link, near


async def flood(link: Link) -> None:
    while True:
        await link.send(m.LogChunk("j", 1, b"x"))


async def end_of(link: Link) -> LinkClosed:
    with pytest.raises(LinkClosed) as caught:
        async for _ in link:
            pass
    return caught.value


async def test_messages_go_both_ways_in_order() -> None:
    got: list[Any] = []

    async def server(link: Link) -> None:
        for job in range(50):
            await link.send(m.AbortJob(f"{job}", "r"))
        for _ in range(50):
            got.append(await link.receive())

    async with pair(server) as (link, _):
        for job in range(50):
            await link.send(m.Building("j", job, job))
        assert [await link.receive() for _ in range(50)] == [m.AbortJob(f"{job}", "r") for job in range(50)]
        end = await end_of(link)
    assert got == [m.Building("j", job, job) for job in range(50)]
    assert (end.code, end.reason) == (1000, "")


def test_lanes() -> None:
    assert lane_of(m.LogChunk("j", 1, b"")) is Lane.BULK
    for outcome in (m.JobCompleted("j", 1), m.JobFailed("j", 1, "e", 0), m.RequestJob(m.JobKind.BUILD)):  # type: ignore[arg-type]
        assert lane_of(outcome) is Lane.BULK
    assert lane_of(m.WorkerMetrics()) is Lane.CONTROL
    assert lane_of(m.EvalResult("j", 1)) is Lane.CONTROL


async def test_control_goes_first_and_each_lane_keeps_its_order() -> None:
    outbox = Outbox()
    for number in range(3):
        await outbox.put(Lane.BULK, b"b%d" % number)
        await outbox.put(Lane.CONTROL, b"c%d" % number)
    outbox.close()
    assert [await outbox.next() for _ in range(7)] == [b"c0", b"c1", b"c2", b"b0", b"b1", b"b2", None]


async def test_a_full_lane_makes_its_senders_wait_and_not_the_other_lanes(autojump_clock: Any) -> None:
    outbox = Outbox()
    for _ in range(Lane.BULK.value):
        await outbox.put(Lane.BULK, b"log")
    with trio.move_on_after(1) as scope:
        await outbox.put(Lane.BULK, b"never queued")
    assert scope.cancelled_caught
    await outbox.put(Lane.CONTROL, b"abort")
    assert await outbox.next() == b"abort"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.put, Lane.BULK, b"waited")
        await trio.testing.wait_all_tasks_blocked()
        frames = [await outbox.next() for _ in range(Lane.BULK.value + 1)]
    assert frames == [b"log"] * Lane.BULK.value + [b"waited"]


async def test_closing_an_outbox_wakes_and_refuses_those_who_wait() -> None:
    outbox = Outbox()
    for _ in range(Lane.BULK.value):
        await outbox.put(Lane.BULK, b"log")
    with pytest.RaisesGroup(trio.ClosedResourceError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.put, Lane.BULK, b"late")
            await trio.testing.wait_all_tasks_blocked()
            outbox.close()
    assert [await outbox.next() for _ in range(Lane.BULK.value)] == [b"log"] * Lane.BULK.value
    assert await outbox.next() is None


async def test_close_flushes_what_is_queued_and_carries_code_and_reason() -> None:
    got: list[Any] = []
    ends: list[LinkClosed] = []

    async def server(link: Link) -> None:
        got.extend([await link.receive(), await link.receive()])
        ends.append(await end_of(link))

    async with pair(server) as (link, _):
        await link.send(m.LogChunk("j", 1, b"last words"))
        await link.send(m.Draining())
        await link.close(1001, "stopping")
        await link.close()
        assert link.ended is not None
        with pytest.raises(LinkClosed):
            await link.send(m.Draining())
        with pytest.raises(LinkClosed):
            await link.receive()
    assert set(map(type, got)) == {m.LogChunk, m.Draining}
    assert [(end.code, end.reason) for end in ends] == [(1001, "stopping")]


async def leave(enter: Callable[[Any], Awaitable[None]]) -> LinkClosed:
    """Run `enter(stream)`, which opens and leaves a link; how it ended for the server."""
    near, far = trio.testing.memory_stream_pair()
    ends: list[LinkClosed] = []

    async def serve() -> None:
        async with accept(far) as link:
            ends.append(await end_of(link))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await enter(near)
    return ends[0]


@pytest.mark.parametrize("error", [KeyError("x"), ExceptionGroup("g", [KeyError("x")]), KeyboardInterrupt()])
async def test_the_bodys_exception_comes_out_as_it_was(error: BaseException) -> None:
    async def body(near: Any) -> None:
        with pytest.raises(type(error)) as caught:
            async with connect_over(near):
                raise error
        assert caught.value is error

    assert (await leave(body)).code == 1011


async def test_a_body_that_returns_closes_normally() -> None:
    async def body(near: Any) -> None:
        async with connect_over(near):
            pass

    assert (await leave(body)).code == 1000


async def test_a_cancelled_body_says_goodbye_and_is_cancelled() -> None:
    async def body(near: Any) -> None:
        with trio.CancelScope() as scope:
            async with connect_over(near) as link:
                scope.cancel()
                await link.receive()
        assert scope.cancelled_caught

    end = await leave(body)
    assert (end.code, end.reason) == (1001, "stopping")


async def test_a_cancelled_body_with_a_nursery_says_the_same_goodbye() -> None:
    async def body(near: Any) -> None:
        with trio.CancelScope() as scope:
            async with connect_over(near):
                scope.cancel()
                async with trio.open_nursery() as nursery:  # noqa: ASYNC112 - the nursery is the point
                    nursery.start_soon(trio.sleep_forever)

    assert (await leave(body)).code == 1001


async def test_a_broken_rule_closes_with_1002_and_says_which() -> None:
    seen: list[str] = []

    async def server(link: Link) -> None:
        with pytest.raises(RemoteProtocolError) as caught:
            await link.receive()
        seen.append(str(caught.value))

    async with pair(server) as (link, _):
        await link._websocket.send_message(b"\x92\x63\x80")
        end = await end_of(link)
    assert (end.code, end.reason) == (1002, "unknown message tag 99")
    assert seen == ["unknown message tag 99"]


async def test_a_text_frame_breaks_the_rules() -> None:
    async def server(link: Link) -> None:
        with pytest.raises(RemoteProtocolError, match="text frame"):
            await link.receive()

    async with pair(server) as (link, _):
        await link._websocket.send_message("hello")
        assert (await end_of(link)).code == 1002


async def test_frames_are_small_until_the_peer_is_trusted() -> None:
    big = m.LogChunk("j", 1, b"x" * FRAME_LIMIT_BEFORE_AUTH)

    async def trusting(link: Link) -> None:
        link.trust()
        assert await link.receive() == big

    async with pair(trusting) as (link, _):
        await link.send(big)
        assert (await end_of(link)).code == 1000

    ends: list[LinkClosed] = []

    async def wary(link: Link) -> None:
        ends.append(await end_of(link))

    async with pair(wary) as (link, _):
        await link.send(big)
        end = await end_of(link)
    assert end.code == 1009
    assert ends[0].code == 1009
    assert "65536" in ends[0].reason


async def test_a_peer_that_vanishes_is_1006() -> None:
    async def server(link: Link) -> None:
        assert (await end_of(link)).code == 1006

    async with pair(server) as (link, stream):
        await trio.aclose_forcefully(stream)
        end = await end_of(link)
    assert end.code == 1006
    assert "broke" in end.reason


async def test_senders_learn_at_once_that_the_link_is_over() -> None:
    """Even one that waits for room in a full lane, with nobody reading."""

    async def server(link: Link) -> None:
        await link.receive()
        await trio.aclose_forcefully(link._stream)

    async with pair(server) as (link, _):
        await link.send(m.Draining())
        with pytest.raises(LinkClosed):
            await flood(link)


def stop_taking(stream: Any) -> None:
    """From now on the peer takes nothing of what is written to `stream`."""
    stream.send_stream.send_all_hook = trio.sleep_forever


async def test_nothing_is_queued_for_a_peer_that_is_gone() -> None:
    """Nobody reads or writes when the peer leaves: the very next send says so."""

    async def server(link: Link) -> None:
        await link.receive()

    async with pair(server) as (link, _):
        await link.send(m.Draining())
        await trio.testing.wait_all_tasks_blocked()
        assert link.ended is not None
        assert link.ended.code == 1000
        with pytest.raises(LinkClosed):
            await link.send(m.Draining())


async def test_a_stalled_send_kills_the_link(autojump_clock: Any) -> None:
    async def server(link: Link) -> None:
        assert (await end_of(link)).code == 1006

    async with pair(server, limits=Limits(stall=30)) as (link, stream):
        stop_taking(stream)
        start = trio.current_time()
        with pytest.raises(SendStalled, match="took no byte for 30 s"):
            await flood(link)
        assert trio.current_time() - start == 30
        with pytest.raises(SendStalled):
            await link.receive()


async def test_a_slow_peer_is_no_stall(autojump_clock: Any) -> None:
    """A frame of 1 MiB at 64 KiB in 20 s takes longer than the limit, and arrives."""
    big = m.LogChunk("j", 1, bytes(2**20))

    async def server(link: Link) -> None:
        link.trust()
        assert await link.receive() == big

    async with pair(server, limits=Limits(stall=30)) as (link, stream):
        deliver = stream.send_stream.send_all_hook

        async def deliver_slowly() -> None:
            await trio.sleep(20)
            await deliver()

        stream.send_stream.send_all_hook = deliver_slowly
        start = trio.current_time()
        await link.send(big)
        assert (await end_of(link)).code == 1000
        assert trio.current_time() - start > 300


async def test_a_silent_peer_is_dropped_after_the_limit(autojump_clock: Any) -> None:
    """Half-open: the peer's beats do not arrive, and nothing breaks."""

    async def server(link: Link) -> None:
        start = trio.current_time()
        end = await end_of(link)
        assert trio.current_time() - start == pytest.approx(120, abs=10)
        assert "silent for 120 s" in end.reason

    async with pair(server) as (link, stream):
        stop_taking(stream)
        await end_of(link)


async def test_beats_keep_an_idle_link_alive(autojump_clock: Any) -> None:
    """An hour in which nobody says anything."""

    async def server(link: Link) -> None:
        assert (await end_of(link)).code == 1000

    async with pair(server) as (link, _):
        with trio.move_on_after(3600):
            await link.receive()
        assert link.ended is None
        await link.close()


async def test_our_own_pause_is_nobodys_silence(autojump_clock: Any) -> None:
    """The server reads nothing for ten minutes while the worker sends until TCP holds it back: neither
    end takes the other for dead, and not a message is lost."""
    paused = trio.Event()

    async def server(link: Link) -> None:
        await paused.wait()
        await trio.sleep(600)
        assert link.ended is None
        got = [await link.receive() for _ in range(100)]
        assert got == [m.Building("j", 1, number) for number in range(100)]

    streams = trio.testing.lockstep_stream_pair  # each write waits until it is read
    async with pair(server, limits=Limits(stall=900), streams=streams) as (link, _):
        paused.set()
        for number in range(100):
            await link.send(m.Building("j", 1, number))
        assert (await end_of(link)).code == 1000


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /proto HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET /proto HTTP/1.1\r\nHost: \xff\xfe\r\nUpgrade: websocket\r\nConnection: \xc3\xa9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n",
        b"",
    ],
)
async def test_strangers_without_a_websocket_are_turned_away(request_bytes: bytes) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await ours.send_all(request_bytes)
    await ours.send_stream.aclose()
    with pytest.raises(ConnectFailed):
        async with accept(theirs):
            raise AssertionError


async def test_another_path_is_not_found() -> None:
    ours, theirs = trio.testing.memory_stream_pair()

    async def serve() -> None:
        with pytest.raises(ConnectFailed, match="asked for /elsewhere"):
            async with accept(theirs):
                raise AssertionError

    async def upgrade(nursery: trio.Nursery, stream: Any) -> Any:
        return await trio_websocket.wrap_client_stream(nursery, stream, "x", "/elsewhere")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with pytest.raises(ConnectFailed, match="HTTP 404"):
            async with link_over(ours, upgrade, allowed=m.FROM_SERVER, limits=Limits(), peer="x"):
                raise AssertionError


async def test_a_peer_that_never_finishes_the_upgrade_is_dropped(autojump_clock: Any) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await ours.send_all(b"GET /proto HTTP/1.1\r\n")
    with pytest.raises(ConnectFailed, match="within 15 s"):
        async with accept(theirs):
            raise AssertionError
    assert trio.current_time() == 15


async def test_frames_that_are_no_websocket_close_the_link() -> None:
    async def server(link: Link) -> None:
        assert (await end_of(link)).code in {1002, 1006}

    async with pair(server) as (link, stream):
        await stream.send_all(b"\xff" * 64)
        await end_of(link)


async def test_a_ping_after_our_close_does_not_crash_us() -> None:
    """The library's reader raises for it; that must end in a closed link and in nothing else."""
    ours, theirs = trio.testing.memory_stream_pair()

    async def serve() -> None:
        async with accept(theirs):
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await ours.send_all(
            b"GET /proto HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        received = b""
        while b"\r\n\r\n\x88" not in received:
            received += await ours.receive_some()
        await ours.send_all(b"\x89\x80\0\0\0\0")
        while await ours.receive_some():
            pass


class CancelAt(trio.abc.Instrument):
    """Cancels `scope` after the k-th step of `task`."""

    def __init__(self, task: trio.lowlevel.Task, step: int, scope: trio.CancelScope) -> None:
        self.task, self.left, self.scope = task, step, scope

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


async def test_cancelled_at_every_step_both_ends_come_to_rest(autojump_clock: Any) -> None:
    """Nothing hangs, nothing is wrapped, and what the server got is a beginning of what was sent."""
    sent = [m.Building("j", 1, number) for number in range(3)]
    finished = False
    step = 0
    while not finished:
        step += 1
        near, far = trio.testing.memory_stream_pair()
        got: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, far, got)
            start = trio.current_time()
            with trio.CancelScope() as scope:
                instrument = CancelAt(trio.lowlevel.current_task(), step, scope)
                trio.lowlevel.add_instrument(instrument)
                async with connect_over(near) as link:
                    for message in sent:
                        await link.send(message)
                    await link.receive()
            trio.lowlevel.remove_instrument(instrument)
            finished = not scope.cancelled_caught
            assert trio.current_time() - start < 5
            await trio.aclose_forcefully(near)
        assert got == sent[: len(got)]
    assert got == sent
    assert step > 10


async def collect(stream: Any, got: list[Any]) -> None:
    """A server that answers the third message."""
    try:
        async with accept(stream) as link:
            async for message in link:
                got.append(message)
                if len(got) == 3:
                    await link.send(m.Draining())
    except (LinkClosed, ConnectFailed):
        pass
