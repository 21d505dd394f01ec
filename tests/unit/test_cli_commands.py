"""The commands against a scripted server: what they ask, what they print, how they exit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradient.nar.bundle import BundleParser, EntryBegins, EntryEnds
from tests.unit.cli_support import (
    PUBLIC_KEY,
    Answer,
    FakeServer,
    Ran,
    answer,
    build,
    gradient,
    lines,
    point,
    running,
    snapshot,
)

ROOT = Path(__file__).parents[2]
EVALUATIONS = "/api/v1/evaluations"
KEYS = ["evaluation", "status", "entry_points", "errors", "cache_url", "public_key", "seconds"]
REMOTE = "git+https://host/repo"


@pytest.fixture(autouse=True)
def plain_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings, no server and no token of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("GRADIENT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with an administrator's token in it."""
    folder = tmp_path / "data"
    folder.mkdir()
    token = folder / "admin-token"
    token.write_text("secret\n")
    token.chmod(0o600)
    return folder


def routes(final: dict[str, object]) -> dict[str, list[Answer]]:
    """A server on which evaluation 7 ends as `final`."""
    return {
        f"POST {EVALUATIONS}": [answer({"evaluation": 7, "url": "http://server/evaluations/7"}, 201)],
        f"GET {EVALUATIONS}/7/events": [
            lines({"event": "snapshot", **final}, {"event": "end", "status": final["status"]})
        ],
        f"GET {EVALUATIONS}/7": [answer(final)],
        f"GET {EVALUATIONS}": [answer({"evaluations": [{"evaluation": 7}]})],
    }


COMPLETED = snapshot(
    "Completed",
    points=[point("packages.x86_64-linux.hello")],
    builds=[build(1, "hello", "Completed")],
)
FAILED = snapshot(
    "Failed",
    points=[
        point("packages.x86_64-linux.broken", "FailedPermanent", 1),
        point("packages.x86_64-linux.dependent", "DependencyFailed", 2),
        point("packages.x86_64-linux.independent", "Completed", 3),
        point("packages.x86_64-linux.typo", "EvalFailed", None),
    ],
    builds=[
        build(1, "broken", "FailedPermanent", error="exit code 1"),
        build(
            2,
            "dependent",
            "DependencyFailed",
            reason="broken failed",
            causes=[{"build": 1, "name": "broken"}],
        ),
        build(4, "silent-lib", "Completed"),
        build(3, "independent", "Completed"),
    ],
    messages=[
        {"level": "Error", "source": "nix-eval:packages.x86_64-linux.typo", "message": "undefined variable"},
        {"level": "Warning", "source": "nix", "message": "dirty"},
    ],
)


# --- build ----------------------------------------------------------------------------------------


def test_build_of_a_url(data: Path) -> None:
    with running(routes(COMPLETED)) as server:
        ran = gradient(
            "build", f"{REMOTE}?ref=main#hello", "--server", server.url, "--data-dir", data, "--json"
        )
        (created,) = server.asked(f"POST {EVALUATIONS}")
        cache = f"{server.url}/cache/main"
    assert ran.code == 0
    assert created.token == "secret"
    assert created.json["repository"] == {"url": f"{REMOTE}?ref=main"}
    assert created.json["wildcards"] == ["hello"]
    assert list(ran.json) == KEYS
    assert ran.json["evaluation"] == 7
    assert ran.json["status"] == "Completed"
    assert ran.json["entry_points"] == [
        {
            "attr": "packages.x86_64-linux.hello",
            "status": "Completed",
            "drv_path": f"/nix/store/{'1' * 32}-hello.drv",
            "outputs": {"out": f"/nix/store/{'0' * 32}-hello"},
        }
    ]
    assert ran.json["errors"] == []
    assert (ran.json["cache_url"], ran.json["public_key"]) == (cache, PUBLIC_KEY)
    assert ran.json["seconds"] > 0
    assert len(ran.stdout.splitlines()) == 1


def test_the_result_for_people_is_on_stdout_and_the_progress_on_stderr(data: Path) -> None:
    with running(routes(COMPLETED)) as server:
        ran = gradient("build", REMOTE, "--server", server.url, "--data-dir", data)
    assert ran.stdout.splitlines() == [
        "built packages.x86_64-linux.hello",
        f"  /nix/store/{'0' * 32}-hello",
        "Completed: 1 of 1 entry point built",
    ]
    assert "built hello" in ran.stderr


