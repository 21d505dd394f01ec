"""Following an evaluation: lost connections, silence, and giving up. A jumped clock, a scripted server."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import attrs
import pytest
import trio
import trio.testing

from gradient.cli.api import Api, ServerRefused
from gradient.cli.faults import ServerUnreachable
from gradient.cli.follow import AWAY_LIMIT, SILENCE, Follower
from gradient.cli.progress import Happening, Progress, Waits
from tests.unit.cli_support import build, snapshot
from tests.unit.test_cli_progress import NEEDS, at, event, first

END = event("end", status="Completed")
LOST = "lost"  # the connection breaks
SILENT = "silent"  # nothing comes any more


@attrs.define(eq=False)
class ScriptedApi:
    """Gives one script a connection; the last one again and again. A number is seconds of pause."""

    scripts: list[Sequence[Any]]
    connections: int = 0
    aborted_at: float | None = None
    tails: list[int] = attrs.field(factory=list)
    _script: list[Any] = attrs.field(factory=list)

    @asynccontextmanager
    async def events(self, evaluation: int) -> AsyncIterator[ScriptedApi]:
        await trio.lowlevel.checkpoint()
        assert evaluation == 7
        self.connections += 1
        self._script = list(self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0])
        yield self

    async def next(self) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        step = self._script.pop(0) if self._script else LOST
        if step == LOST:
            raise ServerUnreachable("the server ended the stream of events")
        if step == SILENT:
            await trio.sleep_forever()
        if isinstance(step, int):
            await trio.sleep(step)
            return {}
        return cast(dict[str, Any], step)

    async def abort(self, evaluation: int) -> None:
        await trio.lowlevel.checkpoint()
        self.aborted_at = trio.current_time()

    async def log_tail(self, build: int, lines: int) -> str:
        await trio.lowlevel.checkpoint()
        self.tails.append(build)
        return "the line before\nthe last line\n"


@attrs.define(eq=False)
class RecordingDisplay:
    happenings: list[Happening] = attrs.field(factory=list)
    closed: bool = False

    def happened(self, happenings: Sequence[Happening]) -> None:
        self.happenings += happenings

    def tick(self) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed = True


def follower(api: ScriptedApi, give_up_after: float = math.inf) -> Follower:
    return Follower(cast(Api, api), 7, Progress(0.0), RecordingDisplay(), give_up_after)


async def test_it_ends_with_the_evaluation(autojump_clock: trio.testing.MockClock) -> None:
    api = ScriptedApi([[first(), 1, END]])
    one = follower(api)
    await one.run()
    assert one.progress.status == "Completed"
    assert cast(RecordingDisplay, one.display).closed
    assert api.connections == 1


async def test_a_lost_connection_is_made_again(autojump_clock: trio.testing.MockClock) -> None:
    api = ScriptedApi([[first(), 1, LOST], [LOST], [first(), END]])
    await follower(api).run()
    assert api.connections == 3


async def test_a_silent_connection_is_a_lost_one(autojump_clock: trio.testing.MockClock) -> None:
    api = ScriptedApi([[first(), SILENT], [first(), END]])
    await follower(api).run()
    assert SILENCE <= trio.current_time() < SILENCE + 1


async def test_signs_of_life_keep_a_quiet_connection(autojump_clock: trio.testing.MockClock) -> None:
    api = ScriptedApi([[first(), *[15] * 100, END]])
    await follower(api).run()
    assert api.connections == 1
    assert trio.current_time() == pytest.approx(1500)


async def test_a_reader_that_lags_looks_afresh(autojump_clock: trio.testing.MockClock) -> None:
    api = ScriptedApi([[first(), event("lagged"), event("end", status="Failed")], [first(), END]])
    one = follower(api)
    await one.run()
    assert one.progress.status == "Completed"


async def test_a_server_that_stays_away_is_a_fault(autojump_clock: trio.testing.MockClock) -> None:
    one = follower(ScriptedApi([[first()], [LOST]]))
    with pytest.RaisesGroup(pytest.RaisesExc(ServerUnreachable, match="evaluation 7 goes on")):
        await one.run()
    waits = Waits("waits for the server, which does not answer, for 60 s at most")
    assert cast(RecordingDisplay, one.display).happenings[-1:] == [waits]
    assert AWAY_LIMIT < trio.current_time() < AWAY_LIMIT + 10


async def test_events_that_make_no_sense_are_a_fault(autojump_clock: trio.testing.MockClock) -> None:
    one = follower(ScriptedApi([[event("snapshot")]]))
    with pytest.RaisesGroup(ServerRefused):
        await one.run()


def waiting() -> dict[str, Any]:
    return event("evaluation", status="Waiting", waiting=NEEDS)


async def test_it_gives_up_on_a_worker_that_does_not_come(autojump_clock: trio.testing.MockClock) -> None:
    aborted = event("end", status="Aborted")
    api = ScriptedApi(
        [[first(), 10, waiting(), *[15] * 10], [event("snapshot", **snapshot("Waiting")), aborted]]
    )
    one = follower(api, give_up_after=60)
    await one.run()
    assert api.aborted_at == pytest.approx(70, abs=1)
    assert one.gave_up == NEEDS["words"]
    assert one.progress.status == "Aborted"


async def test_a_worker_that_comes_in_time_ends_the_waiting(autojump_clock: trio.testing.MockClock) -> None:
    building = event("evaluation", status="Building", waiting=None)
    api = ScriptedApi([[first(), waiting(), *[15] * 3, building, *[15] * 10, waiting(), 15, building, END]])
    one = follower(api, give_up_after=60)
    await one.run()
    assert api.aborted_at is None
    assert one.gave_up is None


async def test_without_a_limit_it_waits(autojump_clock: trio.testing.MockClock) -> None:
    api = ScriptedApi([[first(), waiting(), *[15] * 100, END]])
    await follower(api).run()
    assert api.aborted_at is None


async def test_the_log_of_a_failure_is_fetched_unless_more_of_it_came(
    autojump_clock: trio.testing.MockClock,
) -> None:
    failed = [
        event("build", build=1, name="a", status="FailedPermanent", at=at(1)),
        event("log", build=2, text="1\n2\n3\n"),
        event("build", build=2, name="b", status="FailedPermanent", at=at(1)),
    ]
    api = ScriptedApi([[first(builds=[build(1, "a", "Queued")]), *failed, END]])
    one = follower(api)
    await one.run()
    assert api.tails == [1, 2]
    assert one.progress.builds[1].tail.lines == ("the line before", "the last line")
    assert one.progress.builds[2].tail.lines == ("1", "2", "3")
