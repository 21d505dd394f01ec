"""The API over real sockets: evaluations, builds, access, errors."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from gradient.graph.assignments import ClaimBuild
from gradient.graph.build_failures import BuildFailed
from gradient.graph.evaluations import ParkEvaluation
from gradient.graph.messages import AddMessage
from gradient.model import EvaluationStatus, FailureKind, JobKind, MessageLevel
from gradient.passes.pool import ActiveJob, Worker
from gradient.wire.messages import Capabilities, WorkerCapabilities
from tests.graph.world import LIMITS, START, WORKER, drv, out
from tests.integration.web_support import Web, item, store_path

REPOSITORY = {"url": "git+https://example.org/x?ref=main"}
COMMIT = "0123456789" * 4


# --- access ---------------------------------------------------------------------------------------

WRITES = [
    "/api/v1/evaluations",
    "/api/v1/evaluations/1/abort",
    "/api/v1/builds/1/abort",
    "/api/v1/builds/1/retry",
    "/api/v1/uploads",
]


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize("token", ["", "guess", "x" * 64])
async def test_every_write_needs_a_token(web: Web, path: str, token: str) -> None:
    status, answer = await web.call("POST", path, {}, token=token)
    assert status == 401
    assert "token" in answer["error"]
    assert token == "" or token not in answer["error"]


async def test_a_grant_is_for_uploads_only(web: Web) -> None:
    expires = int(web.site.clock().timestamp()) + 3600
    grant = web.site.grants.issue("upload", "build:1", expires)
    assert (await web.upload(item("a", b"x"), token=grant)).status == 200
    assert (await web.call("POST", "/api/v1/evaluations", {}, token=grant))[0] == 401
    other = web.site.grants.issue("download", "build:1", expires)
    refused = await web.upload(item("b", b"x"), token=other)
    assert (refused.status, b"not for 'upload'" in refused.body) == (401, True)
    late = web.site.grants.issue("upload", "build:1", expires - 3601)
    assert b"expired" in (await web.upload(item("b", b"x"), token=late)).body


async def test_a_revoked_token_stops_working(web: Web) -> None:
    assert (await web.call("POST", "/api/v1/evaluations", {"repository": REPOSITORY}))[0] == 201
    await web.world.connection.execute("UPDATE api_token SET revoked_at = now()")
    gate = web.site.gate
    # At once for a server that has not just seen it; the rest wait out what is remembered.
    gate._remembered.clear()
    assert (await web.call("POST", "/api/v1/evaluations", {"repository": REPOSITORY}))[0] == 401


# --- evaluations ----------------------------------------------------------------------------------


async def test_an_evaluation_of_a_repository(web: Web) -> None:
    body = {
        "repository": {**REPOSITORY, "commit": COMMIT},
        "wildcards": ["packages.*.*", "!packages.x86_64-linux.big"],
        "comment": "by hand",
        "full_walk": True,
    }
    status, answer = await web.call("POST", "/api/v1/evaluations", body)
    evaluation = answer["evaluation"]
    assert (status, answer["url"]) == (201, f"{web.url}/evaluations/{evaluation}")
    _, shown = await web.call("GET", f"/api/v1/evaluations/{evaluation}")
    assert (shown["status"], shown["repository"], shown["commit"]) == ("Queued", REPOSITORY["url"], COMMIT)
    assert (shown["wildcards"], shown["comment"]) == (body["wildcards"], "by hand")
    assert shown["counters"] == {"named": 0, "active": 0, "failed": 0, "queued": 0, "building": 0}
    assert (shown["builds"], shown["builds_total"], shown["stats"], shown["waiting"]) == ([], 0, {}, None)
    _, listed = await web.call("GET", "/api/v1/evaluations?limit=1")
    assert [row["evaluation"] for row in listed["evaluations"]] == [evaluation]


async def test_an_evaluation_of_an_uploaded_source(web: Web) -> None:
    source = {"store_path": store_path("source"), "rev": COMMIT, "last_modified": 1, "dir": "sub/dir"}
    status, answer = await web.call("POST", "/api/v1/evaluations", {"source": source})
    assert (status, answer["error"]) == (400, f"{store_path('source')} is not in the cache: upload it first")
    await web.upload(item("source", b"flake"))
    status, answer = await web.call("POST", "/api/v1/evaluations", {"source": source})
    assert status == 201
    row = await web.world.value("SELECT flake_source FROM evaluation WHERE id = %s", answer["evaluation"])
    assert row == {**source, "nar_hash": None, "rev_count": None}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "the request must be a JSON object"),
        ({}, "exactly one of `repository` and `source` is needed"),
        ({"repository": REPOSITORY, "source": {}}, "exactly one"),
        ({"repository": {}}, "`repository.url` is missing"),
        ({"repository": {"url": "nixpkgs"}}, "flake registry"),
        ({"repository": {"url": "./here"}}, "upload it"),
        ({"repository": {"url": "path:/etc"}}, "upload it"),
        ({"repository": {"url": "git+https://example.org/x#attr"}}, "fragment"),
        ({"repository": {"url": "nonsense://example.org"}}, "nonsense"),
        ({"repository": {**REPOSITORY, "commit": "abc"}}, "full commit id"),
        ({"repository": {**REPOSITORY, "ref": "main"}}, "unknown fields: `repository.ref`"),
        ({"repository": REPOSITORY, "wildcard": ["x"]}, "unknown fields: `wildcard`"),
        ({"repository": REPOSITORY, "wildcards": ['packages."x']}, "packages"),
        ({"source": {"store_path": "/etc/passwd"}}, "no store path"),
        ({"source": {"store_path": store_path("s"), "dir": "../up"}}, "below the source"),
        ({"source": {"store_path": store_path("s"), "rev": "main"}}, "full commit id"),
        ({"source": {"store_path": store_path("s"), "nar_hash": "sha256-x"}}, "hash"),
    ],
)
async def test_a_bad_request_is_told_in_one_line(web: Web, body: Any, words: str) -> None:
    status, answer = await web.call("POST", "/api/v1/evaluations", body)
    assert status == 400
    assert words in answer["error"]
    assert "\n" not in answer["error"]


async def test_what_is_no_json_or_too_much_of_it(web: Web) -> None:
    url = f"{web.url}/api/v1/evaluations"
    for body, status in ((b"{", 400), (b"\xff", 400), (b"[" * 100_000, 400), (b" " * 300_000, 413)):
        answer = await web.client.upload(url, token=web.token, body=body, method="POST")
        assert (answer.status, b'"error"' in answer.body) == (status, True)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/evaluations/99", 404),
        ("GET", "/api/v1/evaluations/99/events", 404),
        ("GET", "/api/v1/evaluations/" + "9" * 30, 404),
        ("POST", "/api/v1/evaluations/99/abort", 404),
        ("GET", "/api/v1/builds/99", 404),
        ("GET", "/api/v1/builds/99/log", 404),
        ("GET", "/api/v1/builds/99/log?follow=1", 404),
        ("GET", "/api/v1/nothing", 404),
        ("GET", "/api/v1/evaluations?limit=x", 400),
        ("GET", "/api/v1/evaluations?limit=-1", 400),
        ("DELETE", "/api/v1/evaluations", 405),
    ],
)
async def test_what_is_not_there(web: Web, method: str, path: str, status: int) -> None:
    found, answer = await web.call(method, path)
    assert found == status
    assert list(answer) == ["error"]


async def test_aborting(web: Web) -> None:
    evaluation = await web.world.evaluation()
    path = f"/api/v1/evaluations/{evaluation}/abort"
    assert await web.call("POST", path, {"x": 1}) == (400, {"error": "unknown fields: `x`"})
    assert await web.call("POST", path) == (202, {"evaluation": evaluation, "aborted": True})
    _, shown = await web.call("GET", f"/api/v1/evaluations/{evaluation}")
    assert shown["status"] == "Aborted"
    assert await web.call("POST", path) == (202, {"evaluation": evaluation, "aborted": False})


async def test_a_failed_evaluation_says_what_failed_and_because_of_what(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["lib"], "lib": []}, entries=["top"])
    await world.apply(AddMessage(evaluation, MessageLevel.ERROR, "nix-eval:broken", "undefined variable"))
    await world.end_stream(evaluation)
    await world.fail("lib")
    _, shown = await web.call("GET", f"/api/v1/evaluations/{evaluation}")
    assert shown["status"] == "Failed"
    assert shown["finished_at"] is not None
    top, lib = await world.id("top"), await world.id("lib")
    assert shown["entry_points"] == [
        {"attr": "broken", "status": "EvalFailed", "drv_path": None, "outputs": {}, "build": None},
        {
            "attr": "top",
            "status": "DependencyFailed",
            "drv_path": drv("top"),
            "outputs": {"out": out("top")},
            "build": top,
        },
    ]
    assert shown["messages"] == [
        {"level": "Error", "source": "nix-eval:broken", "message": "undefined variable"}
    ]
    first, second = shown["builds"]
    assert (first["build"], first["status"], first["error"]) == (lib, "FailedPermanent", "it broke")
    assert (second["reason"], second["causes"]) == ("lib failed", [{"build": lib, "name": "lib"}])


async def test_why_an_evaluation_waits(web: Web) -> None:
    evaluation = await web.world.evaluation()
    reason = {"kind": "eval_workers", "capability": "eval", "connected_workers": 1}
    await web.world.apply(ParkEvaluation(evaluation, EvaluationStatus.EVALUATING_DERIVATION, reason))
    _, shown = await web.call("GET", f"/api/v1/evaluations/{evaluation}")
    assert shown["status"] == "Waiting"
    assert shown["waiting"]["reason"] == reason
    assert shown["waiting"]["words"] == "waits for a worker that can evaluate (1 worker connected)"
    assert shown["waiting"]["since"] is not None


# --- builds ---------------------------------------------------------------------------------------


async def test_a_build_with_everything_about_it(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["lib"], "lib": []}, entries=["top"])
    await world.start("lib")
    await world.apply(BuildFailed(world.open.pop("lib"), FailureKind.TRANSIENT, "disk full", LIMITS))
    lib, top = await world.id("lib"), await world.id("top")
    _, shown = await web.call("GET", f"/api/v1/builds/{lib}")
    assert (shown["status"], shown["name"], shown["drv_path"]) == ("FailedTransient", "lib", drv("lib"))
    assert shown["reason"] == "is tried again after a pause (attempt 1 failed)"
    (attempt,) = shown["attempts"]
    assert (attempt["outcome"], attempt["message"], attempt["worker"]) == ("Failed", "disk full", "w")
    assert shown["outputs"] == [{"name": "out", "path": out("lib"), "nar_size": None, "cached": False}]
    _, shown = await web.call("GET", f"/api/v1/builds/{top}")
    assert shown["reason"] == "waits for 1 dependency"
    assert shown["blocked_by"] == [{"build": lib, "name": "lib", "status": "FailedTransient"}]


# --- the server -----------------------------------------------------------------------------------


async def test_what_a_worker_asks_first(web: Web) -> None:
    assert await web.call("GET", "/api/v1/server") == (
        200,
        {
            "version": "0.1.0",
            "proto_url": "ws://127.0.0.1:1/proto",
            "cache_url": f"{web.url}/cache/main",
            "public_key": web.site.cache.public_key,
            "store_dir": "/nix/store",
            "data_version": 1,
        },
    )


async def test_the_status_names_workers_evaluations_and_the_queue(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["a", "b"], "a": [], "b": []}, entries=["top"])
    await world.start("a")
    worker = Worker(WORKER, "w", frozenset({"main"}), Capabilities(), START)
    worker.info = WorkerCapabilities(("x86_64-linux",), ("kvm",), 4, 1, 8, 16_000)
    a = await world.id("a")
    worker.jobs[f"build:{a}"] = ActiveJob(f"build:{a}", 1, JobKind.BUILD, a, "a", START)
    web.site.workers.add(worker)
    _, shown = await web.call("GET", "/api/v1/status")
    (listed,) = shown["workers"]
    assert (listed["name"], listed["architectures"], listed["features"]) == ("w", ["x86_64-linux"], ["kvm"])
    assert listed["slots"] == {"build": 4, "eval": 1}
    assert [(job["name"], job["kind"]) for job in listed["running"]] == [("a", "build")]
    assert [row["evaluation"] for row in shown["evaluations"]] == [evaluation]
    assert shown["queue"] == {"queued": 1, "building": 1, "created": 1}


async def test_health_is_that_of_the_worst_child(web: Web) -> None:
    child = web.site.health.child("graph writer")
    child.running()
    child.good()
    status, answer = await web.call("GET", "/health")
    assert (status, answer["status"], answer["children"]["graph writer"]["state"]) == (200, "ok", "running")
    child.failed("OperationalError: gone")
    child.backing_off()
    status, answer = await web.call("GET", "/health")
    assert (status, answer["status"]) == (503, "degraded")
    seen = answer["children"]["graph writer"]
    assert (seen["state"], seen["last_error"], seen["restarts"]) == (
        "backing off",
        "OperationalError: gone",
        1,
    )
    assert isinstance(seen["last_ok"], float)


async def test_a_database_that_is_gone_is_503_and_no_traceback(web: Web) -> None:
    async def gone(connection: object) -> None:
        raise AssertionError

    # A pool that has no connection yet, and can make none.
    web.site.readers = attrs.evolve(web.site.readers, url="host=/nowhere connect_timeout=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradient.graph.pg_pool.RECONNECT_PAUSES", ())
        status, answer = await web.call("GET", "/api/v1/evaluations")
    assert (status, answer) == (503, {"error": "the server cannot answer now: try again in a moment"})


async def test_a_claimed_build_names_its_worker(web: Web) -> None:
    world = web.world
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    assert await world.apply(ClaimBuild(await world.id("a"), False, WORKER, "builder-7")) is not None
    _, shown = await web.call("GET", f"/api/v1/evaluations/{evaluation}")
    assert [(row["status"], row["worker"]) for row in shown["builds"]] == [("Queued", "builder-7")]