def test_a_failed_evaluation_is_exit_1_with_all_that_went_wrong(data: Path) -> None:
    script = {**routes(FAILED), "GET /api/v1/builds/1/log": [Answer(200, b"compiling\nerror: no\n")]}
    with running(script) as server:
        told = gradient("build", REMOTE, "--server", server.url, "--data-dir", data)
        ran = gradient("build", REMOTE, "--server", server.url, "--data-dir", data, "--json")
    assert told.code == ran.code == 1
    assert ran.json["status"] == "Failed"
    assert [p["status"] for p in ran.json["entry_points"]] == [
        "FailedPermanent",
        "DependencyFailed",
        "Completed",
        "EvalFailed",
    ]
    assert ran.json["errors"] == [
        {"source": "nix-eval:packages.x86_64-linux.typo", "message": "undefined variable"},
        {"source": f"/nix/store/{'1' * 32}-broken.drv", "message": "exit code 1"},
    ]
    assert told.stdout.splitlines()[2:] == [
        f"failed /nix/store/{'1' * 32}-broken.drv",
        "  exit code 1",
        "  > compiling",
        "  > error: no",
        f"  needed by /nix/store/{'1' * 32}-dependent.drv",
        "error: packages.x86_64-linux.typo: undefined variable",
        "not built packages.x86_64-linux.broken: exit code 1",
        "not built packages.x86_64-linux.dependent: broken failed",
        "not built packages.x86_64-linux.typo: it does not evaluate",
        "Failed: 1 of 4 entry points built",
    ]


def test_many_dependents_and_attributes_are_counted_not_listed(data: Path) -> None:
    numbers = range(2, 42)
    causes = [{"build": 1, "name": "lib"}]
    final = snapshot(
        "Failed",
        points=[point(f"packages.s.p{n}", "DependencyFailed", n) for n in numbers],
        builds=[
            build(1, "lib", "FailedPermanent", error="exit code 1"),
            *(build(n, f"p{n}", "DependencyFailed", reason="lib failed", causes=causes) for n in numbers),
        ],
    )
    with running(routes(final)) as server:
        lines = gradient("build", REMOTE, "--server", server.url, "--data-dir", data).stdout.splitlines()
    assert lines[11:13] == [f"  needed by /nix/store/{'1' * 32}-p11.drv", "  needed by 30 more"]
    assert lines[-3:] == [
        "not built packages.s.p31: lib failed",
        "not built: 10 more",
        "Failed: 0 of 40 entry points built",
    ]


def test_nothing_to_build_is_not_none_of_none(data: Path) -> None:
    with running(routes(snapshot("Failed"))) as server:
        ran = gradient("build", REMOTE, "--server", server.url, "--data-dir", data)
    assert ran.stdout == "Failed: nothing to build\n"


def test_a_local_flake_is_uploaded_once_and_named_by_its_store_path(data: Path, tmp_path: Path) -> None:
    flake = tmp_path / "flake"
    flake.mkdir()
    (flake / "flake.nix").write_text("{ outputs = _: { }; }\n")
    script = {**routes(COMPLETED), "POST /api/v1/uploads": [answer({"committed": []})]}
    with running(script) as server:
        assert gradient("build", flake, "--server", server.url, "--data-dir", data).code == 0
        (upload,) = server.asked("POST /api/v1/uploads")
        (created,) = server.asked(f"POST {EVALUATIONS}")
        source = created.json["source"]
        begin, *_, end, _ = BundleParser().feed(upload.body)
        assert isinstance(begin, EntryBegins)
        assert isinstance(end, EntryEnds)
        assert begin.header.store_path == source["store_path"]
        assert begin.header.ca == f"fixed:r:{end.result.nar_hash}"
        assert begin.header.nar_size == end.result.nar_size
        assert upload.token == "secret"
        assert source["nar_hash"].startswith("sha256-")
        assert source["rev"] is None
        assert created.json["comment"] == "flake"
        assert source["last_modified"] > 0

        hash_part = source["store_path"].removeprefix("/nix/store/")[:32]
        server.routes[f"GET /cache/main/{hash_part}.narinfo"] = [Answer(200, b"StorePath: ...\n")]
        assert gradient("build", flake, "--server", server.url, "--data-dir", data).code == 0
        assert len(server.asked("POST /api/v1/uploads")) == 1


