"""FLAKE[#WILDCARD], as `nix build` means it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradient.cli.faults import BadFlake
from gradient.cli.flake_arg import FlakeArg, Local, Remote, parse_flake_arg


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (".", FlakeArg(Local(Path()))),
        ("", FlakeArg(Local(Path()))),
        ("./sub", FlakeArg(Local(Path("sub")))),
        ("/abs/flake", FlakeArg(Local(Path("/abs/flake")))),
        ("./sub?dir=deeper", FlakeArg(Local(Path("sub/deeper")))),
        ("path:/abs?dir=sub", FlakeArg(Local(Path("/abs"), whole_folder=True, dir="sub"))),
        (".#hello", FlakeArg(Local(Path()), ("hello",))),
        (".#packages.#.#", FlakeArg(Local(Path()), ("packages.#.#",))),
        (".#a.*,!a.b", FlakeArg(Local(Path()), ("a.*,!a.b",))),
        ("git+file:///abs/repo?ref=main", FlakeArg(Remote("git+file:///abs/repo?ref=main"))),
        ("github:owner/repo/main#hello", FlakeArg(Remote("github:owner/repo/main"), ("hello",))),
        ("https://host/x.tar.gz", FlakeArg(Remote("https://host/x.tar.gz"))),
    ],
)
def test_meaning(text: str, meaning: FlakeArg) -> None:
    assert parse_flake_arg(text) == meaning


def test_a_bare_name_is_a_folder_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples" / "hello").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_flake_arg("examples/hello#x") == FlakeArg(Local(Path("examples/hello")), ("x",))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nixpkgs", "registry"),
        ("ftp://host/x", "cannot be fetched by"),
        (".?rev=" + "a" * 40, "git+file://"),
        (".#a..b", "malformed"),
        (".#!a", "nothing to evaluate"),
        ("git+https://-oops/x", "names no host"),
    ],
)
def test_what_is_no_flake_is_refused_in_one_line(text: str, part: str) -> None:
    with pytest.raises(BadFlake) as refusal:
        parse_flake_arg(text)
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)
