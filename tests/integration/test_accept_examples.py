"""The main job on every example: `gradient up --once`, and a real `nix` that substitutes the result."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from gradient.nix.store_path import StorePath
from tests.integration.accept_support import EXAMPLES, Ended, Home, fetch, free_port, home
from tests.patience import PATIENCE

pytestmark = pytest.mark.nix

# Attributes of each example for the system of this machine, and the derivations behind them.
PACKAGES = {
    "hello": ({"packages.{}.default", "packages.{}.hello", "checks.{}.greeting"}, 2),
    "diamond": ({f"packages.{{}}.{name}" for name in ("a", "b", "c", "d", "default")}, 4),
    "outputs": (
        {f"packages.{{}}.{name}" for name in ("data", "library", "tool", "default")} | {"checks.{}.linked"},
        4,
    ),
    "two-systems": ({"packages.{}.native", "packages.{}.default"}, 1),
    "layers": ({f"packages.{{}}.layer{layer}-{index}" for layer in range(10) for index in range(50)}, 500),
}
SYSTEM = "x86_64-linux"
# For 500 builds on a machine that is busy with others.
LARGE = 240.0  # seconds
# Of another cache: signs nothing here.
STRANGER = "stranger-1:MZvoUPaUBUJCTBwtj1cjXpMOyCNhGXwB2kUhmwCX1cM="


@attrs.frozen
class Result:
    """A finished evaluation whose server serves on."""

    name: str
    home: Home
    object: dict[str, Any]

    @property
    def outputs(self) -> set[str]:
        """Every output of every entry point."""
        return {path for point in self.object["entry_points"] for path in point["outputs"].values()}

    def copy(self, store: Path, *paths: str, key: str | None = None, check: bool = True) -> str:
        """`nix copy` from the cache into an empty store; what it says when it does not work."""
        done = self.home.nix.run(
            "nix", "copy", "--from", self.object["cache_url"], "--to", str(store),
            "--option", "require-sigs", "true",
            "--option", "trusted-public-keys", key or self.object["public_key"],
            # Whatever was asked of another cache at this address is not what this one says.
            "--option", "narinfo-cache-negative-ttl", "0", "--option", "narinfo-cache-positive-ttl", "0",
            *paths, check=check,
        )  # fmt: skip
        return "" if done.returncode == 0 else done.stderr


@pytest.fixture(scope="module", params=sorted(PACKAGES))
def result(request: pytest.FixtureRequest, nix: str) -> Iterator[Result]:
    """An example with fresh derivations after `up --once --json --keep-serving` has evaluated it."""
    with home(nix) as place:
        flake = place.example(request.param)
        program = place.start("up", "--once", "--json", "--keep-serving", str(flake))
        yield Result(request.param, place, program.object(LARGE))
        ended = program.stop()
        assert ended.code == 0, ended
        assert ended.object["status"] == "Completed"
        assert not place.processes()


def test_the_object_says_what_was_built(result: Result) -> None:
    attributes, _ = PACKAGES[result.name]
    found = result.object
    assert set(found) == {
        "evaluation", "status", "entry_points", "errors", "cache_url", "public_key", "seconds"
    }  # fmt: skip
    assert (found["status"], found["errors"]) == ("Completed", [])
    assert isinstance(found["evaluation"], int)
    assert found["seconds"] > 0
    assert found["cache_url"].startswith("http://127.0.0.1:")
    assert re.fullmatch(r"[^:\s]+:[A-Za-z0-9+/]{43}=", found["public_key"])
    assert {point["attr"] for point in found["entry_points"]} == {name.format(SYSTEM) for name in attributes}
    for point in found["entry_points"]:
        assert set(point) == {"attr", "status", "drv_path", "outputs"}
        assert point["status"] == "Completed"
        assert StorePath.parse(point["drv_path"]).name.endswith(".drv")
        assert Path(point["drv_path"]).is_file()
        assert all(Path(path).exists() for path in point["outputs"].values())
    if result.name == "outputs":
        library = next(point for point in found["entry_points"] if point["attr"].endswith("library"))
        assert set(library["outputs"]) == {"out", "dev", "lib"}


def test_every_derivation_was_built_once(result: Result) -> None:
    _, derivations = PACKAGES[result.name]
    attempts = result.home.query("SELECT derivation, outcome FROM build_attempt")
    assert len(attempts) == len({derivation for derivation, _ in attempts}) == derivations
    assert {outcome for _, outcome in attempts} == {1}


def test_the_drv_paths_are_those_of_nix(result: Result) -> None:
    flake = f"path:{result.home.folder / 'flakes' / result.name}"
    apply = "builtins.mapAttrs (name: package: package.drvPath)"
    packages = result.home.nix.eval(f"{flake}#packages.{SYSTEM}", "--apply", apply, "--no-write-lock-file")
    found = {point["attr"]: point["drv_path"] for point in result.object["entry_points"]}
    for name, path in packages.items():
        assert found[f"packages.{SYSTEM}.{name}"] == path


@pytest.mark.parametrize(
    "result",
    # Copying 500 paths takes Nix 20 s.
    [pytest.param(name, marks=[pytest.mark.full] * (name == "layers")) for name in sorted(PACKAGES)],
    indirect=True,
)
def test_nix_substitutes_every_output_with_its_references(result: Result, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert result.copy(store, *result.outputs) == ""
    closure = set(result.home.nix.out("nix-store", "-qR", *result.outputs).split())
    there = set(result.home.nix.out("nix-store", "--store", str(store), "-qR", *result.outputs).split())
    assert there == closure
    verified = result.home.nix.run(
        "nix", "store", "verify", "--store", str(store), "--all",
        "--option", "trusted-public-keys", result.object["public_key"],
    )  # fmt: skip
    assert "untrusted" not in verified.stderr


def test_another_key_is_refused(result: Result, tmp_path: Path) -> None:
    for path in sorted(result.outputs)[:2]:
        assert "signature" in result.copy(tmp_path / "store", path, key=STRANGER, check=False)


@pytest.mark.parametrize("result", ["hello"], indirect=True)
def test_the_cache_answers_as_nix_expects(result: Result) -> None:
    cache = result.object["cache_url"]
    path = StorePath.parse(next(iter(result.outputs)))
    assert b"StoreDir: /nix/store\n" in fetch(f"{cache}/nix-cache-info").body
    narinfo = fetch(f"{cache}/{path.hash_part}.narinfo")
    assert (narinfo.status, narinfo.headers["Content-Type"]) == (200, "text/x-nix-narinfo")
    facts = dict(line.split(": ", 1) for line in narinfo.body.decode().splitlines())
    assert facts["StorePath"] == path.path()
    assert fetch(f"{cache}/{path.hash_part}.narinfo", "HEAD").body == b""

    nar = f"{cache}/{facts['URL']}"
    whole = fetch(nar)
    assert (whole.status, len(whole.body)) == (200, int(facts["FileSize"]))
    head = fetch(nar, "HEAD")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", facts["FileSize"])
    size = len(whole.body)
    for asked, expected in (
        ("bytes=2-9", slice(2, 10)),
        ("bytes=5-", slice(5, None)),
        ("bytes=-4", slice(-4, None)),
    ):
        part = fetch(nar, Range=asked)
        assert (part.status, part.body) == (206, whole.body[expected])
        assert part.headers["Content-Range"].endswith(f"/{size}")
    beyond = fetch(nar, Range=f"bytes={size}-")
    assert (beyond.status, beyond.headers["Content-Range"]) == (416, f"bytes */{size}")

    log = fetch(f"{cache}/log/{result.object['entry_points'][-1]['drv_path'].rpartition('/')[2]}")
    assert (log.status, log.body) == (200, b"building hello\n")
    nobody = "0" * 32
    for unknown in (
        f"{nobody}.narinfo", "x.narinfo", f"nar/{'0' * 52}.nar.zst", "nar/x.nar.zst", f"nar/{nobody}.nar",
        f"log/{nobody}-hello.drv", "log/x", "../other/nix-cache-info", "something", "",
    ):  # fmt: skip
        assert fetch(f"{cache}/{unknown}").status == 404, unknown
        assert fetch(f"{cache}/{unknown}", "HEAD").status == 404, unknown


def test_once_exits_when_the_evaluation_ends(place: Home) -> None:
    ended = place.run("up", "--once", str(place.example("hello")))
    assert ended.code == 0, ended
    assert "Completed: 3 of 3 entry points built" in ended.stdout
    assert "extra-substituters = http://127.0.0.1:" in ended.stdout
    assert "extra-trusted-public-keys = gradient-1:" in ended.stdout
    assert f"built packages.{SYSTEM}.hello" in ended.stdout
    # What is good to know goes to stderr, and nothing there is a complaint.
    assert not re.search("warning|error|fatal|traceback", ended.stderr, re.IGNORECASE), ended.stderr
    assert not place.processes()


def test_the_examples_in_our_own_repository(place: Home) -> None:
    """The folder of a flake inside a repository: its tracked files, whatever else lies there."""
    ended = place.run("up", "--once", "--json", str(EXAMPLES / "hello"))
    assert ended.code == 0, ended
    assert len(ended.object["entry_points"]) == 3


def test_a_database_of_ones_own(place: Home, empty_database_url: str) -> None:
    flake = str(place.example("diamond"))
    for _ in range(2):
        ended = place.run("up", "--once", "--json", "--database-url", empty_database_url, flake)
        assert ended.code == 0, ended
        assert not place.data.postgres.exists()
    assert ended.object["evaluation"] == 2


def test_keep_serving_with_ports_of_choice(place: Home) -> None:
    """Serves on until Ctrl-C, and then exits with the evaluation's code."""
    http, proto = free_port(), free_port()
    listeners = ("--http", f"127.0.0.1:{http}", "--proto", f"127.0.0.1:{proto}")
    flake = str(place.example("hello"))
    program = place.start("up", "--once", "--json", "--keep-serving", *listeners, flake)
    assert program.object()["cache_url"].startswith(f"http://127.0.0.1:{http}/")
    assert fetch(f"http://127.0.0.1:{http}/health").status == 200
    assert fetch(f"http://127.0.0.1:{http}/").status == 200
    program.send(signal.SIGINT)
    assert program.wait().code == 0


