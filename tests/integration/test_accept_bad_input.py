"""Whatever is wrong is said in one clear line with the right exit code, and never with a traceback."""

from __future__ import annotations

import json
import re
import shutil
import socket
import stat
from pathlib import Path

import attrs
import psycopg
import pytest

from gradient.cli.faults import Exit
from tests.integration.accept_support import Ended, Home, free_port

pytestmark = pytest.mark.nix

SYSTEM = "x86_64-linux"


def check(ended: Ended, code: Exit, *words: str) -> None:
    """One line on stderr with all of `words`, in an exit with `code`; the same in the object of --json."""
    assert ended.code == code, ended
    assert len(ended.stderr.splitlines()) == 1, ended
    line = ended.stderr.rstrip()
    assert re.match(r"gradient( [a-z]+)?: ", line), line
    for word in words:
        assert word in line, (word, line)
    (answer,) = ended.stdout.splitlines()
    found = json.loads(answer)
    assert found["status"] == "Failed"
    assert found["entry_points"] == []
    (error,) = found["errors"]
    assert " ".join(error["message"].split()) in line
    assert found["seconds"] > 0


def last_line(ended: Ended) -> Ended:
    """What a check sees of a command that fails only after its server has begun to serve."""
    return attrs.evolve(ended, stderr=ended.stderr.splitlines()[-1])


def up(place: Home, *arguments: str) -> Ended:
    ended = place.run("up", "--once", "--json", *arguments)
    assert place.processes() == {}
    return ended


# --- the flake, as the command line names it ------------------------------------------------------


@attrs.frozen
class Named:
    """What is given for FLAKE, and what has to be said of it, by `up` just as by `build`."""

    flake: str
    words: tuple[str, ...]
    command: str = "build"


BAD_FLAKES = [
    Named("./not-there", ("not-there",), "up"),
    Named("./not-there", ("not-there",)),
    Named("not-there", ("not-there",)),
    Named("/not/there#hello", ("/not/there",)),
    Named("path:/not/there", ("/not/there",)),
    Named("./empty", ("flake.nix",), "up"),
    Named("./empty", ("flake.nix",)),
    Named("path:./empty", ("flake.nix",)),
    Named("./file", ("file",)),
    Named("./untracked", ("git", "add")),
    Named("github:", ("github",), "up"),
    Named("github:", ("github",)),
    Named("github:owner", ("github",)),
    Named("gopher://host/flake", ("gopher",)),
    Named("git+file:///x?rev=nonsense", ("rev",)),
    Named("./good?rev=0000000000000000000000000000000000000000", ("git+file://",)),
    Named("./good#a..b", ("a..b",)),
    Named('./good#"a', ('"a',)),
    Named("", ()),
]


@pytest.mark.parametrize("named", BAD_FLAKES, ids=lambda named: f"{named.command} {named.flake}")
def test_a_flake_that_is_none(bad_flakes: Home, place: Home, named: Named) -> None:
    if named.command == "up":
        shutil.copytree(bad_flakes.folder / "empty", place.folder / "empty")
        ended = up(place, named.flake)
    else:
        ended = bad_flakes.run("build", "--json", named.flake)
    check(ended, Exit.USAGE, *named.words)


@pytest.fixture(scope="module")
def bad_flakes(service: Home) -> Home:
    """A working folder with a good flake, and things that are none."""
    shutil.copytree(service.flake('hello = build "hello" { } "echo > $out";'), service.folder / "good")
    (service.folder / "empty").mkdir()
    (service.folder / "file").write_text("{ }")
    shutil.copytree(service.folder / "good", service.folder / "untracked")
    service.git("untracked", "init", "-q")
    return service


# --- the machine ----------------------------------------------------------------------------------


def test_no_nix_where_it_is_named(place: Home) -> None:
    flake = str(place.example("hello"))
    place.nix_option = ("--nix", "/not/there/nix")
    check(up(place, flake), Exit.ENVIRONMENT, "/not/there/nix", "install Nix")


