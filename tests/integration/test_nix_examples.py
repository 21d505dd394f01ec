"""Every example evaluates and builds with a real Nix, without network and without nixpkgs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gradient.nix.derivation import Derivation, parse_derivation
from gradient.nix.store_path import StorePath
from tests.integration.nix_support import Nix

pytestmark = pytest.mark.nix

EXAMPLES = Path(__file__).parents[2] / "examples"
SYSTEMS = {"x86_64-linux", "aarch64-linux", "x86_64-darwin", "aarch64-darwin"}
DRV_PATHS = "builtins.mapAttrs (system: builtins.mapAttrs (name: package: package.drvPath))"


@pytest.fixture
def real(nix: str) -> Nix:
    return Nix(Path(nix))


@pytest.fixture
def system(real: Nix) -> str:
    found: str = real.eval("--impure", "--expr", "builtins.currentSystem")
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The examples apart from this repository: they are packed into the store as they are."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


def drv_paths(real: Nix, flake: str, output: str = "packages") -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = real.eval(
        f"{flake}#{output}", "--apply", DRV_PATHS, "--no-write-lock-file"
    )
    return found


def build(real: Nix, *installables: str) -> dict[str, str]:
    """Build, and the output paths by derivation name and output."""
    built = json.loads(real.out("nix", "build", "--no-link", "--json", *installables))
    return {
        f"{StorePath.parse(item['drvPath']).name.removesuffix('.drv')}.{name}": path
        for item in built
        for name, path in item["outputs"].items()
    }


def references(real: Nix, path: str) -> set[str]:
    found = real.out("nix-store", "-q", "--references", path).splitlines()
    return {StorePath.parse(reference).name for reference in found}


def read(drv_path: str) -> Derivation:
    return parse_derivation(Path(drv_path).read_bytes(), StorePath.parse(drv_path).name)


@pytest.mark.parametrize(
    ("example", "packages", "checks", "systems"),
    [
        ("hello", {"hello", "default"}, {"greeting"}, SYSTEMS),
        ("diamond", {"a", "b", "c", "d", "default"}, None, SYSTEMS),
        ("failing", {"broken", "dependent", "independent"}, None, SYSTEMS),
        ("two-systems", {"native", "default"}, None, {"x86_64-linux", "riscv64-linux"}),
        ("outputs", {"data", "library", "tool", "default"}, {"linked"}, SYSTEMS),
    ],
)
def test_examples_evaluate(
    real: Nix, copy: Path, example: str, packages: set[str], checks: set[str] | None, systems: set[str]
) -> None:
    flake = f"path:{copy / example}"
    found = drv_paths(real, flake)
    assert {system: set(names) for system, names in found.items()} == dict.fromkeys(systems, packages)
    for system, names in found.items():
        assert {read(path).system for path in names.values()} == {system}
    if checks is not None:
        assert {system: set(names) for system, names in drv_paths(real, flake, "checks").items()} == (
            dict.fromkeys(systems, checks)
        )


def test_hello_builds(real: Nix, copy: Path, system: str) -> None:
    flake = f"path:{copy / 'hello'}"
    built = build(real, flake, f"{flake}#checks.{system}.greeting")
    assert (
        Path(built["hello.out"]).read_text() == Path(built["greeting.out"]).read_text() == "Hello, world!\n"
    )


def test_diamond_builds(real: Nix, copy: Path) -> None:
    built = build(real, f"path:{copy / 'diamond'}")
    assert Path(built["d.out"]).read_text() == "d\n  b\n    a\n  c\n    a\n"


def test_outputs_refer_to_each_other(real: Nix, copy: Path, system: str) -> None:
    flake = f"path:{copy / 'outputs'}"
    library = read(drv_paths(real, flake)[system]["library"])
    assert [output.name for output in library.outputs] == ["dev", "lib", "out"]
    built = build(real, f"{flake}#tool", f"{flake}#checks.{system}.linked")
    paths = {output.name: output.path for output in library.outputs}
    assert references(real, built["tool.out"]) == {"library-lib"}
    assert references(real, paths["dev"]) == {"library-lib"}
    assert references(real, paths["lib"]) == {"data", "library-lib"}
    assert references(real, paths["out"]) == set()


def test_failing_fails_and_the_rest_builds(real: Nix, copy: Path) -> None:
    flake = f"path:{copy / 'failing'}"
    failed = real.run("nix", "build", "--no-link", "--print-build-logs", f"{flake}#dependent", check=False)
    assert failed.returncode != 0
    assert "error: part 2 does not compile" in failed.stderr
    assert "compiling part 1 of 2" in failed.stderr
    assert Path(build(real, f"{flake}#independent")["independent.out"]).is_file()


def test_two_systems_name_their_system(real: Nix, copy: Path) -> None:
    found = drv_paths(real, f"path:{copy / 'two-systems'}")
    assert read(found["riscv64-linux"]["native"]).name == "native-riscv64-linux"


# --- layers ---------------------------------------------------------------------------------------


def layers(real: Nix, flake: str, *arguments: str) -> dict[str, str]:
    apply = "packages: builtins.mapAttrs (name: package: package.drvPath) packages.x86_64-linux"
    found: dict[str, str] = real.eval(f"{flake}#packages", "--apply", apply, *arguments)
    return found


def test_layers_are_500_derivations_each_on_the_layer_below(real: Nix, copy: Path) -> None:
    found = layers(real, f"path:{copy / 'layers'}")
    assert set(found) == {f"layer{layer}-{index}" for layer in range(10) for index in range(50)}
    assert len(set(found.values())) == 500
    below = {
        path: {} if name.startswith("layer0-") else read(path).input_drvs for name, path in found.items()
    }
    layer_of = {path: int(name[len("layer")]) for name, path in found.items()}
    for path, inputs in below.items():
        assert len(inputs) == (4 if layer_of[path] else 0)
        assert {layer_of[dependency] for dependency in inputs} <= {layer_of[path] - 1}


def test_a_new_salt_makes_derivations_that_nobody_has_built(real: Nix, copy: Path, tmp_path: Path) -> None:
    flake = f"path:{copy / 'layers'}"
    before = layers(real, flake)
    override = tmp_path / "salt"
    override.mkdir()
    (override / "flake.nix").write_text('{ outputs = _: { salt = "fresh"; }; }')
    overridden = layers(real, flake, "--override-input", "salt", f"path:{override}", "--no-write-lock-file")
    (copy / "layers" / "salt").write_text("fresh\n")
    rewritten = layers(real, flake)
    assert set(before.values()).isdisjoint(rewritten.values())
    assert overridden == rewritten


def test_layers_in_a_folder_of_a_repository(real: Nix, copy: Path) -> None:
    """As `builtins.getFlake` opens it: no lock file may have to change."""
    expected = layers(real, f"path:{copy / 'layers'}")["layer9-49"]
    for arguments in (["init", "-q", "."], ["add", "."]):
        subprocess.run(["git", "-C", str(copy.parent), *arguments], check=True)
    flake = f'builtins.getFlake "git+file://{copy.parent}?dir=examples/layers"'
    expression = f"({flake}).packages.x86_64-linux.layer9-49.drvPath"
    assert real.eval("--impure", "--expr", expression) == expected
