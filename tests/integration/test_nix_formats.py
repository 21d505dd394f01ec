"""The pure Nix layer against a real Nix: the same hashes, paths, `.drv` bytes, references and locks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gradient.model import CachedSource
from gradient.nix.derivation import Derivation, parse_derivation, write_derivation
from gradient.nix.facts import discover
from gradient.nix.flake_lock import parse_flake_lock
from gradient.nix.flake_ref import evaluation_url
from gradient.nix.flake_url import parse_flake_ref
from gradient.nix.flake_wrapper import wrap_flake
from gradient.nix.hashes import Hash
from gradient.nix.store_path import StorePath, make_fixed_output_path, make_source_path, make_text_path
from tests.integration.nix_support import Nix

pytestmark = pytest.mark.nix


@pytest.fixture
def real(nix: str) -> Nix:
    return Nix(Path(nix))


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main"]
    argv = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def read(drv_path: str, root: str = "") -> tuple[bytes, Derivation]:
    data = Path(f"{root}{drv_path}").read_bytes()
    return data, parse_derivation(data, StorePath.parse(drv_path).name)


@pytest.mark.parametrize("algo", ["md5", "sha1", "sha256", "sha512"])
def test_hash_spellings(real: Nix, algo: Any) -> None:
    value = Hash.of(b"hello", algo)
    spelled = {
        form: real.out("nix", "hash", f"to-{form}", "--type", algo, value.base16())
        for form in ("base16", "base32", "base64", "sri")
    }
    assert spelled["sri"] == value.sri()
    assert f"{algo}:{spelled['base32']}" == value.nix32()
    assert {Hash.parse(text, algo) for text in spelled.values()} == {value}


def test_store_paths(real: Nix, tmp_path: Path) -> None:
    file = tmp_path / "hello.txt"
    file.write_text("hello\n")
    flat = {algo: Hash.of(b"hello\n", algo) for algo in ("md5", "sha1", "sha256", "sha512")}
    for algo, content in flat.items():
        path = real.out("nix-store", "--add-fixed", algo, str(file))
        assert make_fixed_output_path("hello.txt", content, recursive=False).path() == path
    for algo in flat:
        nar = Hash.parse(real.out("nix", "hash", "path", "--type", algo, "--base16", str(file)), algo)
        path = real.out("nix-store", "--add-fixed", "--recursive", algo, str(file))
        assert make_fixed_output_path("hello.txt", nar, recursive=True).path() == path
    assert make_source_path(nar_hash(real, file), "hello.txt").path() == real.out(
        "nix-store", "--add", str(file)
    )


def nar_hash(real: Nix, path: Path) -> Hash:
    return Hash.parse(real.out("nix", "hash", "path", str(path)))


def test_text_paths_with_references(real: Nix) -> None:
    expression = """
        let a = builtins.toFile "a" "first"; b = builtins.toFile "b" "second";
        in [ a b (builtins.toFile "c" "${b} ${a}") ]
    """
    a, b, c = (StorePath.parse(path) for path in real.eval("--expr", expression))
    assert make_text_path("a", Hash.of(b"first")) == a
    assert make_text_path("c", Hash.of(f"{b} {a}".encode()), [b, a]) == c


DERIVATIONS = r"""
let
  common = { name = "plain"; system = "x86_64-linux"; builder = "/bin/sh"; };
  plain = attributes: derivation (common // attributes);
  tree = { outputHashMode = "recursive"; };
  source = builtins.toFile "source" "text";
  several = plain { name = "several"; outputs = [ "out" "dev" "lib" ]; };
in [
  (plain { args = [ ]; })
  (plain { quotes = "a \"b\" \\n 'c' $d"; lines = "a\nb\r\nc\td"; name_ = "ä ☃ 😀"; empty = ""; })
  (plain { args = [ "-c" "echo \"$x\"" source ]; uses = [ several.dev several.out source ]; })
  several
  (plain { name = "flat"; outputHashAlgo = "sha512"; outputHash = builtins.hashString "sha512" ""; })
  (plain (tree // { name = "tree"; outputHash = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="; }))
  (plain {
    name = "structured"; __structuredAttrs = true; requiredSystemFeatures = [ "kvm" ]; timeout = 60;
    preferLocalBuild = true; pname = "x\"y"; nested = { a = [ 1 null { b = "\\"; } ]; };
  })
]
"""


def test_derivations_round_trip(real: Nix) -> None:
    roots = real.out("nix-instantiate", "-E", DERIVATIONS).splitlines()
    closure = {path for path in real.out("nix-store", "-qR", *roots).splitlines() if path.endswith(".drv")}
    for path in closure | set(roots):
        data, derivation = read(path)
        assert write_derivation(derivation) == data


def test_facts_of_real_derivations(real: Nix) -> None:
    roots = real.out("nix-instantiate", "-E", DERIVATIONS).splitlines()
    found = [discover(read(path)[1], path) for path in roots]
    several, flat, tree, structured = found[3:]
    assert [output.name for output in several.outputs] == ["dev", "lib", "out"]
    assert [facts.is_fixed_output for facts in found[3:]] == [False, True, True, False]
    assert flat.outputs[0].path != tree.outputs[0].path != ""
    assert (structured.required_features, structured.timeout_secs) == (("kvm",), 60)
    assert (structured.pname, structured.prefer_local_build) == ('x"y', True)


def test_an_output_whose_path_nobody_knows_yet(real: Nix, tmp_path: Path) -> None:
    """In a store of its own: see FEATURES."""
    options = ["--store", str(tmp_path), "--option", "experimental-features", "ca-derivations"]
    expression = """derivation {
      name = "floating"; system = "x86_64-linux"; builder = "/bin/sh";
      __contentAddressed = true; outputHashMode = "recursive"; outputHashAlgo = "sha256";
    }"""
    path = real.out("nix-instantiate", *options, "-E", expression)
    data, derivation = read(path, str(tmp_path))
    assert write_derivation(derivation) == data
    found = discover(derivation, path)
    assert [output.path for output in found.outputs] == [""]
    assert not found.is_fixed_output


def test_what_derivations_hold(real: Nix) -> None:
    paths = real.out("nix-instantiate", "-E", DERIVATIONS).splitlines()
    _, quoted = read(paths[1])
    assert quoted.env["quotes"] == "a \"b\" \\n 'c' $d"
    assert quoted.env["lines"] == "a\nb\r\nc\td"
    assert quoted.env["name_"] == "ä ☃ 😀"
    _, using = read(paths[2])
    assert list(using.input_drvs.values()) == [("dev", "out")]
    assert using.args == ("-c", 'echo "$x"', *using.input_srcs)


def test_fixed_output_paths_are_predicted(real: Nix) -> None:
    paths = real.out("nix-instantiate", "-E", DERIVATIONS).splitlines()
    for path in paths[4:6]:
        _, derivation = read(path)
        [output] = derivation.outputs
        algo = output.hash_algo.removeprefix("r:")
        content = Hash.parse(f"{algo}:{output.hash}")
        recursive = output.hash_algo.startswith("r:")
        assert make_fixed_output_path(derivation.name, content, recursive=recursive).path() == output.path


# --- flakes ---------------------------------------------------------------------------------------

FLAKE = """{
  inputs.dep.url = "git+file://DEP";
  inputs.again.follows = "dep";
  outputs = { self, dep, again }: {
    facts = { inherit (self) rev lastModified revCount; };
    drv = (derivation {
      name = "x"; system = "x86_64-linux"; builder = "/bin/sh"; src = dep; text = ./text; inherit (self) rev;
    }).drvPath;
    dep = dep.outPath;
  };
}
"""


@pytest.fixture
def repository(real: Nix, tmp_path: Path) -> Path:
    """A git repository with a locked flake in its folder `a/b` and at its top."""
    dep, repository = tmp_path / "dep", tmp_path / "repo"
    for folder in (dep, repository / "a" / "b"):
        folder.mkdir(parents=True)
    git(dep, "init", "-q", ".")
    (dep / "flake.nix").write_text("{ outputs = _: { }; }")
    git(dep, "add", ".")
    git(dep, "commit", "-qm", "one")
    git(repository, "init", "-q", ".")
    for folder in (repository, repository / "a" / "b"):
        (folder / "flake.nix").write_text(FLAKE.replace("DEP", str(dep)))
        (folder / "text").write_text("text")
    real.run("nix", "flake", "lock", f"path:{repository}")
    (repository / "a" / "b" / "flake.lock").write_bytes((repository / "flake.lock").read_bytes())
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "one")
    return repository


def metadata(real: Nix, url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(real.out("nix", "flake", "metadata", "--json", url))
    return found


def fetched(real: Nix, repository: Path, directory: str = "") -> CachedSource:
    found = metadata(real, f"git+file://{repository}")
    locked = found["locked"]
    return CachedSource(
        store_path=found["path"],
        nar_hash=locked["narHash"],
        rev=locked["rev"],
        last_modified=locked["lastModified"],
        rev_count=locked["revCount"],
        dir=directory,
    )


def test_nix_reads_our_references_as_we_do(real: Nix, repository: Path) -> None:
    ours = parse_flake_ref(f"git+file://{repository}?ref=main&dir=a/b")
    theirs = parse_flake_ref(metadata(real, str(ours))["url"])
    assert theirs.rev == git(repository, "rev-parse", "HEAD")
    assert theirs.ref in {"main", "refs/heads/main"}
    assert (theirs.kind, theirs.location, theirs.dir) == (ours.kind, ours.location, "a/b")
    assert metadata(real, str(theirs))["locked"]["rev"] == theirs.rev


def test_a_source_in_the_store_evaluates_as_where_it_came_from(real: Nix, repository: Path) -> None:
    expected = real.eval(f"git+file://{repository}#drv")
    source = fetched(real, repository)
    url = evaluation_url(source)
    assert real.eval(f"{url}#drv") == expected
    facts = {"rev": source.rev, "lastModified": source.last_modified, "revCount": source.rev_count}
    assert real.eval(f"{url}#facts") == facts


def test_a_flake_in_a_folder_evaluates_through_its_wrapper(
    real: Nix, repository: Path, tmp_path: Path
) -> None:
    expected = real.eval(f"git+file://{repository}?dir=a/b#drv")
    lock = (repository / "a" / "b" / "flake.lock").read_bytes()
    wrapper = wrap_flake(fetched(real, repository, "a/b"), lock)
    folder = tmp_path / "wrapper"
    folder.mkdir()
    (folder / "flake.nix").write_text(wrapper.flake_nix)
    (folder / "flake.lock").write_text(wrapper.flake_lock)
    expression = f'(builtins.getFlake "path:{folder}").inputs.source.drv'
    assert real.eval("--impure", "--expr", expression) == expected


def test_a_lock_file_predicts_store_paths(real: Nix, repository: Path) -> None:
    lock = parse_flake_lock((repository / "flake.lock").read_bytes())
    assert lock.root_inputs == ("again", "dep")
    assert lock.resolve("again") == lock.resolve("dep") == "dep"
    dep = lock.locked_inputs["dep"]
    assert dep.store_path is not None
    assert dep.url is not None
    assert dep.store_path.path() == real.eval(f"git+file://{repository}#dep")
    assert dep.store_path.path() == metadata(real, dep.url)["path"]
