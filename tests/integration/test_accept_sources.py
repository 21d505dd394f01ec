"""Every way to name a flake: the same derivations as `nix` makes of it, without a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.accept_support import Home

pytestmark = pytest.mark.nix

SYSTEM = "x86_64-linux"

# What a flake can see of its source is in the derivation: a difference makes another path.
SEEN = """
  seen = build "seen" {
    rev = self.rev or "none";
    lastModified = toString (self.lastModified or 0);
    source = self.outPath;
    readme = builtins.readFile ./readme;
  } "echo > $out";
"""


@pytest.fixture
def repository(service: Home, request: pytest.FixtureRequest) -> Path:
    """A repository with one commit: a flake at its top and one in `sub`."""
    name = request.node.name
    folder = service.flake(SEEN, name)
    (folder / "readme").write_text("committed")
    below = service.flake(SEEN, f"{name}/sub")
    (below / "readme").write_text("below")
    service.git(folder, "init", "-q", "-b", "main", ".")
    commit(service, folder)
    return folder


def commit(service: Home, folder: Path) -> str:
    service.git(folder, "add", "-A")
    service.git(folder, "commit", "-q", "-m", "state")
    return service.git(folder, "rev-parse", "HEAD")


def ours(service: Home, flake: str) -> str:
    """The .drv path that an evaluation of FLAKE builds."""
    ended = service.run("build", "--json", flake)
    assert ended.code == 0, ended
    (point,) = ended.object["entry_points"]
    assert point["attr"] == f"packages.{SYSTEM}.seen"
    path: str = point["drv_path"]
    return path


def theirs(service: Home, flake: str) -> str:
    """The .drv path of Nix for the same package."""
    attribute = f"{flake}#packages.{SYSTEM}.seen.drvPath"
    path: str = service.nix.eval(attribute, "--no-write-lock-file", "--option", "eval-cache", "false")
    return path


def environment(path: str) -> dict[str, str]:
    """The variables of a derivation."""
    text = Path(path).read_text()
    start = text.rindex(',[("')
    pairs = text[start + 1 : -1].replace("(", "[").replace(")", "]")
    return dict(json.loads(pairs))


def test_a_clean_tree(service: Home, repository: Path) -> None:
    """`self.rev` is there, as with the commit by its URL."""
    rev = service.git(repository, "rev-parse", "HEAD")
    found = ours(service, str(repository))
    assert environment(found)["rev"] == rev
    assert found == theirs(service, f"git+file://{repository}?rev={rev}")
    assert found == theirs(service, str(repository))


def test_a_dirty_tree(service: Home, repository: Path) -> None:
    """Changed and staged files as they are, others not at all, and no `self.rev`."""
    (repository / "readme").write_text("changed")
    (repository / "staged").write_text("staged")
    (repository / "unknown").write_text("unknown")
    service.git(repository, "add", "staged")
    found = ours(service, str(repository))
    seen = environment(found)
    assert (seen["rev"], seen["readme"]) == ("none", "changed")
    files = {path.name for path in Path(seen["source"]).iterdir()}
    assert "staged" in files
    assert "unknown" not in files
    assert found == theirs(service, str(repository))


def test_a_flake_in_a_folder_of_its_repository(service: Home, repository: Path) -> None:
    found = ours(service, f"{repository}/sub")
    assert environment(found)["readme"] == "below"
    assert found == theirs(service, f"git+file://{repository}?dir=sub")


def test_a_url_that_the_worker_fetches(service: Home, repository: Path) -> None:
    first = service.git(repository, "rev-parse", "HEAD")
    (repository / "readme").write_text("second")
    second = commit(service, repository)
    (repository / "readme").write_text("not committed")
    url = f"git+file://{repository}"
    found = ours(service, f"{url}?ref=main&rev={first}")
    assert environment(found)["rev"] == first
    assert found == theirs(service, f"{url}?rev={first}")
    assert environment(ours(service, f"{url}?ref=main"))["rev"] == second
    below = ours(service, f"{url}?dir=sub&ref=main")
    assert environment(below)["readme"] == "below"
    assert below == theirs(service, f"{url}?dir=sub&rev={second}")


def test_a_folder_outside_of_git(service: Home, request: pytest.FixtureRequest) -> None:
    folder = service.flake(SEEN, request.node.name)
    (folder / "readme").write_text("plain")
    for flake in (str(folder), f"path:{folder}"):
        found = ours(service, flake)
        assert environment(found)["rev"] == "none"
        assert found == theirs(service, f"path:{folder}")


def test_locked_inputs(service: Home, request: pytest.FixtureRequest) -> None:
    """A path and a repository as inputs, pinned by the lock file and fetched without a network."""
    folder = service.folder / "flakes" / request.node.name
    library, plain, flake = folder / "library", folder / "plain", folder / "flake"
    for made in (library, plain, flake):
        made.mkdir(parents=True)
    (library / "flake.nix").write_text('{ outputs = { self }: { words = "from ${self.rev}"; }; }')
    service.git(library, "init", "-q", "-b", "main", ".")
    rev = commit(service, library)
    (plain / "data").write_text("plain data")
    text = (service.flake("", f"{request.node.name}/template") / "flake.nix").read_text()
    inputs = f"""
      inputs.library.url = "git+file://{library}?ref=main";
      inputs.plain = {{ url = "path:{plain}"; flake = false; }};
    """
    package = (
        'seen = build "seen" { words = library.words; data = builtins.readFile "${plain}/data"; }'
        ' "echo > $out";'
    )
    text = text.replace("{ self }:", "{ self, library, plain }:").replace(
        "outputs =", inputs + "outputs =", 1
    )
    (flake / "flake.nix").write_text(text.replace("rec {", "rec { " + package))
    service.git(flake, "init", "-q", "-b", "main", ".")
    service.git(flake, "add", "-A")
    service.nix.out("nix", "flake", "lock", str(flake))
    commit(service, flake)
    # The lock file says which state it is.
    (library / "flake.nix").write_text('{ outputs = _: { words = "newer"; }; }')
    commit(service, library)

    found = ours(service, str(flake))
    assert environment(found)["words"] == f"from {rev}"
    assert environment(found)["data"] == "plain data"
    assert found == theirs(service, str(flake))


def test_the_same_flake_again_builds_nothing(service: Home, repository: Path) -> None:
    before = len(service.query("SELECT FROM build_attempt"))
    first = ours(service, str(repository))
    attempts = len(service.query("SELECT FROM build_attempt"))
    assert attempts == before + 1
    assert ours(service, str(repository)) == first
    assert len(service.query("SELECT FROM build_attempt")) == attempts
