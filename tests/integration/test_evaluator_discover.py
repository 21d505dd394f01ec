"""Discovery with a real Nix: what is found, what fails alone, what is streamed, what is killed."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import MockClock

from gradient.model import CachedSource
from gradient.nix.evaluator.child import Child
from gradient.nix.evaluator.discover import Request, discover
from gradient.nix.evaluator.errors import EvaluatorError, EvaluatorUnusable
from gradient.nix.evaluator.findings import (
    AttributeFailed,
    Evaluated,
    Finding,
    FlakeAddress,
    Progress,
    TargetUnmatched,
)
from gradient.nix.evaluator.flake import FlakeUnusable, fetch_tree
from gradient.nix.evaluator.messages import headline, is_import_from_derivation
from gradient.nix.evaluator.pool import EvaluatorPool
from gradient.nix.evaluator.settings import EvaluatorSettings, Role
from gradient.nix.flake_wrapper import INPUT_NAME, wrap_flake
from gradient.nix.wildcard import parse_wildcards
from tests.integration.evaluator_support import (
    ENDLESS,
    GREEDY,
    NIX,
    PRELUDE,
    commit,
    is_alive,
    outputs_flake,
    run_nix,
    store_flake,
)
from tests.patience import until

pytestmark = pytest.mark.nix

StartPool = Callable[..., Awaitable[EvaluatorPool]]


@pytest.fixture
async def start_pool(tmp_path: Path, nursery: trio.Nursery) -> StartPool:
    async def start(size: int = 2, nix: str = NIX, **options: int) -> EvaluatorPool:
        pool = EvaluatorPool(EvaluatorSettings(Path(nix), tmp_path / "home"), size=size, **options)
        await nursery.start(pool.run)
        return pool

    return start


@pytest.fixture
async def pool(start_pool: StartPool) -> EvaluatorPool:
    return await start_pool()


async def find(
    pool: EvaluatorPool,
    flake: FlakeAddress,
    wildcards: str,
    *,
    attribute_limit: float = math.inf,
    import_store: str | None = None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Everything that is found, in the order in which it was."""
    request = Request(flake, parse_wildcards([wildcards]), attribute_limit, import_store)
    send, receive = trio.open_memory_channel[Finding](math.inf)
    await discover(pool, request, send, progress)
    with receive:
        return [finding async for finding in receive]


def drv_paths(findings: list[Finding]) -> dict[str, str]:
    return {finding.attr: finding.drv_path for finding in findings if isinstance(finding, Evaluated)}


def failures(findings: list[Finding]) -> dict[str, str]:
    return {finding.attr: finding.message for finding in findings if isinstance(finding, AttributeFailed)}


def unmatched(findings: list[Finding]) -> list[str]:
    return [finding.target for finding in findings if isinstance(finding, TargetUnmatched)]


# --- what is found --------------------------------------------------------------------------------

SHAPES = """{
  packages.x86_64-linux = {
    hello = d "hello";
    nested = { inner = d "inner"; deeper.lost = d "lost"; };
    number = 5;
    function = x: x;
  };
  checks.x86_64-linux.test = d "test";
  nixosConfigurations.host = { _type = "configuration"; config = d "config"; };
  plain = d "plain";
}"""


