"""Abort and retry of a build over HTTP: answers, refusals, and which evaluation is meant."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.web_support import Web

CHAIN = {"top": ["mid"], "mid": ["bad"], "bad": []}


async def building(web: Web) -> int:
    evaluation = await web.world.evaluation()
    await web.world.record(evaluation, CHAIN, entries=["top"])
    await web.world.end_stream(evaluation)
    return evaluation


async def act(web: Web, name: str, action: str, body: Any = None) -> tuple[int, Any]:
    return await web.call("POST", f"/api/v1/builds/{await web.world.id(name)}/{action}", body)


async def test_abort_and_retry(web: Web) -> None:
    evaluation = await building(web)
    build = await web.world.id("bad")
    answer = {"build": build, "evaluation": evaluation}
    assert await act(web, "bad", "abort") == (202, {**answer, "dependency_failed": 2})
    _, shown = await web.call("GET", f"/api/v1/evaluations/{evaluation}")
    assert shown["status"] == "Failed"
    assert {row["name"]: (row["status"], row["reason"]) for row in shown["builds"]} == {
        "bad": ("Aborted", None),
        "mid": ("DependencyFailed", "bad was aborted"),
        "top": ("DependencyFailed", "bad was aborted"),
    }
    assert shown["messages"] == [
        {"level": "Notice", "source": "abort", "message": "bad was aborted by administrator"}
    ]
    body = {"evaluation": evaluation}
    assert await act(web, "bad", "retry", body) == (202, {**answer, "reopened": True, "retried": 3})
    _, shown = await web.call("GET", f"/api/v1/evaluations/{evaluation}")
    assert (shown["status"], shown["finished_at"], shown["counters"]["active"]) == ("Building", None, 3)


async def test_whoever_acts_twice_is_told_twice(web: Web) -> None:
    evaluation = await building(web)
    for action in ("abort", "retry", "abort"):
        assert (await act(web, "bad", action))[0] == 202
    _, shown = await web.call("GET", f"/api/v1/evaluations/{evaluation}")
    assert [message["source"] for message in shown["messages"]] == ["abort", "retry", "abort"]


@pytest.mark.parametrize(
    ("action", "body", "status", "words"),
    [
        ("retry", None, 409, "bad is Queued"),
        ("abort", {"evaluation": 99}, 404, "no build"),
        ("abort", {"evaluation": "x"}, 400, "`evaluation` must be a whole number"),
        ("abort", {"build": 1}, 400, "unknown fields: `build`"),
        ("abort", {"half\ud83d\n": 1}, 400, "unknown fields: `half\N{REPLACEMENT CHARACTER} `"),
        (
            "retry",
            {"\x1b[2J\0": 1},
            400,
            "unknown fields: `\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}`",
        ),
        ("abort", [], 400, "must be a JSON object"),
    ],
)
async def test_refusals_in_one_line(web: Web, action: str, body: Any, status: int, words: str) -> None:
    await building(web)
    found, answer = await act(web, "bad", action, body)
    assert found == status
    assert words in answer["error"]


async def test_what_is_no_build(web: Web) -> None:
    for action in ("abort", "retry"):
        status, answer = await web.call("POST", f"/api/v1/builds/99/{action}")
        assert (status, answer) == (404, {"error": "there is no build 99"})


async def test_without_an_evaluation_a_live_one_is_meant_then_the_newest(web: Web) -> None:
    first, second = await building(web), await building(web)
    await web.call("POST", f"/api/v1/evaluations/{second}/abort")
    assert (await act(web, "bad", "abort"))[1]["evaluation"] == first
    assert (await act(web, "bad", "retry"))[1]["evaluation"] == second