def test_a_flake_in_a_repository_is_its_tracked_files_with_dir(data: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    flake = repository / "sub" / "flake.nix"
    flake.parent.mkdir(parents=True)
    flake.write_text("{ outputs = _: { }; }\n")
    environment = {
        **os.environ,
        "GIT_AUTHOR_DATE": "1700000000 +0000",
        "GIT_COMMITTER_DATE": "1700000000 +0000",
    }
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=repository, env=environment, check=True)
    script = {**routes(COMPLETED), "POST /api/v1/uploads": [answer({"committed": []})]}
    with running(script) as server:
        gradient("build", repository / "sub", "--server", server.url, "--data-dir", data)
        (created,) = server.asked(f"POST {EVALUATIONS}")
    source = created.json["source"]
    assert source["dir"] == "sub"
    assert (source["last_modified"], source["rev_count"]) == (1700000000, 1)
    assert len(source["rev"]) == 40
    assert created.json["comment"] == "sub"


# --- bad input ------------------------------------------------------------------------------------


def refused(ran: Ran, code: int, part: str) -> None:
    """Exit code, one line on stderr, and the object on stdout."""
    assert ran.code == code
    (line,) = ran.stderr.splitlines()
    assert part in line
    assert list(ran.json) == KEYS
    assert ran.json["status"] == "Failed"
    assert part in ran.json["errors"][0]["message"]


def test_a_wrong_token_is_exit_4(data: Path) -> None:
    script = routes(COMPLETED)
    script[f"POST {EVALUATIONS}"] = [answer({"error": "the token is wrong, or was revoked"}, 401)]
    with running(script) as server:
        ran = gradient("build", REMOTE, "--server", server.url, "--data-dir", data, "--json")
    refused(ran, 4, "the token is wrong")


def test_a_flake_reference_that_the_server_refuses_is_exit_2(data: Path) -> None:
    script = routes(COMPLETED)
    script[f"POST {EVALUATIONS}"] = [answer({"error": "no such thing\nas that"}, 400)]
    with running(script) as server:
        ran = gradient("build", REMOTE, "--server", server.url, "--data-dir", data, "--json")
    assert ran.stderr == "gradient build: no such thing as that\n"
    assert ran.code == 2


@pytest.mark.parametrize("flake", ["nixpkgs", "./nowhere", ".#a..b", "ftp://host/x"])
def test_a_bad_flake_is_exit_2(flake: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    with running({}) as server:
        ran = gradient("build", flake, "--server", server.url, "--data-dir", data, "--json")
    assert ran.code == 2
    assert len(ran.stderr.splitlines()) == 1


def test_a_folder_without_a_flake_is_exit_2(data: Path) -> None:
    with running({}) as server:
        ran = gradient("build", data, "--server", server.url, "--data-dir", data, "--json")
    refused(ran, 2, "no flake.nix")


def test_no_server_is_exit_3(data: Path) -> None:
    refused(gradient("build", REMOTE, "--data-dir", data, "--json"), 3, "no server runs on")


@pytest.mark.parametrize(
    ("variable", "argv0", "called"),
    [
        ("scripts/gradient", "/x/gradient/__main__.py", "scripts/gradient"),
        ("", "/x/gradient/__main__.py", "python -m gradient"),
        ("", "/x/bin/gradient", "gradient"),
    ],
)
def test_hints_can_be_typed_as_they_stand(
    variable: str, argv0: str, called: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADIENT_PROGRAM", variable)
    monkeypatch.setattr(sys, "argv", [argv0])
    assert f"start one with `{called} serve`" in gradient("status", "--data-dir", data).stderr
    assert gradient("build", "--frob").stderr.endswith(f"(see {called} build --help)\n")
    assert gradient("build", "--frob").stderr.startswith("gradient build: ")
    assert gradient("build", "--help").stdout.startswith(f"Usage: {called} build ")


def test_a_server_out_of_reach_is_exit_3(data: Path) -> None:
    (data / "http-url").write_text("http://127.0.0.1:9\n")
    ran = gradient("build", REMOTE, "--data-dir", data, "--json")
    refused(ran, 3, "the server http://127.0.0.1:9 cannot be reached: Connection refused")
    assert ran.stderr.endswith("; start it again with `gradient serve`\n")  # it ran here
    ran = gradient("build", REMOTE, "--server", "http://127.0.0.1:19", "--data-dir", data, "--json")
    refused(ran, 3, "the server http://127.0.0.1:19 cannot be reached")
    assert "start it" not in ran.stderr


@pytest.mark.nix
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--token-file", "/nonexistent/token"), "--token-file /nonexistent/token: No such file"),
        (("--server", "ftp://host"), "not an http:// or https:// URL"),
    ],
)
def test_a_worker_that_can_never_connect_does_not_try(
    arguments: tuple[str, ...], part: str, data: Path
) -> None:
    token = data / "worker-token"
    token.write_text("secret\n")
    token.chmod(0o600)
    ran = gradient("work", *arguments, "--data-dir", data)
    assert (ran.code, part in ran.stderr) == (2, True), ran.stderr