def test_no_nix_at_all(place: Home) -> None:
    flake, place.nix_option = str(place.example("hello")), ()
    place.environment = {"PATH": str(place.shared)}
    check(up(place, flake), Exit.ENVIRONMENT, "nix", "install Nix")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no idea what to do >&2; exit 1", ("no idea what to do",)),
        ("echo hello, I am no daemon; cat > /dev/null", ("not a Nix daemon",)),
        pytest.param("cat > /dev/null", ("did not answer",), marks=pytest.mark.full),
    ],
    ids=["ends", "babbles", "listens"],
)
def test_a_daemon_that_is_none(place: Home, script: str, words: tuple[str, ...]) -> None:
    flake = str(place.example("hello"))
    place.nix_option = ("--nix", str(fake_daemon(place, script)))
    ended = up(place, flake)
    check(last_line(ended), Exit.ENVIRONMENT, *words)
    assert ended.stderr.count(words[0]) == 1, ended.stderr


def fake_daemon(place: Home, script: str) -> Path:
    """A real `nix` beside a `nix-daemon` of ours; the path of the first."""
    folder = place.folder / "bin"
    folder.mkdir()
    (folder / "nix").symlink_to(place.nix.binary)
    daemon = folder / "nix-daemon"
    daemon.write_text(f"#!/bin/sh\n{script}\n")
    daemon.chmod(0o755)
    return folder / "nix"