@pytest.mark.parametrize(
    ("wildcards", "found"),
    [
        ("packages.x86_64-linux.hello", {"packages.x86_64-linux.hello": "hello"}),
        ("plain", {"plain": "plain"}),
        (
            "packages.x86_64-linux.*",
            {"packages.x86_64-linux.hello": "hello", "packages.x86_64-linux.nested.inner": "inner"},
        ),
        ("packages.x86_64-linux.#", {"packages.x86_64-linux.hello": "hello"}),
        (
            "checks.*.*, packages.x86_64-linux.*, !packages.x86_64-linux.hello",
            {"checks.x86_64-linux.test": "test", "packages.x86_64-linux.nested.inner": "inner"},
        ),
        (
            "nixosConfigurations.host.config, plain",
            {"nixosConfigurations.host.config": "config", "plain": "plain"},
        ),
    ],
)
async def test_wildcards_on_a_real_flake(
    pool: EvaluatorPool, tmp_path: Path, wildcards: str, found: dict[str, str]
) -> None:
    findings = await find(pool, outputs_flake(tmp_path / "flake", SHAPES), wildcards)
    names = {attr: path.split("-", 1)[1].removesuffix(".drv") for attr, path in drv_paths(findings).items()}
    assert names == found
    assert len(findings) == len(found)
    assert all(map(os.path.exists, drv_paths(findings).values()))


async def test_targets_without_a_derivation_are_named(pool: EvaluatorPool, tmp_path: Path) -> None:
    flake = outputs_flake(tmp_path / "flake", SHAPES)
    findings = await find(
        pool, flake, "nope, packages.x86_64-linux.nope.x, packages.x86_64-linux.number, plain"
    )
    assert unmatched(findings) == ["nope", "packages.x86_64-linux.nope.x", "packages.x86_64-linux.number"]
    assert TargetUnmatched("nope").message == "nope: target matched no derivations"
    assert list(drv_paths(findings)) == ["plain"]


WEIRD = [
    "a.b",
    'say "hi"',
    "${x}",
    "dollar$",
    "back\\slash",
    "é-ü",
    "tab\there",
    "line\nbreak",
    "\x1b[A",
    "",
    "if",
]


async def test_attribute_names_of_any_kind(pool: EvaluatorPool, tmp_path: Path) -> None:
    outputs = """{ w = builtins.listToAttrs (map (name: { inherit name; value = d "weird"; })
      (builtins.fromJSON (builtins.readFile ./names.json))); }"""
    flake = outputs_flake(tmp_path / "flake", outputs, {"names.json": json.dumps(WEIRD)})
    findings = await find(pool, flake, "w.*")
    assert failures(findings) == {}
    assert len(drv_paths(findings)) == len(WEIRD)
    assert 'w."a.b"' in drv_paths(findings)
    # What is reported finds the attribute again.
    again = await find(pool, flake, 'w."a.b", w."say \\"hi\\""')
    assert list(drv_paths(again)) == ['w."a.b"', 'w."say \\"hi\\""']


async def test_the_same_drv_paths_as_nix_eval(pool: EvaluatorPool, tmp_path: Path) -> None:
    text = """{ outputs = { self }: { packages.x86_64-linux = builtins.listToAttrs (map (n: {
      name = "p${toString n}";
      value = derivation {
        name = "p"; system = "x86_64-linux"; builder = "/bin/sh"; outputs = [ "out" "dev" ];
        n = n; src = ./.; rev = self.rev; date = self.lastModified;
      };
    }) (builtins.genList (n: n) 40)); }; }"""
    flake = store_flake(tmp_path / "flake", text, more=f"&rev={'2' * 40}&lastModified=1577836800")
    findings = await find(pool, flake, "packages.x86_64-linux.*")
    apply = "builtins.mapAttrs (name: drv: drv.drvPath)"
    theirs = run_nix("eval", "--json", f"{flake.url}#packages.x86_64-linux", "--apply", apply)
    assert len(findings) == 40
    assert {attr.split(".")[-1]: path for attr, path in drv_paths(findings).items()} == json.loads(theirs)