def test_something_else_on_the_port_is_exit_1(data: Path) -> None:
    with running({"GET /api/v1/server": [answer({"hello": "world"})]}) as server:
        ran = gradient("build", REMOTE, "--server", server.url, "--data-dir", data, "--json")
    refused(ran, 1, "another version")


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "--frobnicate"),
        ("up", "--http", "nowhere"),
        ("up", "--proto", "1.2.3.4:99999"),
        ("frobnicate",),
        ("log",),
    ],
)
def test_usage_is_exit_2_in_one_line(arguments: tuple[str, ...]) -> None:
    ran = gradient(*arguments)
    assert ran.code == 2
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stdout == ""


def test_settings_that_are_wrong_are_exit_2(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[server]\nfrobnicate = 1\n")
    refused(gradient("up", "--config", tmp_path / "x.toml", "--json"), 2, "no such setting")


def test_no_nix_is_exit_3_before_anything_starts(tmp_path: Path) -> None:
    data = tmp_path / "new"
    refused(gradient("up", "--nix", "/nonexistent", "--data-dir", data, "--json"), 3, "/nonexistent")
    refused(gradient("work", "--nix", "/nonexistent", "--data-dir", data, "--json"), 3, "/nonexistent")
    assert not data.exists()


def test_a_nix_without_a_daemon_beside_it_is_exit_3(tmp_path: Path) -> None:
    nix = tmp_path / "nix"
    nix.write_text("#!/bin/sh\n")
    nix.chmod(0o755)
    refused(gradient("up", tmp_path, "--nix", nix, "--data-dir", tmp_path / "d", "--json"), 3, "nix-daemon")


def test_no_nix_on_path_is_exit_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(gradient("up", tmp_path, "--data-dir", tmp_path / "d", "--json"), 3, "no `nix` on PATH")


# --- whose token goes where -----------------------------------------------------------------------


def test_the_token_of_this_host_goes_to_this_host_only(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIENT_SERVER__DATA_DIR", str(data))
    with running(routes(COMPLETED)) as server:
        gradient("build", REMOTE, "--server", server.url)
        (data / "http-url").write_text(f"{server.url}\n")
        gradient("build", REMOTE)
        gradient("build", REMOTE, "--server", f"{server.url}/")
        assert [r.token for r in server.asked(f"POST {EVALUATIONS}")] == [None, "secret", "secret"]


def test_a_token_file_is_used_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("other\n")
    file.chmod(0o600)
    with running(routes(COMPLETED)) as server:
        gradient("build", REMOTE, "--server", server.url, "--token-file", file)
        assert server.asked(f"POST {EVALUATIONS}")[0].token == "other"
        ran = gradient("build", REMOTE, "--server", server.url, "--token-file", tmp_path / "none", "--json")
    refused(ran, 2, "--token-file")


# --- log and status -------------------------------------------------------------------------------


def with_log() -> dict[str, list[Answer]]:
    return {
        **routes(FAILED),
        "GET /api/v1/builds/1/log": [Answer(200, "compiling\nerror: nöpe\n".encode())],
        "GET /api/v1/builds/99": [answer({"error": "there is no build 99"}, 404)],
        "GET /api/v1/builds/2": [answer(FAILED["builds"][1])],
        "GET /api/v1/builds/4": [answer(FAILED["builds"][2])],
        f"GET /cache/main/log/{'1' * 32}-broken.drv": [Answer(200, b"from the cache\n")],
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("1", "compiling\nerror: nöpe\n"),
        ("packages.x86_64-linux.broken", "compiling\nerror: nöpe\n"),
        ("broken", "compiling\nerror: nöpe\n"),
        (f"/nix/store/{'1' * 32}-broken.drv", "from the cache\n"),
    ],
)
def test_log_by_any_name(name: str, text: str) -> None:
    with running(with_log()) as server:
        told = gradient("log", name, "--server", server.url)
        ran = gradient("log", name, "--server", server.url, "--json")
    assert (told.code, told.stdout) == (0, text)
    assert ran.json["log"] == text


def test_log_follows_when_asked() -> None:
    with running(with_log()) as server:
        gradient("log", "1", "--follow", "--server", server.url)
        assert server.requests[-1].path == "/api/v1/builds/1/log?follow=1"


@pytest.mark.parametrize(
    ("name", "code", "part"),
    [
        ("99", 1, "there is no build 99"),
        ("nothing", 1, "has no attribute nothing, and no build of that name"),
        ("dependent", 1, "dependent (build 2) was not built: broken failed"),
        ("silent-lib", 1, "silent-lib (build 4) wrote no log"),
        (f"/nix/store/{'1' * 32}-none.drv", 1, "no log of "),
        ("typo", 1, "did not evaluate"),
        ("/nix/store/short", 2, "no store path"),
    ],
)
def test_log_of_nothing(name: str, code: int, part: str) -> None:
    with running(with_log()) as server:
        ran = gradient("log", name, "--server", server.url, "--json")
    refused(ran, code, part)


def test_status() -> None:
    job = {"job": "build:7", "kind": "build", "name": "hello-2.12", "since": None}
    worker = {"id": "x", "name": "host", "architectures": ["x86_64-linux"], "features": [], "running": [job]}
    waiting = {"reason": {"kind": "workers"}, "words": "waits for a worker", "since": None}
    now = {
        "workers": [worker],
        "evaluations": [
            {"evaluation": 7, "status": "Waiting", "waiting": waiting, "repository": None, "comment": "hello"}
        ],
        "queue": {"queued": 2, "building": 1, "created": 3},
        "children": {
            "resync": {"state": "backing off", "last_error": "gone", "last_ok": None, "restarts": 1}
        },
    }
    with running({"GET /api/v1/status": [answer(now)]}) as server:
        told = gradient("status", "--server", server.url)
        ran = gradient("status", "--server", server.url, "--json")
    assert told.stdout.splitlines() == [
        f"Gradient 9 at {server.url}",
        "1 build running, 2 queued, 3 waiting for dependencies",
        "worker host: x86_64-linux; 1 job running: hello-2.12",
        "evaluation 7 of hello: Waiting: waits for a worker",
        "resync is restarting: gone",
    ]
    assert ran.json["queue"] == now["queue"]
    assert json.loads(ran.stdout)["version"] == "9"


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    script = with_log()
    script["GET /api/v1/builds/1/log"] = [Answer(200, b"line\n" * 100_000)]
    with running(script) as server:
        command = [sys.executable, "-m", "gradient", "log", "1", "--server", server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == b"line\n"
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait() == 1


def test_ctrl_c_ends_the_watching_only(data: Path) -> None:
    script = routes(COMPLETED)
    script[f"GET {EVALUATIONS}/7/events"] = [
        lines({"event": "snapshot", **snapshot("Building")}, hang=True),
    ]
    with running(script) as server:
        command = [sys.executable, "-m", "gradient", "build", REMOTE, "--json", "--server", server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stderr is not None
            assert process.stdout is not None
            assert any(b"evaluation 7: http" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            said = json.loads(process.stdout.read())
            assert process.wait() == 130
        assert server.asked(f"POST {EVALUATIONS}/7/abort") == []
    assert (said["evaluation"], said["status"]) == (7, "Aborted")
    assert said["errors"][0]["message"] == "interrupted; evaluation 7 goes on"


def test_a_terminal_of_another_alphabet_gets_question_marks() -> None:
    with running(with_log()) as server:
        command = [sys.executable, "-m", "gradient", "log", "1", "--server", server.url]
        environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        done = subprocess.run(command, capture_output=True, env=environment, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (0, b"compiling\nerror: n?pe\n")


def test_the_fake_server_is_honest(data: Path) -> None:
    """A route that no script has is 404, so that a test cannot pass by asking for nothing."""
    with running({}) as server:
        ran = gradient("build", REMOTE, "--server", server.url, "--data-dir", data, "--json")
    assert isinstance(server, FakeServer)
    refused(ran, 1, "no such thing")