@pytest.mark.parametrize("option", ["--http", "--proto"])
def test_a_port_in_use(place: Home, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        ended = up(place, option, address, str(place.example("hello")))
    check(ended, Exit.ENVIRONMENT, address, "in use")


def test_an_address_of_another_machine(place: Home) -> None:
    check(
        up(place, "--http", "192.0.2.1:3000", str(place.example("hello"))), Exit.ENVIRONMENT, "192.0.2.1:3000"
    )


def test_a_data_directory_of_a_newer_version(place: Home) -> None:
    place.data.root.mkdir()
    place.data.version.write_text("99\n")
    check(up(place, str(place.example("hello"))), Exit.ENVIRONMENT, "newer", "99", str(place.data.root))
    assert sorted(place.data.root.iterdir()) == [place.data.version]


def test_a_data_directory_that_is_a_file(place: Home) -> None:
    place.data.root.write_text("")
    check(up(place, str(place.example("hello"))), Exit.ENVIRONMENT, str(place.data.root))


def test_a_database_that_is_down(place: Home) -> None:
    url = f"postgresql://somebody:secret@127.0.0.1:{free_port()}/gradient"
    ended = up(place, "--database-url", url, str(place.example("hello")))
    check(ended, Exit.ENVIRONMENT, "PostgreSQL", "127.0.0.1")
    assert "secret" not in ended.stderr


def test_a_database_url_that_is_none(place: Home) -> None:
    ended = up(place, "--database-url", "my database", str(place.example("hello")))
    check(ended, Exit.ENVIRONMENT, "database")


def test_a_database_of_a_newer_version(place: Home, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO schema_migration VALUES (9999, 'tomorrow', '2030-01-01', '')")
    ended = up(place, "--database-url", database_url, str(place.example("hello")))
    check(ended, Exit.ENVIRONMENT, "9999", "newer")


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--frobnicate"), ("--frobnicate",)),
        (("upp",), ("upp",)),
        (("up", "--http", "nowhere"), ("--http",)),
        (("up", "--http", "127.0.0.1:99999"), ("--http",)),
        (("up", "a", "b"), ("b",)),
        (("log",), ("BUILD",)),
    ],
)
def test_usage(place: Home, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    ended = place.run_bare(*arguments)
    assert ended.code == Exit.USAGE, ended
    (line,) = ended.stderr.splitlines()
    assert all(word in line for word in ("gradient", "--help", *words)), line


def test_settings_that_are_not_understood(place: Home) -> None:
    config = place.folder / "gradient.toml"
    config.write_text("[build]\nmaxAttemps = 3\n")
    check(up(place, "--config", str(config), "."), Exit.USAGE, "maxAttemps")
    check(up(place, "--config", "/not/there.toml", "."), Exit.USAGE, "/not/there.toml")


# --- what a flake says of itself -------------------------------------------------------------------


def evaluated(ended: Ended, *words: str) -> dict[str, str]:
    """The entry points of a failed evaluation by attribute; all of `words` are in its errors."""
    assert ended.code == Exit.FAILED, ended
    assert ended.object["status"] == "Failed"
    told = "\n".join(error["message"] for error in ended.object["errors"])
    for word in words:
        assert word in told, (word, told)
        assert word in ended.stderr, (word, ended.stderr)
    assert "Traceback" not in ended.stderr
    assert "gradient.worker" not in ended.stderr
    return {point["attr"]: point["status"] for point in ended.object["entry_points"]}


def test_an_attribute_that_does_not_exist(service: Home) -> None:
    flake = service.flake('hello = build "hello" { } "echo > $out";', "one")
    ended = service.run("build", "--json", f"{flake}#nope")
    assert evaluated(ended, "nope") == {}
    (error,) = ended.object["errors"]
    assert len(error["message"].splitlines()) == 1


def test_a_syntax_error(service: Home) -> None:
    flake = service.flake("hello = ;", "syntax")
    assert evaluated(service.run("build", "--json", str(flake)), "syntax error", "flake.nix") == {}


def test_an_attribute_that_throws(service: Home) -> None:
    flake = service.flake(
        """
        bad = throw "not on a Sunday";
        good = build "good" { } "echo > $out";
        """,
        "throws",
    )
    ended = service.run("build", "--json", str(flake))
    found = evaluated(ended, "not on a Sunday")
    assert found == {f"packages.{SYSTEM}.bad": "EvalFailed", f"packages.{SYSTEM}.good": "Completed"}
    (error,) = ended.object["errors"]
    assert error["source"].endswith("bad")


def test_a_flake_without_outputs(service: Home) -> None:
    folder = service.folder / "flakes" / "nothing"
    folder.mkdir(parents=True)
    (folder / "flake.nix").write_text("{ outputs = _: { }; }")
    assert evaluated(service.run("build", "--json", str(folder)), "no packages") == {}
    (folder / "flake.nix").write_text("{ }")
    assert evaluated(service.run("build", "--json", str(folder)), "outputs") == {}


def test_a_repository_that_is_not_there(service: Home) -> None:
    """Fetched by the worker: it is the evaluation that fails."""
    ended = service.run("build", "--json", f"git+file://{service.folder}/no-repository")
    assert evaluated(ended, "no-repository") == {}


# --- a server that runs, or does not --------------------------------------------------------------


@pytest.mark.parametrize("command", [("build", "."), ("log", "1"), ("status",)], ids=lambda c: c[0])
def test_no_server(place: Home, command: tuple[str, ...]) -> None:
    name, *arguments = command
    check(place.run(name, "--json", *arguments), Exit.ENVIRONMENT, "no server", "gradient serve")
    gone = f"http://127.0.0.1:{free_port()}"
    check(place.run(name, "--json", "--server", gone, *arguments), Exit.ENVIRONMENT, gone)
    # What a killed server leaves behind.
    place.data.root.mkdir()
    place.data.http_url.write_text(f"{gone}\n")
    check(place.run(name, "--json", *arguments), Exit.ENVIRONMENT, gone)


def test_a_server_address_that_is_none(place: Home) -> None:
    check(place.run("status", "--json", "--server", "nonsense"), Exit.USAGE, "nonsense")


def test_a_wrong_token(service: Home, place: Home) -> None:
    url = service.data.http_url.read_text().strip()
    flake = str(place.example("hello"))
    wrong = place.folder / "token"
    wrong.write_text("0123456789abcdef0123456789abcdef\n")
    wrong.chmod(stat.S_IRUSR | stat.S_IWUSR)
    server = ("--json", "--server", url)
    check(place.run("build", *server, "--token-file", str(wrong), flake), Exit.UNAUTHORISED, "token")
    check(place.run("build", *server, flake), Exit.UNAUTHORISED, "token")
    missing = str(place.folder / "no-token")
    check(place.run("build", *server, "--token-file", missing, flake), Exit.USAGE, missing)
    check(place.run("work", *server, "--token-file", str(wrong)), Exit.UNAUTHORISED, "token", "--token-file")
    # Reading needs none.
    assert place.run("status", "--server", url).code == 0


@pytest.mark.parametrize(
    ("build", "words"),
    [("999999", "999999"), ("/nix/store/00000000000000000000000000000000-x.drv", "no log"), ("no", "no")],
)
def test_the_log_of_an_unknown_build(service: Home, build: str, words: str) -> None:
    check(service.run("log", "--json", build), Exit.FAILED, words)
