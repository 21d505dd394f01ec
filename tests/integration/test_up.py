"""`gradient up` end to end: server, worker, a real flake, a real Nix, a real client of the cache."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.up_support import (
    BUILT,
    EXAMPLES,
    KEYS,
    Home,
    parent,
    processes,
    salted_flake,
    system,
    until,
)
from tests.patience import PATIENCE

pytestmark = pytest.mark.nix


@pytest.fixture
def nix_options() -> tuple[str, ...]:
    named = os.environ.get("GRADIENT_TEST_NIX")
    return ("--nix", str(shutil.which(named))) if named else ()


@pytest.fixture
def home(tmp_path: Path, empty_database_url: str, nix_options: tuple[str, ...]) -> Home:
    """With the run's PostgreSQL, which saves making one for each test."""
    return Home(tmp_path / "data", ("--database-url", empty_database_url, *nix_options))


@pytest.fixture
def embedded_home(tmp_path: Path, nix_options: tuple[str, ...]) -> Home:
    """With nothing set, as a user has it."""
    return Home(tmp_path / "data", nix_options)


# --- flakes ---------------------------------------------------------------------------------------


def test_hello_with_nothing_but_its_name(embedded_home: Home) -> None:
    ran = embedded_home.up(EXAMPLES / "hello")
    assert ran.code == 0, ran.stderr
    assert list(ran.json) == KEYS
    assert ran.json["status"] == "Completed"
    assert ran.json["errors"] == []
    assert set(ran.statuses()) == {"hello", "default", "greeting"}
    assert set(ran.statuses().values()) <= BUILT
    for point in ran.json["entry_points"]:
        assert point["drv_path"].endswith(".drv")
        assert all(Path(path).exists() for path in point["outputs"].values())
    for name in ("admin-token", "worker-token", "signing-key", "grant-secret"):
        assert (embedded_home.data / name).stat().st_mode & 0o777 == 0o600

    again = embedded_home.up(EXAMPLES / "hello")
    assert again.code == 0
    assert again.json["evaluation"] > ran.json["evaluation"]
    assert again.json["public_key"] == ran.json["public_key"]
    assert again.json["entry_points"] == ran.json["entry_points"]


@pytest.mark.parametrize(
    ("example", "names"),
    [
        ("diamond", {"a", "b", "c", "d", "default"}),
        ("outputs", {"library", "tool", "data", "default", "linked"}),
    ],
)
def test_examples_that_build(home: Home, example: str, names: set[str]) -> None:
    ran = home.up(EXAMPLES / example)
    assert ran.code == 0, ran.stderr
    assert set(ran.statuses()) == names
    assert set(ran.statuses().values()) <= BUILT


def test_the_failing_example(home: Home) -> None:
    ran = home.up(EXAMPLES / "failing")
    assert ran.code == 1
    assert ran.json["status"] == "Failed"
    assert ran.statuses().pop("independent") in BUILT
    assert (ran.statuses()["broken"], ran.statuses()["dependent"]) == ("FailedPermanent", "DependencyFailed")
    (error,) = ran.json["errors"]
    assert error["source"].endswith("-broken.drv")
    assert "exit code 1" in error["message"]
    report = ran.stderr[ran.stderr.rindex("failed /nix/store/") :]
    assert "-broken.drv\n  exit code 1\n" in report
    assert "  > error: part 2 does not compile\n" in report
    assert "-dependent.drv\n" in report


def test_a_derivation_nobody_had_is_built_with_its_log(home: Home, tmp_path: Path) -> None:
    flake = salted_flake(tmp_path / "flake", "echo hello from the builder; echo content > $out")
    with home.running("up", flake, "--once", "--keep-serving", "--json", *home.options) as serving:
        result = serving.result()
        assert [point["status"] for point in result["entry_points"]] == ["Completed"]
        (drv,) = [point["drv_path"] for point in result["entry_points"]]
        for name in ("salted", f"packages.{system()}.salted", drv):
            assert home.run("log", name).stdout == "hello from the builder\n"
        status = home.run("status", "--json").json
        assert [worker["architectures"][0] for worker in status["workers"]] != []

        # A second flake on the same server, then a token that is wrong.
        other = salted_flake(tmp_path / "other", "echo other > $out", "other")
        built = home.run("build", f"{other}#other", "--json")
        assert (built.code, built.statuses()) == (0, {"other": "Completed"})
        wrong = tmp_path / "wrong"
        wrong.write_text("no-token\n")
        wrong.chmod(0o600)
        refused = home.run("build", other, "--token-file", wrong, "--json")
        assert refused.code == 4
        assert len(refused.stderr.splitlines()) == 1

        serving.signal(signal.SIGINT)
        assert serving.end().code == 0
    home.check_clean()


def test_a_nix_client_substitutes_from_the_cache(home: Home, tmp_path: Path, nix: str) -> None:
    example = EXAMPLES / "outputs"
    with home.running("up", example, "--once", "--keep-serving", "--json", *home.options) as serving:
        result = serving.result()
        paths = [path for point in result["entry_points"] for path in point["outputs"].values()]

        def copy(to: Path, key: str) -> subprocess.CompletedProcess[str]:
            command = [nix, "copy", "--from", result["cache_url"], "--to", str(to), *paths]
            options = ["--extra-experimental-features", "nix-command", "--option", "require-sigs", "true"]
            keys = ["--option", "trusted-public-keys", key, "--option", "substitute", "false"]
            return subprocess.run([*command, *options, *keys], capture_output=True, text=True, check=False)

        done = copy(tmp_path / "store", result["public_key"])
        assert done.returncode == 0, done.stderr
        assert all((tmp_path / "store" / path.lstrip("/")).exists() for path in paths)
        name, _, _ = result["public_key"].partition(":")
        other_key = f"{name}:{'A' * 43}="
        refused = copy(tmp_path / "other", other_key)
        assert refused.returncode != 0
        assert not any((tmp_path / "other" / path.lstrip("/")).exists() for path in paths)
        serving.signal(signal.SIGTERM)
        assert serving.end().code == 0