# --- what does not build --------------------------------------------------------------------------


def failing(ended: Ended, place: Home) -> None:
    """What a run of the failing example has to look like, whatever its output."""
    assert ended.code == 1, ended
    assert not place.processes()


def test_a_failure_shows_its_log_and_its_dependents(place: Home) -> None:
    ended = place.run("up", "--once", str(place.example("failing")))
    failing(ended, place)
    assert "failed broken" in ended.stderr
    assert "> error: part 2 does not compile" in ended.stderr
    assert "> compiling part 1 of 2" in ended.stderr
    assert re.search(r"^not built dependent: .*broken", ended.stderr, re.MULTILINE)
    assert re.search(r"^failed /nix/store/.*-broken\.drv$", ended.stdout, re.MULTILINE)
    assert re.search(r"^  needed by /nix/store/.*-dependent\.drv$", ended.stdout, re.MULTILINE)
    assert f"built packages.{SYSTEM}.independent" in ended.stdout
    assert "Failed: 1 of 3 entry points built" in ended.stdout


def test_a_failure_in_json(place: Home) -> None:
    ended = place.run("up", "--once", "--json", str(place.example("failing")))
    failing(ended, place)
    assert ended.object["status"] == "Failed"
    status = {point["attr"]: point["status"] for point in ended.object["entry_points"]}
    assert status == {
        f"packages.{SYSTEM}.broken": "FailedPermanent",
        f"packages.{SYSTEM}.dependent": "DependencyFailed",
        f"packages.{SYSTEM}.independent": "Completed",
    }
    (error,) = ended.object["errors"]
    assert error["source"].endswith("-broken.drv")
    assert "exit code 1" in error["message"]
    assert len(ended.stdout.splitlines()) == 1
    assert json.loads(ended.stdout) == ended.object


@pytest.mark.full
def test_a_system_without_a_worker_is_given_up_after_a_minute(place: Home) -> None:
    flake = f"{place.example('two-systems')}#packages.*.*"
    ended = place.run("up", "--once", "--json", flake, limit=60 + PATIENCE)
    assert ended.code == 1, ended
    assert ended.seconds > 60
    assert ended.object["status"] == "Aborted"
    (error,) = [error for error in ended.object["errors"] if error["source"] == "waiting"]
    assert "riscv64-linux" in error["message"]
    assert error["message"] in ended.stderr
    status = {point["attr"]: point["status"] for point in ended.object["entry_points"]}
    assert status[f"packages.{SYSTEM}.native"] == "Completed"
    assert status["packages.riscv64-linux.native"] != "Completed"
