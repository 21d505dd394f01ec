"""The live hub: what a watcher is told, and that nobody waits for it."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gradient.graph.moves import BuildChange, Moves
from gradient.model import BuildStatus, EvaluationStatus
from gradient.sessions.live import MAX_PENDING_LOG, LiveHub, LogText, News, Progress, Watch


def builds(*ids: int) -> Moves:
    moves = Moves()
    moves.change(BuildChange(i, BuildStatus.QUEUED, BuildStatus.BUILDING) for i in ids)
    return moves


def is_stirred(watch: Watch) -> bool:
    return watch._stirred.is_set()


def test_only_the_builds_a_watcher_named() -> None:
    hub = LiveHub()
    with hub.watch(evaluation=1, builds={10, 11}) as watch:
        hub.publish(builds(11, 12))
        hub.publish(builds(12))
        assert watch.take() == News(builds=frozenset({11}))
        assert watch.take() == News()
        watch.builds.add(12)
        hub.publish(builds(12))
        assert watch.take().builds == {12}


def test_only_the_evaluation_it_watches() -> None:
    hub = LiveHub()
    with hub.watch(evaluation=1) as ours, hub.watch(evaluation=2) as other, hub.watch() as neither:
        hub.publish(Moves(evaluations={1: EvaluationStatus.BUILDING}, progressed={1}))
        hub.publish_progress(1, Progress(3, None, 7))
        assert ours.take() == News(evaluation=True, progressed=True, progress=Progress(3, None, 7))
        assert not is_stirred(other)
        assert not is_stirred(neither)


def test_a_burst_is_one_piece_of_news() -> None:
    hub = LiveHub()
    with hub.watch(builds={1, 2}) as watch:
        for _ in range(1000):
            hub.publish(builds(1, 2))
        assert watch.take() == News(builds=frozenset({1, 2}))


def test_log_text_keeps_its_order_and_has_a_bound() -> None:
    hub = LiveHub()
    with hub.watch(builds={1}) as watch:
        hub.publish_log(1, b"first")
        hub.publish_log(2, b"of another build")
        hub.publish_log(1, b"second")
        assert watch.take().log == (LogText(1, b"first"), LogText(1, b"second"))
        for _ in range(MAX_PENDING_LOG // 1000 + 5):
            hub.publish_log(1, b"x" * 1000)
        news = watch.take()
        assert news.lagged
        assert sum(len(text.data) for text in news.log) <= MAX_PENDING_LOG
        hub.publish_log(1, b"again")
        assert watch.take() == News(log=(LogText(1, b"again"),))


async def test_a_reader_sleeps_until_there_is_news(nursery: trio.Nursery) -> None:
    hub = LiveHub()
    taken: list[News] = []

    async def reader(watch: Watch) -> None:
        while not watch.closed:
            await watch.wait()
            taken.append(watch.take())

    with hub.watch(builds={1}) as watch:
        nursery.start_soon(reader, watch)
        await wait_all_tasks_blocked()
        assert taken == []
        hub.publish(builds(1))
        await wait_all_tasks_blocked()
        assert taken == [News(builds=frozenset({1}))]
        hub.close()
        await wait_all_tasks_blocked()
        assert watch.closed


async def test_a_closed_hub_ends_watches_to_come(autojump_clock: MockClock) -> None:
    hub = LiveHub()
    hub.close()
    with hub.watch(evaluation=1) as watch, trio.fail_after(1):
        await watch.wait()
        assert watch.closed


def test_a_watch_that_ended_is_forgotten() -> None:
    hub = LiveHub()
    with pytest.raises(RuntimeError), hub.watch(builds={1}) as watch:
        raise RuntimeError
    hub.publish(builds(1))
    assert not is_stirred(watch)