# --- attributes -----------------------------------------------------------------------------------


def test_a_short_name_is_what_nix_build_takes_for_it(home: Home) -> None:
    ran = home.up(f"{EXAMPLES / 'hello'}#hello")
    assert ran.code == 0
    assert [point["attr"] for point in ran.json["entry_points"]] == [f"packages.{system()}.hello"]


def test_an_attribute_that_does_not_exist(home: Home) -> None:
    ran = home.up(f"{EXAMPLES / 'hello'}#nothing")
    assert ran.code == 1
    place = f"packages.{system()}"
    assert [error["message"] for error in ran.json["errors"]] == [
        f"{place}.nothing: target matched no derivations: {place} has no nothing, only default, hello"
    ]


# --- bad input ------------------------------------------------------------------------------------


def test_a_syntax_error(home: Home, tmp_path: Path) -> None:
    flake = tmp_path / "flake"
    flake.mkdir()
    (flake / "flake.nix").write_text("{ outputs = _: { packages = ; }; }\n")
    ran = home.up(flake)
    assert ran.code == 1
    (error,) = ran.json["errors"]
    assert "syntax error" in error["message"]


def test_no_such_flake(home: Home, tmp_path: Path) -> None:
    ran = home.up(tmp_path / "nowhere")
    assert ran.code == 2
    assert "there is no" in ran.json["errors"][0]["message"]
    ran = home.up(f"git+file://{tmp_path}/nowhere")
    assert ran.code == 1
    assert "does not appear to be a git repository" in ran.json["errors"][0]["message"]


@pytest.mark.parametrize("option", ["--http", "--proto"])
def test_a_port_in_use(home: Home, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = home.up(EXAMPLES / "hello", option, address)
    assert ran.code == 3
    assert address in ran.json["errors"][0]["message"]
    assert len(ran.stderr.splitlines()) == 1


def test_a_data_directory_of_a_newer_version(home: Home) -> None:
    home.data.mkdir()
    (home.data / "version").write_text("99\n")
    ran = home.up(EXAMPLES / "hello")
    assert ran.code == 3
    assert "newer" in ran.json["errors"][0]["message"]


def test_a_database_that_is_down(tmp_path: Path) -> None:
    ran = Home(tmp_path / "data", ("--database-url", "postgresql://127.0.0.1:1/x")).up(EXAMPLES / "hello")
    assert ran.code == 3
    assert "127.0.0.1" in ran.json["errors"][0]["message"]
    assert len(ran.stderr.splitlines()) == 1


def test_a_second_server_is_refused_and_the_first_stays_reachable(home: Home) -> None:
    with home.running(
        "serve", "--json", "--http", "127.0.0.1:0", "--proto", "127.0.0.1:0", *home.options[:2]
    ) as first:
        url = first.result()["http_url"]
        second = home.run("up", EXAMPLES / "hello", "--once", "--json", *home.options)
        assert second.code == 3
        assert (home.data / "http-url").read_text() == f"{url}\n"
        assert home.run("status").code == 0
        first.signal(signal.SIGTERM)
        assert first.end().code == 0
    home.check_clean()


# --- stopping -------------------------------------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that a builder, which has a user of its own, may look into."""
    with tempfile.TemporaryDirectory(prefix="gradient-up-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_ctrl_c_in_the_middle_of_a_build(home: Home, tmp_path: Path, open_folder: Path) -> None:
    """The builder is gone, nothing is left, and the next start finishes what was begun."""
    marker = open_folder / "go"
    script = f"echo building; n=0; while ! [ -e {marker} ]; do n=$((n+1)); done; echo done > $out"
    flake = salted_flake(tmp_path / "flake", script)
    with home.running("up", flake, "--once", "--json", *home.options) as running:
        running.line("building salted")
        until(lambda: processes(str(marker)) != [])
        running.signal(signal.SIGINT)
        ran = running.end()
    assert ran.code == 130
    assert ran.json["status"] == "Aborted"
    until(lambda: processes(str(marker)) == [])
    home.check_clean()
    marker.touch()
    assert home.up(flake).statuses() == {"salted": "Completed"}


def test_a_worker_that_is_killed_ends_the_run_with_a_word(home: Home, tmp_path: Path) -> None:
    flake = salted_flake(tmp_path / "flake", "while :; do :; done")
    with home.running("up", flake, "--once", "--json", *home.options) as running:
        running.line("building salted")
        (worker,) = [pid for pid in processes("--leashed") if parent(pid) == running.process.pid]
        os.kill(worker, signal.SIGKILL)
        ran = running.end()
    assert ran.code == 3
    assert "the worker ended by itself" in ran.json["errors"][0]["message"]
    until(lambda: processes(str(home.data)) == [])


@pytest.mark.full
def test_a_system_that_no_worker_has(home: Home) -> None:
    ran = home.up(EXAMPLES / "two-systems", "--config", "/dev/null")
    assert ran.code == 0, "the default attributes are those of the worker's systems"
    began = time.monotonic()
    ran = home.up(f"{EXAMPLES / 'two-systems'}#packages.#.native", limit=60 + PATIENCE)
    assert ran.code == 1
    assert time.monotonic() - began > 60
    assert ran.json["status"] == "Aborted"
    assert ran.statuses()["native"] in {"Aborted", *BUILT}
    assert "riscv64-linux" in ran.json["errors"][-1]["message"]
    assert "riscv64-linux" in ran.stderr
