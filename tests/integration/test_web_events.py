"""Live events and followed logs: from a change of the graph to a line at a client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gradient.graph.builds import BuildCompleted
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.evaluations import ParkEvaluation
from gradient.graph.messages import AddMessage
from gradient.http.client import Download
from gradient.model import EvaluationStatus, MessageLevel
from gradient.sessions.live import MAX_PENDING_LOG, Progress
from gradient.web import events, logs
from tests.graph.world import LIMITS, nar, out
from tests.integration.web_support import Web, lines
from tests.patience import PATIENCE, until

CHAIN = {"top": ["lib"], "lib": []}


@attrs.define
class Reader:
    """The lines of a stream, one at a time."""

    download: Download
    _rest: bytes = b""

    async def line(self) -> bytes:
        with trio.fail_after(PATIENCE):
            while b"\n" not in self._rest:
                self._rest += await anext(self.download)
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def event(self, *kinds: str) -> Mapping[str, Any]:
        """The next event of one of these kinds, or of any; blank lines are passed over."""
        with trio.fail_after(PATIENCE):
            while True:
                line = await self.line()
                if line and ((event := json.loads(line))["event"] in kinds or not kinds):
                    return dict(event)

    async def rest(self) -> list[Mapping[str, Any]]:
        """Every event until the stream ends."""
        with trio.fail_after(PATIENCE):
            async for piece in self.download:
                self._rest += piece
        return lines(self._rest)


@asynccontextmanager
async def stream(web: Web, evaluation: int) -> AsyncIterator[Reader]:
    async with web.client.download(f"{web.url}/api/v1/evaluations/{evaluation}/events") as download:
        assert download.status == 200
        yield Reader(download)


async def test_a_build_from_queued_to_the_end(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, CHAIN, entries=["top"])
    lib = await world.id("lib")
    async with stream(web, evaluation) as reader:
        snapshot = await reader.event()
        assert (snapshot["event"], snapshot["evaluation"]) == ("snapshot", evaluation)
        assert {build["name"] for build in snapshot["builds"]} == {"top", "lib"}
        await world.end_stream(evaluation)
        assert (await reader.event("evaluation"))["status"] == "Building"
        await world.start("lib")
        event = await reader.event("build")
        assert (event["build"], event["name"], event["status"]) == (lib, "lib", "Building")
        assert (event["worker"], event["at"]) == ("w", world.now.isoformat())
        await world.log("lib", b"compiling\n")
        assert await reader.event("log") == {"event": "log", "build": lib, "text": "compiling\n"}
        await world.commit(nar(out("lib")))
        await world.apply(BuildCompleted(world.open.pop("lib"), LIMITS))
        await world.build("top", references=["lib"])
        last = await reader.rest()
    assert {event["name"]: event["status"] for event in last if event["event"] == "build"} == {
        "lib": "Completed",
        "top": "Completed",
    }
    assert [event["status"] for event in last if event["event"] == "evaluation"][-1] == "Completed"
    assert last[-1] == {"event": "end", "status": "Completed"}


async def test_a_failure_names_its_cause_for_everything_above(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, CHAIN, entries=["top"])
    await world.end_stream(evaluation)
    async with stream(web, evaluation) as reader:
        await reader.event("snapshot")
        await world.fail("lib")
        last = await reader.rest()
    builds = {event["name"]: event for event in last if event["event"] == "build"}
    assert (builds["lib"]["status"], builds["lib"]["error"]) == ("FailedPermanent", "it broke")
    assert (builds["top"]["status"], builds["top"]["reason"]) == ("DependencyFailed", "lib failed")
    assert last[-1] == {"event": "end", "status": "Failed"}


async def test_what_an_evaluation_that_has_ended_sends(web: Web) -> None:
    evaluation = await web.world.evaluation()
    await web.world.apply(AbortEvaluation(evaluation, "enough"))
    body = (await web.get(f"/api/v1/evaluations/{evaluation}/events")).body
    assert [event["event"] for event in lines(body)] == ["snapshot", "end"]


async def test_builds_named_while_it_evaluates(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    async with stream(web, evaluation) as reader:
        assert (await reader.event())["builds"] == []
        await world.record(evaluation, CHAIN, entries=["top"])
        # `lib` may start at once; `top` waits, and that it exists the counters say.
        assert (await reader.event("evaluation"))["counters"]["named"] == 2
        event = await reader.event("build")
        assert (event["name"], event["status"]) == ("lib", "Queued")
        await world.start("lib")
        assert (await reader.event("build"))["status"] == "Building"


async def test_messages_progress_and_waiting(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.apply(AddMessage(evaluation, MessageLevel.NOTICE, "nix", "before"))
    async with stream(web, evaluation) as reader:
        assert [m["message"] for m in (await reader.event())["messages"]] == ["before"]
        await world.apply(AddMessage(evaluation, MessageLevel.WARNING, "nix", "deprecated"))
        assert await reader.event() == {
            "event": "message",
            "level": "Warning",
            "source": "nix",
            "message": "deprecated",
        }
        web.site.live.publish_progress(evaluation, Progress(3, 10, 70))
        assert await reader.event() == {
            "event": "progress",
            "attributes_done": 3,
            "attributes_total": 10,
            "derivations": 70,
        }
        reason = {"kind": "eval_workers", "capability": "fetch", "connected_workers": 0}
        await world.apply(ParkEvaluation(evaluation, EvaluationStatus.EVALUATING_DERIVATION, reason))
        event = await reader.event()
        assert (event["event"], event["status"]) == ("evaluation", "Waiting")
        assert event["waiting"]["words"].startswith("waits for a worker that can fetch flakes")


async def test_other_evaluations_are_not_heard(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT", 0.05)
    world = web.world
    quiet, loud = await world.evaluation(), await world.evaluation()
    async with stream(web, quiet) as reader:
        await reader.event("snapshot")
        await world.record(loud, CHAIN, entries=["top"])
        await world.start("lib")
        await world.log("lib", b"not for you\n")
        # Only blank lines come, which say that the stream lives.
        assert [await reader.line() for _ in range(3)] == [b"", b"", b""]


async def test_a_burst_of_changes_is_read_once_and_shown_as_it_is(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PACE", 1000)
    world = web.world
    evaluation = await world.evaluation()
    graph: dict[str, list[str]] = {f"n{i}": [] for i in range(10)}
    await world.record(evaluation, graph, entries=list(graph))
    await world.end_stream(evaluation)
    async with stream(web, evaluation) as reader:
        await reader.event("snapshot")
        for name in graph:
            await world.build(name)
        # The first change is read at once; the next read is due when the evaluation ends.
        seen = [event for event in await reader.rest() if event["event"] == "build"]
    assert {event["name"] for event in seen if event["status"] == "Completed"} == set(graph)
    assert len(seen) <= len(graph) + 1


async def test_builds_of_one_read_come_as_they_happened(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PACE", 1000)
    world = web.world
    evaluation = await world.evaluation()
    graph: dict[str, list[str]] = {"d": ["a"], "a": ["b"], "b": ["c"], "c": []}
    await world.record(evaluation, graph, entries=["d"])
    async with stream(web, evaluation) as reader:
        await reader.event("snapshot")
        await world.end_stream(evaluation)
        await reader.event("evaluation")
        for name in ("c", "b", "a", "d"):
            await world.build(name)
        rest = await reader.rest()
    built = [e["name"] for e in rest if e["event"] == "build" and e["status"] == "Completed"]
    assert built[-4:] == ["c", "b", "a", "d"]
    assert [e["event"] for e in rest[-2:]] == ["evaluation", "end"]


async def test_a_server_that_begins_to_stop_says_so(web: Web) -> None:
    evaluation = await web.world.evaluation()
    async with stream(web, evaluation) as reader:
        await reader.event("snapshot")
        web.site.live.stop()
        assert await reader.event() == {"event": "stopping"}
    async with stream(web, evaluation) as reader:
        assert [(await reader.event())["event"] for _ in range(2)] == ["snapshot", "stopping"]


async def test_a_reader_that_is_too_slow_for_the_log_is_told(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.start("a")
    build = await world.id("a")
    async with stream(web, evaluation) as reader:
        await reader.event("snapshot")
        # All before the stream's task runs: nothing here waits.
        for _ in range(MAX_PENDING_LOG // 1000 + 10):
            web.site.live.publish_log(build, b"x" * 999 + b"\n")
        assert await reader.event("lagged", "log") == {"event": "lagged"}
        assert (await reader.event("log"))["build"] == build


async def test_a_character_cut_in_two_by_the_log(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    build = await world.id("a")
    async with stream(web, evaluation) as reader:
        await reader.event("snapshot")
        for piece in ("ä".encode()[:1], "ä".encode()[1:]):
            web.site.live.publish_log(build, piece)
        text = ""
        while text != "ä":
            text += (await reader.event("log"))["text"]


async def test_a_stream_whose_client_left_is_forgotten(web: Web) -> None:
    evaluation = await web.world.evaluation()
    async with stream(web, evaluation) as reader:
        await reader.event("snapshot")
        assert len(web.site.live._watches) == 1
    await until(lambda: not web.site.live._watches)


# --- logs -----------------------------------------------------------------------------------------


async def logged(web: Web, *pieces: bytes) -> int:
    """A running build `a` that has written this; its id."""
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    await world.start("a")
    for piece in pieces:
        await world.log("a", piece)
    return await world.id("a")


async def finish(web: Web) -> None:
    await web.world.commit(nar(out("a")))
    await web.world.apply(BuildCompleted(web.world.open.pop("a"), LIMITS))


async def test_a_whole_log_and_its_end(web: Web) -> None:
    rows = [b"line %d\n" % i for i in range(50)]
    build = await logged(web, *rows)
    whole = await web.get(f"/api/v1/builds/{build}/log")
    assert (whole.status, whole.body) == (200, b"".join(rows))
    assert (await web.get(f"/api/v1/builds/{build}/log?tail=2")).body == b"line 48\nline 49\n"
    for bad in ("0", "-1", "x", "1000000000000"):
        assert (await web.get(f"/api/v1/builds/{build}/log?tail={bad}")).status == 400


async def test_a_log_that_does_not_exist_yet(web: Web) -> None:
    build = await logged(web)
    assert (await web.get(f"/api/v1/builds/{build}/log")).status == 404


@pytest.mark.parametrize("tail", ["", "&tail=1"])
async def test_following_a_log_to_its_end(web: Web, tail: str) -> None:
    build = await logged(web, b"one\n", b"two\n")
    path = f"{web.url}/api/v1/builds/{build}/log?follow=1{tail}"
    async with web.client.download(path) as download:
        received = b""
        for text in (b"three\n", b"four\n"):
            await web.world.log("a", text)
            while not received.endswith(text):
                with trio.fail_after(PATIENCE):
                    received += await anext(download)
        await web.world.log("a", b"last")
        await finish(web)
        with trio.fail_after(PATIENCE):
            async for piece in download:
                received += piece
    start = b"two\n" if tail else b"one\ntwo\n"
    assert received == start + b"three\nfour\nlast"


async def test_following_a_build_that_has_not_begun(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    async with web.client.download(f"{web.url}/api/v1/builds/{await world.id('a')}/log?follow=1") as download:
        await world.start("a")
        await world.log("a", b"hello\n")
        await finish(web)
        with trio.fail_after(PATIENCE):
            assert await download.read(1000) == b"hello\n"


async def test_following_a_build_that_never_ran(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, CHAIN, entries=["top"])
    await world.fail("lib")
    with trio.fail_after(PATIENCE):
        answer = await web.get(f"/api/v1/builds/{await world.id('top')}/log?follow=1")
    assert (answer.status, answer.body) == (200, b"")


async def test_log_text_that_is_stored_late_is_not_lost(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOOK", 0.05)
    build = await logged(web, b"one\n")
    async with web.client.download(f"{web.url}/api/v1/builds/{build}/log?follow=1") as download:
        assert await anext(download) == b"one\n"
        # Announced before it is stored: the look that this causes finds nothing.
        web.site.live.publish_log(build, b"two\n")
        await wait_all_tasks_blocked(0.01)
        await web.world.connection.execute(
            "INSERT INTO build_log_chunk SELECT id, 1, 'two' FROM build_attempt"
        )
        with trio.fail_after(PATIENCE):
            assert await anext(download) == b"two"