async def test_a_flake_in_a_folder_of_its_source(pool: EvaluatorPool, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    outputs_flake(tmp_path / "tree" / "sub", '{ a = d "a"; rev = d self.rev; }')
    path = run_nix("store", "add-path", "--name", "source", str(tmp_path / "tree"))
    source = CachedSource(path, run_nix("hash", "path", path), rev="3" * 40, last_modified=5, dir="sub")
    wrapper = wrap_flake(source, None)
    around = store_flake(tmp_path / "wrapper", wrapper.flake_nix, {"flake.lock": wrapper.flake_lock})
    findings = await find(pool, attrs.evolve(around, input=INPUT_NAME), "a, rev")
    assert failures(findings) == {}
    assert drv_paths(findings)["rev"].endswith(f"{'3' * 40}.drv")


async def test_locked_inputs_are_open_and_nothing_else_is(pool: EvaluatorPool, tmp_path: Path) -> None:
    repository = tmp_path / "input"
    outputs_flake(repository, '{ value = "from-the-input"; }')
    rev = commit(repository)
    url = f"file://{repository}"
    original = {"type": "git", "url": url, "rev": rev}
    async with pool.lend(None, Role.FETCH) as child:
        tree = await fetch_tree(child, original)
    locked = original | {"narHash": str(tree.nar_hash), "lastModified": tree.last_modified}
    nodes = {"root": {"inputs": {"dep": "dep"}}, "dep": {"locked": locked, "original": original}}
    lock = {"nodes": nodes, "root": "root", "version": 7}
    text = f"""{{
      inputs.dep.url = "git+{url}?rev={rev}";
      outputs = {{ self, dep }}: let {PRELUDE} in {{
        a = d dep.value;
        b = d (builtins.readFile (builtins.fetchGit "file://{tmp_path}/other" + "/secret"));
        c = d (builtins.readFile "{tmp_path}/other/secret");
      }};
    }}"""
    other = tmp_path / "other"
    other.mkdir()
    (other / "secret").write_text("secret")
    commit(other)
    flake = store_flake(tmp_path / "flake", text, {"flake.lock": json.dumps(lock)})
    findings = await find(pool, attrs.evolve(flake, input_urls=(url,)), "a, b, c")
    assert [path.split("-", 1)[1] for path in drv_paths(findings).values()] == ["from-the-input.drv"]
    assert set(failures(findings)) == {"b", "c"}


# --- what fails alone -----------------------------------------------------------------------------

BAD = """{
  p = {
    good = d "good";
    thrown = throw "thrown on purpose";
    asserted = assert false; d "x";
    missing = { }.nowhere;
    recursive = let a = a; in a;
    aborted = abort "aborted on purpose";
    broken = import ./broken.nix;
    builderless = derivation { name = "x"; system = "x86_64-linux"; };
    false-derivation = { type = "derivation"; drvPath = "/etc/passwd"; };
    no-path = { type = "derivation"; };
    deep = let f = n: f (n + 1) + 1; in f 0;
    unreadable = builtins.readFile /etc/passwd;
    unbuilt = import (d "imported");
    zest = d "zest";
  };
  q = throw "no names here";
}"""
REASONS = {
    "thrown": "thrown on purpose",
    "asserted": "assertion",
    "missing": "attribute 'nowhere' missing",
    "recursive": "infinite recursion",
    "aborted": "aborted on purpose",
    "broken": "syntax error",
    "builderless": "attribute 'builder' missing",
    "false-derivation": "drvPath is no store path",
    "no-path": "attribute 'drvPath' missing",
    "deep": "stack overflow",
    "unreadable": "forbidden",
    "unbuilt": "allow-import-from-derivation",
}


async def test_every_failing_attribute_is_isolated_and_named(pool: EvaluatorPool, tmp_path: Path) -> None:
    flake = outputs_flake(tmp_path / "flake", BAD, {"broken.nix": "{ x = ; }\n"})
    progress = Progress()
    findings = await find(pool, flake, "p.*, q.*", progress=progress)
    assert sorted(drv_paths(findings)) == ["p.good", "p.zest"]
    failed = failures(findings)
    assert set(failed) == {"q", *(f"p.{name}" for name in REASONS)}
    assert {name for name, reason in REASONS.items() if reason not in failed[f"p.{name}"]} == set()
    assert "no names here" in headline(failed["q"])
    assert is_import_from_derivation(failed["p.unbuilt"])
    assert "«string»" not in "".join(failed.values())
    assert (progress.derivations, progress.failed) == (2, len(failed))
    assert progress.attributes_done == progress.attributes_total == len(REASONS) + 2


async def test_warnings_arrive_with_their_attribute(pool: EvaluatorPool, tmp_path: Path) -> None:
    outputs = '{ a = builtins.trace "mind the gap" (d "a"); b = d "b"; }'
    findings = await find(pool, outputs_flake(tmp_path / "flake", outputs), "a, b")
    remarks = {finding.attr: finding.remarks for finding in findings if isinstance(finding, Evaluated)}
    assert remarks == {"a": "trace: mind the gap", "b": ""}


async def test_an_endless_attribute_costs_itself(
    pool: EvaluatorPool, tmp_path: Path, nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    progress = Progress()

    async def pass_the_time() -> None:
        await until(lambda: progress.at == {"p.b"})
        mock_clock.jump(60)

    nursery.start_soon(pass_the_time)
    outputs = f'{{ p = {{ a = d "a"; b = {ENDLESS}; c = d "c"; }}; }}'
    flake = outputs_flake(tmp_path / "flake", outputs)
    findings = await find(pool, flake, "p.*", attribute_limit=60, progress=progress)
    assert sorted(drv_paths(findings)) == ["p.a", "p.c"]
    assert failures(findings) == {"p.b": "not evaluated within 60 seconds"}


async def test_a_greedy_attribute_costs_itself(start_pool: StartPool, tmp_path: Path) -> None:
    pool = await start_pool(1, memory_budget=300 * 2**20)
    outputs = f'{{ p = {{ a = d "a"; b = {GREEDY}; c = d "c"; }}; }}'
    findings = await find(pool, outputs_flake(tmp_path / "flake", outputs), "p.*")
    assert sorted(drv_paths(findings)) == ["p.a", "p.c"]
    assert re.search("uses .* MiB, over its budget of 300 MiB", failures(findings)["p.b"])


def children_of(pool: EvaluatorPool) -> list[Child]:
    return list(pool._lent)


async def kill_at(attr: str, progress: Progress, pool: EvaluatorPool, times: int) -> None:
    """SIGKILL the one child while it is at this attribute, so many times."""
    killed: set[int] = set()

    def victims() -> list[int]:
        return [c.pid for c in children_of(pool) if c.pid not in killed and progress.at == {attr}]

    while len(killed) < times:
        await until(victims)
        for pid in victims():
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)


async def test_a_killed_child_costs_one_attribute_after_a_second_try(
    start_pool: StartPool, tmp_path: Path, nursery: trio.Nursery
) -> None:
    pool = await start_pool(1)
    outputs = f'{{ p = {{ a = d "a"; b = {ENDLESS}; c = d "c"; }}; }}'
    flake = outputs_flake(tmp_path / "flake", outputs)
    progress = Progress()
    nursery.start_soon(kill_at, "p.b", progress, pool, 2)
    findings = await find(pool, flake, "p.*", progress=progress)
    assert sorted(drv_paths(findings)) == ["p.a", "p.c"]
    assert "killed by signal 9 (SIGKILL)" in failures(findings)["p.b"]


# --- what is streamed, what is killed -------------------------------------------------------------


async def test_a_slow_last_attribute_holds_nothing_back(pool: EvaluatorPool, tmp_path: Path) -> None:
    outputs = f'{{ p = {{ a = d "a"; b = d "b"; c = d "c"; z = {ENDLESS}; }}; }}'
    request = Request(outputs_flake(tmp_path / "flake", outputs), parse_wildcards(["p.*"]))
    send, receive = trio.open_memory_channel[Finding](0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(discover, pool, request, send)
        early = [await receive.receive() for _ in range(3)]
        assert sorted(drv_paths(early)) == ["p.a", "p.b", "p.c"]
        # The slow one is being evaluated; cancelled, its child ends at once.
        pids = {child.pid for child in children_of(pool)}
        assert pids
        nursery.cancel_scope.cancel()
    assert not any(map(is_alive, pids))
    assert list(drv_paths(await find(pool, request.flake, "p.a"))) == ["p.a"]


async def test_slow_attributes_are_evaluated_beside_each_other(start_pool: StartPool, tmp_path: Path) -> None:
    pool = await start_pool(3)
    outputs = f"{{ p = {{ a = {ENDLESS}; b = {ENDLESS}; c = {ENDLESS}; }}; }}"
    request = Request(outputs_flake(tmp_path / "flake", outputs), parse_wildcards(["p.*"]))
    send, receive = trio.open_memory_channel[Finding](0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(discover, pool, request, send)
        await until(lambda: [child.busy for child in children_of(pool)] == [True] * 3)
        nursery.cancel_scope.cancel()
    receive.close()


async def test_a_reader_that_leaves_ends_the_discovery(pool: EvaluatorPool, tmp_path: Path) -> None:
    request = Request(outputs_flake(tmp_path / "flake", SHAPES), parse_wildcards(["packages.*.*"]))
    send, receive = trio.open_memory_channel[Finding](0)
    receive.close()
    with pytest.RaisesGroup(trio.BrokenResourceError, allow_unwrapped=True, flatten_subgroups=True):
        await discover(pool, request, send)
    assert children_of(pool) == []


# --- import from derivation -----------------------------------------------------------------------

IMPORTS = """{ p = {
  plain = d "plain";
  imported = import (derivation {
    name = "generated"; system = "x86_64-linux"; builder = "/bin/sh";
    args = [ "-c" "echo 'derivation { name = \\"made\\"; system = \\"x\\"; builder = \\"x\\"; }' > $out" ];
  });
}; }"""


async def test_attributes_that_import_are_evaluated_by_the_other_child(
    start_pool: StartPool, tmp_path: Path
) -> None:
    pool = await start_pool(1)
    flake = outputs_flake(tmp_path / "flake", IMPORTS)
    # A store that has the derivation built: what the proxy will be.
    generated = re.search(
        r"/nix/store/\S+-generated\.drv", failures(await find(pool, flake, "p.*"))["p.imported"]
    )
    assert generated is not None
    run_nix("build", "--no-link", generated[0] + ("" if "2.8" in run_nix("--version") else "^*"))
    findings = await find(pool, flake, "p.*", import_store="auto")
    assert failures(findings) == {}
    assert sorted(drv_paths(findings)) == ["p.imported", "p.plain"]
    assert drv_paths(findings)["p.imported"].endswith("-made.drv")


# --- what cannot be discovered at all -------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
async def test_a_flake_that_does_not_evaluate(start_pool: StartPool, tmp_path: Path, size: int) -> None:
    pool = await start_pool(size)
    flake = store_flake(tmp_path / "flake", "{ outputs = { self }: { a = ; }; }")
    with pytest.raises(FlakeUnusable, match="syntax error"):
        await find(pool, flake, "a")


async def test_a_flake_that_kills_its_evaluator(start_pool: StartPool, tmp_path: Path) -> None:
    pool = await start_pool(1, memory_budget=300 * 2**20)
    flake = outputs_flake(tmp_path / "flake", f"builtins.seq {GREEDY} {{ }}")
    with pytest.raises(FlakeUnusable, match="over its budget"):
        await find(pool, flake, "a")


async def test_without_a_nix_nothing_is_discovered(start_pool: StartPool) -> None:
    pool = await start_pool(1, "/nowhere/nix")
    with pytest.raises(EvaluatorUnusable, match="cannot start /nowhere/nix"):
        await find(pool, FlakeAddress("path:/nowhere"), "a")
    assert issubclass(EvaluatorUnusable, EvaluatorError)
