"""A server, a worker and commands beside them, on one host with one data directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
from pathlib import Path

import pytest

from gradient.cli.faults import Exit
from tests.integration.accept_support import NAMED, Home, any_ports, eventually, fetch, home

pytestmark = pytest.mark.nix

SYSTEM = "x86_64-linux"


def test_the_whole_workflow(place: Home) -> None:
    """serve, work, build, status and log find each other through the data directory."""
    server = place.serve()
    facts = server.object()
    assert place.data.http_url.read_text().strip() == facts["http_url"]
    for secret in (place.data.admin_token, place.data.worker_token, place.data.signing_key):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    worker = place.work()

    status = place.run("status", "--json")
    assert status.code == 0, status
    (found,) = status.object["workers"]
    assert SYSTEM in found["architectures"]
    assert re.search(rf"^worker .*: {SYSTEM}.*; idle$", place.run("status").stdout, re.MULTILINE)

    flake = str(place.example("diamond"))
    built = place.run("build", flake)
    assert built.code == 0, built
    assert f"built packages.{SYSTEM}.d" in built.stdout
    assert "Completed: 5 of 5 entry points built" in built.stdout

    log = place.run("log", f"packages.{SYSTEM}.a")
    assert (log.code, log.stdout) == (0, "building a\n")
    drv_path = place.get("/api/v1/evaluations/1")["entry_points"][0]["drv_path"]
    by_path = place.run("log", "--json", drv_path)
    assert by_path.object["log"] == "building a\n"

    page = fetch(f"{facts['http_url']}/")
    assert page.status == 200
    assert b"evaluations/1" in page.body
    assert fetch(f"{facts['http_url']}/health").status == 200

    assert worker.stop().code == 0
    ended = server.stop()
    assert ended.code == 0, ended
    assert not place.data.http_url.exists()
    assert place.processes() == {}
    assert not re.search("traceback|error|warning", ended.stderr, re.IGNORECASE), ended.stderr


def test_the_second_server_is_refused(service: Home, nix: str) -> None:
    """On the same data directory, and on the same database from another one."""
    again = service.run("serve", "--json", *any_ports())
    assert again.code == Exit.ENVIRONMENT, again
    assert again.stderr.splitlines()[-1].startswith("gradient serve: another Gradient server")
    assert "Traceback" not in again.stderr
    assert len(again.stderr.splitlines()) == 1, again
    # And the first one is none the worse for it.
    assert fetch(f"{service.data.http_url.read_text().strip()}/health").status == 200
    with home(nix) as other:
        beside = other.run("serve", "--json", "--database-url", service.database_url, *any_ports())
        assert beside.code == Exit.ENVIRONMENT, beside
        assert "another Gradient server uses this database" in beside.stderr
        assert len(beside.stderr.splitlines()) == 1, beside


def test_the_second_evaluation_builds_nothing(service: Home) -> None:
    flake = str(service.example("outputs"))
    first = service.run("build", "--json", flake)
    assert first.code == 0, first
    attempts = service.query("SELECT id FROM build_attempt ORDER BY id")
    jobs = service.query("SELECT id FROM dispatched_job WHERE kind = 1")
    second = service.run("build", "--json", flake)
    assert second.code == 0, second
    assert second.object["entry_points"] == first.object["entry_points"]
    assert second.object["evaluation"] != first.object["evaluation"]
    assert service.query("SELECT id FROM build_attempt ORDER BY id") == attempts
    assert service.query("SELECT id FROM dispatched_job WHERE kind = 1") == jobs


def test_two_evaluations_at_once_build_everything_once(service: Home) -> None:
    flake = str(service.example("diamond"))
    clients = [service.start("build", "--json", flake) for _ in range(2)]
    before = service.query("SELECT max(id) FROM evaluation")
    assert before
    ended = [client.wait() for client in clients]
    assert [end.code for end in ended] == [0, 0], ended
    assert ended[0].object["entry_points"] == ended[1].object["entry_points"]
    built = service.query(
        "SELECT a.derivation FROM build_attempt a JOIN derivation d ON d.id = a.derivation"
        " WHERE d.name IN ('a', 'b', 'c', 'd')"
    )
    assert len(built) == len(set(built)) == 4


def test_outputs_that_the_store_has_are_not_built(place: Home) -> None:
    """A new server on a machine that has built everything before: found, uploaded, and served."""
    flake = str(place.example("hello"))
    first = place.run("up", "--once", "--json", flake)
    assert first.code == 0, first
    with home(str(place.nix.binary)) as other:
        program = other.start("up", "--once", "--json", "--keep-serving", flake)
        found = program.object()
        assert {point["status"] for point in found["entry_points"]} == {"Substituted"}
        for point in found["entry_points"]:
            for path in point["outputs"].values():
                hash_part = Path(path).name[:32]
                assert fetch(f"{found['cache_url']}/{hash_part}.narinfo").status == 200


def test_the_cache_gives_back_what_a_store_has_lost(place: Home) -> None:
    """Inputs that were collected meanwhile come from the cache: nothing is built again."""
    steps = """
      first = build "first" { } "echo first > $out";
      second = build "second" { inherit first; } "read line < $first; echo $line and second > $out";
    """
    flake = place.flake(steps)
    place.serve()
    worker = place.work()
    first = place.run("build", "--json", f"{flake}#first")
    assert first.code == 0, first
    (point,) = first.object["entry_points"]
    lost = point["outputs"]["out"]
    # Whoever built it keeps it from being collected.
    worker.stop()
    place.nix.out("nix-store", "--delete", lost)
    assert not Path(lost).exists()
    place.work()
    second = place.run("build", "--json", f"{flake}#second")
    assert second.code == 0, second
    (point,) = second.object["entry_points"]
    assert Path(point["outputs"]["out"]).read_text() == "first and second\n"
    assert len(place.query("SELECT FROM build_attempt WHERE outcome = 1")) == 2


def test_an_interrupted_client_leaves_the_evaluation_alone(service: Home) -> None:
    go = service.shared / "go"
    flake = service.flake(
        f"""waits = build "waits" {{ }} "while [ ! -e {go} ]; do :; done; echo > $out";""", "waits"
    )
    client = service.start("build", "--json", str(flake))
    client.said("building waits")
    client.send(signal.SIGINT)
    ended = client.wait()
    assert ended.code == Exit.INTERRUPTED, ended
    evaluation = ended.object["evaluation"]
    go.touch()
    eventually(
        lambda: service.get(f"/api/v1/evaluations/{evaluation}")["status"] == "Completed", "its completion"
    )


# --- another Nix ----------------------------------------------------------------------------------


@pytest.mark.skipif(not (NAMED and shutil.which("nix")), reason="GRADIENT_TEST_NIX names no second Nix")
@pytest.mark.parametrize("example", ["hello", "outputs"])
def test_a_named_nix_makes_the_same_derivations(place: Home, example: str) -> None:
    """With --nix: evaluated by it, built by its own daemon, and to the same .drv paths as without."""
    flake = str(place.example(example))
    named = place.start("up", "--once", "--json", "--keep-serving", flake)
    found = named.object()
    assert found["status"] == "Completed"
    daemon = str(place.nix.binary.parent / "nix-daemon")
    daemons = {command for command in place.processes().values() if "nix-daemon" in command}
    assert daemons
    assert all(command.startswith((daemon, os.path.realpath(daemon))) for command in daemons), daemons
    evaluators = {command for command in place.processes().values() if " repl " in command}
    assert all(command.startswith(str(place.nix.binary)) for command in evaluators)
    named.stop()
    with home(shutil.which("nix") or "", named=False) as other:
        ended = other.run("up", "--once", "--json", flake)
    assert ended.code == 0, ended

    def paths(answer: dict[str, object]) -> str:
        points = answer["entry_points"]
        assert isinstance(points, list)
        return json.dumps([[point["attr"], point["drv_path"], point["outputs"]] for point in points])

    assert paths(found) == paths(ended.object)
