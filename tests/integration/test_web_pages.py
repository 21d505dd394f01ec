"""The pages: what a person reads on them, and that nothing from outside becomes markup."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from gradient.graph.build_failures import BuildFailed
from gradient.graph.evaluations import CreateEvaluation, ParkEvaluation
from gradient.graph.messages import AddMessage
from gradient.model import CachedSource, EvaluationStatus, FailureKind, MessageLevel, Repository
from gradient.passes.pool import Worker
from gradient.wire.messages import Capabilities
from tests.graph.world import LIMITS, START, WORKER, out
from tests.integration.web_support import Web


class Balance(HTMLParser):
    """Fails on a tag that is not closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


async def page(web: Web, path: str) -> tuple[str, str]:
    """The markup of a page, checked, and its words."""
    answer = await web.get(path)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    html = answer.body.decode()
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    assert "script" not in parser.tags
    body = html.partition("<body>")[2]
    return html, unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body)))


async def test_the_first_page_of_an_empty_server(web: Web) -> None:
    html, words = await page(web, "/")
    assert "None yet." in words
    assert "None is connected." in words
    assert f"extra-substituters = {web.url}/cache/main" in words
    assert f"extra-trusted-public-keys = {web.site.cache.public_key}" in words
    assert "refresh" not in html


async def test_the_first_page_lists_evaluations_and_workers(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["lib"], "lib": []}, entries=["top"])
    await world.start("lib")
    web.site.workers.add(Worker(WORKER, "builder-7", frozenset(), Capabilities(), START))
    html, words = await page(web, "/")
    assert f'href="/evaluations/{evaluation}"' in html
    assert "git+https://example.org/x 1 Evaluating 2 builds: 1 building, 1 waiting" in words
    assert "builder-7" in words
    assert '<meta http-equiv="refresh"' in html


async def test_an_aborted_evaluation_waits_for_nothing(web: Web) -> None:
    world = web.world
    other, evaluation = await world.evaluation(), await world.evaluation()
    await world.record(other, {"shared": []}, entries=["shared"])
    await world.record(evaluation, {"shared": [], "own": []}, entries=["shared", "own"])
    await world.start("shared")
    await world.abort(evaluation)
    _, words = await page(web, f"/evaluations/{evaluation}")
    assert "Aborted · 2 builds: 1 failed or not tried, 1 not waited for" in words


async def test_a_failed_evaluation_shows_log_cause_and_message(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    graph = {"top": ["lib"], "lib": [], "fine": []}
    await world.record(evaluation, graph, entries=["top", "fine"])
    await world.apply(AddMessage(evaluation, MessageLevel.ERROR, "nix-eval:broken", "undefined variable"))
    await world.build("fine")
    await world.start("lib")
    await world.log("lib", b"".join(b"line %d\n" % i for i in range(100)))
    await world.log("lib", b"\x1b[31merror:\x1b[0m no such file\n")
    await world.apply(BuildFailed(world.open.pop("lib"), FailureKind.PERMANENT, "exit code 2", LIMITS))
    await world.end_stream(evaluation)
    html, words = await page(web, f"/evaluations/{evaluation}")
    lib = await world.id("lib")
    assert "Failed · 3 builds: 1 done, 2 failed or not tried" in words
    assert f"fine built {out('fine')}" in words
    assert out("top") not in html  # there is no such path yet
    assert " broken: undefined variable" in words
    assert "broken does not evaluate" in words
    assert "lib failed" in words
    assert "exit code 2" in words
    assert "line 98 line 99 error: no such file" in words
    assert "line 70 " not in words
    assert f'<a href="#build-{lib}">lib</a> failed' in html
    assert f'id="build-{lib}"' in html
    assert f"/api/v1/builds/{lib}/log" in html
    assert "refresh" not in html


@pytest.mark.parametrize(("rev", "words"), [("0123456789abcdef", "at 0123456789ab"), (None, "(no commit)")])
async def test_an_uploaded_source_is_called_as_whoever_sent_it_calls_it(
    web: Web, rev: str | None, words: str
) -> None:
    source = CachedSource(f"/nix/store/{'0' * 32}-source", rev=rev)
    order = CreateEvaluation("main", cached=source, wildcards=("hello",), comment="my-flake")
    evaluation = await web.world.apply(order)
    for path in ("/", f"/evaluations/{evaluation}"):
        assert f"my-flake#hello {words}" in (await page(web, path))[1]


async def test_an_evaluation_that_waits_says_why(web: Web) -> None:
    evaluation = await web.world.evaluation()
    reason = {"kind": "eval_workers", "capability": "eval", "connected_workers": 0}
    await web.world.apply(ParkEvaluation(evaluation, EvaluationStatus.EVALUATING_DERIVATION, reason))
    html, words = await page(web, f"/evaluations/{evaluation}")
    assert "It waits for a worker that can evaluate (0 workers connected)." in words
    assert '<meta http-equiv="refresh"' in html
    assert "waits for a worker that can evaluate" in (await page(web, "/"))[1]


EVIL = "<script>alert(1)</script>\"'&"


async def test_nothing_from_outside_becomes_markup(web: Web) -> None:
    world = web.world
    source = Repository(f"git+https://example.org/x?{EVIL}")
    evaluation = await world.apply(CreateEvaluation("main", source))
    await world.start_evaluation(evaluation)
    await world.record(evaluation, {"evil": []}, entries=["evil"])
    await world.apply(AddMessage(evaluation, MessageLevel.ERROR, f"nix-eval:{EVIL}", EVIL))
    await world.start("evil")
    await world.log("evil", EVIL.encode() + b"\x00\x07")
    await world.apply(BuildFailed(world.open.pop("evil"), FailureKind.PERMANENT, EVIL, LIMITS))
    web.site.workers.add(Worker(WORKER, EVIL, frozenset(), Capabilities(), START))
    for path in (f"/evaluations/{evaluation}", "/"):
        html, words = await page(web, path)
        assert "<script" not in html
        assert EVIL in words


@pytest.mark.parametrize("path", ["/evaluations/99", "/evaluations/x", "/nothing"])
async def test_a_page_that_does_not_exist(web: Web, path: str) -> None:
    answer = await web.get(path)
    assert answer.status == 404
    assert b"To the evaluations" in answer.body
