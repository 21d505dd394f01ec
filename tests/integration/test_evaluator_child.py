"""One child and the pool that lends it, with a real Nix: errors, limits, deaths, isolation."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from urllib.parse import quote

import pytest
import trio

from gradient.nix.attr_path import candidate_paths
from gradient.nix.evaluator.child import MAX_STATEMENT, Answer, Refused
from gradient.nix.evaluator.errors import ChildDied, EvaluationFailed, EvaluatorUnusable
from gradient.nix.evaluator.expressions import quote as quote_nix
from gradient.nix.evaluator.findings import FlakeAddress
from gradient.nix.evaluator.flake import (
    FlakeUnusable,
    NoSuchAttribute,
    fetch_tree,
    first_existing,
    open_flake,
)
from gradient.nix.evaluator.messages import headline
from gradient.nix.evaluator.pool import EvaluatorPool
from gradient.nix.evaluator.settings import EvaluatorSettings, Role
from gradient.nix.evaluator.transcript import MAX_DIAGNOSTICS
from tests.integration.evaluator_support import (
    ENDLESS,
    GREEDY,
    NIX,
    commit,
    is_alive,
    outputs_flake,
    run_nix,
    store_flake,
)
from tests.patience import until

pytestmark = pytest.mark.nix


@pytest.fixture
async def pool(tmp_path: Path, nursery: trio.Nursery) -> EvaluatorPool:
    pool = EvaluatorPool(EvaluatorSettings(Path(NIX), tmp_path / "home"), size=2)
    await nursery.start(pool.run)
    return pool


# --- values and errors ----------------------------------------------------------------------------


async def test_values_of_every_kind(pool: EvaluatorPool) -> None:
    async with pool.lend(None) as child:
        text = '${x} $y " \\ \n \t é \x07'
        answer = await child.ask(f"{{ a = [ 1 null true 1.5 ]; b = {quote_nix(text)}; }}")
        assert answer.value == {"a": [1, None, True, 1.5], "b": text}
        assert answer.remarks == ""


async def test_a_long_string_of_escape_codes_comes_back(pool: EvaluatorPool) -> None:
    text = "\x1b[31m" * 200
    async with pool.lend(None) as child:
        assert (await child.ask(quote_nix(text))).value == text


async def test_remarks_are_what_nix_said_beside_the_value(pool: EvaluatorPool) -> None:
    async with pool.lend(None) as child:
        answer = await child.ask('builtins.trace "careful" 7')
    assert (answer.value, answer.remarks) == (7, "trace: careful")


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ('throw "boo"', "boo"),
        ("assert false; 1", "assertion"),
        ('abort "stop"', "stop"),
        ("let a = a; in a", "infinite recursion"),
        ("{ }.missing", "attribute 'missing' missing"),
        ("1 + {", "syntax error"),
        ("undefined", "undefined variable"),
        ("x: x", "function"),
        ("builtins.readFile /etc/passwd", "forbidden"),
        ('builtins.getEnv "HOME" + throw ("<" + builtins.getEnv "HOME" + ">")', "<>"),
    ],
)
async def test_an_error_is_named_and_the_child_lives_on(
    pool: EvaluatorPool, expression: str, reason: str
) -> None:
    async with pool.lend(None) as child:
        with pytest.raises(EvaluationFailed) as refused:
            await child.ask(expression)
        assert reason in headline(str(refused.value))
        assert (await child.ask("1 + 1")).value == 2


async def test_a_request_with_several_answers_ends_at_its_error(pool: EvaluatorPool) -> None:
    async with pool.lend(None) as child:
        await child.begin('builtins.deepSeq [ (s 1) (s 2) (throw "three") (s 4) ] 5')
        assert [await child.hear(), await child.hear()] == [Answer(1, ""), Answer(2, "")]
        refused = await child.hear()
        assert isinstance(refused, Refused)
        assert headline(refused.message) == "error: three"
        assert (await child.ask("6")).value == 6


async def test_the_longest_request_fills_no_pipe_for_ever(pool: EvaluatorPool) -> None:
    padding = "x" * (MAX_STATEMENT - 100)
    async with pool.lend(None) as child:
        assert (await child.ask(f'builtins.trace "{padding}" 1')).value == 1


async def test_a_request_that_is_too_long_is_refused_before_it_is_sent(pool: EvaluatorPool) -> None:
    async with pool.lend(None) as child:
        with pytest.raises(EvaluationFailed, match="32 KiB"):
            await child.ask(" " * MAX_STATEMENT)
        assert (await child.ask("1")).value == 1


async def test_huge_output_beside_a_value_is_bounded(pool: EvaluatorPool) -> None:
    async with pool.lend(None) as child:
        noise = '(builtins.concatStringsSep "x" (builtins.genList (x: "noise") 2000000))'
        answer = await child.ask(f"builtins.trace {noise} 1")
    assert answer.value == 1
    assert 1000 < len(answer.remarks) < 2 * MAX_DIAGNOSTICS


async def test_a_large_value_comes_whole_and_a_huge_one_costs_the_child(pool: EvaluatorPool) -> None:
    async with pool.lend(None) as child:
        value = (await child.ask('builtins.genList (x: "attribute-${toString x}") 100000')).value
        assert isinstance(value, list)
        assert (len(value), value[-1]) == (100000, "attribute-99999")
        with pytest.raises(ChildDied, match="over 16 MiB"):
            await child.ask('builtins.genList (x: "attribute-${toString x}") 1000000')
    assert not is_alive(child.pid)


# --- the end of a child ---------------------------------------------------------------------------


async def test_a_killed_child_says_how_it_ended(pool: EvaluatorPool) -> None:
    async with pool.lend(None) as child:
        await child.begin(ENDLESS)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match="killed by signal 9"):
            await child.hear()
    async with pool.lend(None) as other:
        assert other.pid != child.pid
        assert (await other.ask("1")).value == 1


async def test_a_child_that_leaves_by_itself(pool: EvaluatorPool) -> None:
    async with pool.lend(None) as child:
        await child.define(":q\n")
        with pytest.raises(ChildDied, match="exit status 0"):
            await child.ask("1")


async def test_a_deep_recursion_is_an_error_or_a_death_with_the_reason(pool: EvaluatorPool) -> None:
    async with pool.lend(None) as child:
        with pytest.raises((EvaluationFailed, ChildDied), match="stack overflow"):
            await child.ask("let f = n: f (n + 1) + 1; in f 0")


async def test_cancellation_kills_the_child_with_its_group(pool: EvaluatorPool) -> None:
    with trio.CancelScope() as scope:
        async with pool.lend(None) as child:
            await child.begin(ENDLESS)
            scope.cancel()
            await child.hear()
    assert scope.cancelled_caught
    assert not is_alive(child.pid)


async def test_a_child_over_its_memory_budget_is_ended(tmp_path: Path, nursery: trio.Nursery) -> None:
    pool = EvaluatorPool(EvaluatorSettings(Path(NIX), tmp_path), size=1, memory_budget=300 * 2**20)
    await nursery.start(pool.run)
    async with pool.lend(None) as child:
        with pytest.raises(ChildDied, match="over its budget of 300 MiB"):
            await child.ask(GREEDY)
    assert not is_alive(child.pid)
    assert pool.peak_rss > 300 * 2**20


# --- lending --------------------------------------------------------------------------------------


async def test_a_child_is_kept_warm_for_its_flake_and_no_other(pool: EvaluatorPool, tmp_path: Path) -> None:
    one, two = (outputs_flake(tmp_path / name, f'{{ x = "{name}"; }}') for name in ("one", "two"))
    pids = []
    for url in (one, one, two, one):
        async with pool.lend(url) as child:
            await open_flake(child)
            pids.append(child.pid)
    assert pids[0] == pids[1] == pids[3] != pids[2]


async def test_an_idle_child_that_died_is_not_lent(pool: EvaluatorPool) -> None:
    async with pool.lend(None) as child:
        await child.ask("1")
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: not child.reusable)
    async with pool.lend(None) as other:
        assert other.pid != child.pid


async def test_a_child_given_back_over_half_its_budget_is_replaced(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    pool = EvaluatorPool(EvaluatorSettings(Path(NIX), tmp_path), size=1, memory_budget=2**20)
    await nursery.start(pool.run)
    async with pool.lend(None) as child:
        pass
    async with pool.lend(None) as other:
        assert other.pid != child.pid


async def test_no_more_children_than_the_size(pool: EvaluatorPool, tmp_path: Path) -> None:
    seen: set[int] = set()
    inside = 0

    async def use(number: int) -> None:
        nonlocal inside
        async with pool.lend(outputs_flake(tmp_path / str(number), f"{{ x = {number}; }}")) as child:
            inside += 1
            assert inside <= pool.size
            await open_flake(child)
            seen.add(child.pid)
            assert sum(map(is_alive, seen)) <= pool.size
            inside -= 1

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(use, number)
    assert len(seen) == 5


async def test_nothing_is_left_when_the_pool_stops(tmp_path: Path) -> None:
    pool = EvaluatorPool(EvaluatorSettings(Path(NIX), tmp_path), size=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        async with pool.lend(None) as child:
            await child.ask("1")
        assert is_alive(child.pid)
        nursery.cancel_scope.cancel()
    assert not is_alive(child.pid)


@pytest.mark.parametrize(
    ("program", "reason"),
    [("/nowhere/nix", "cannot start /nowhere/nix"), ("/bin/false", "does not evaluate.*exit status 1")],
)
async def test_a_program_that_is_no_nix(
    tmp_path: Path, nursery: trio.Nursery, program: str, reason: str
) -> None:
    pool = EvaluatorPool(EvaluatorSettings(Path(program), tmp_path), size=1)
    await nursery.start(pool.run)
    with pytest.raises(EvaluatorUnusable, match=f"(?s){reason}"):
        async with pool.lend(None):
            pass


async def test_a_child_sees_nothing_of_our_environment(tmp_path: Path, nursery: trio.Nursery) -> None:
    environment = {"PATH": os.environ["PATH"], "SECRET_TOKEN": "hunter2"}
    settings = EvaluatorSettings(Path(NIX), tmp_path / "home", environment=environment)
    pool = EvaluatorPool(settings, size=1)
    await nursery.start(pool.run)
    async with pool.lend(None) as child:
        seen = await trio.Path(f"/proc/{child.pid}/environ").read_bytes()
    assert b"hunter2" not in seen
    assert f"HOME={tmp_path}/home".encode() in seen


# --- flakes ---------------------------------------------------------------------------------------


async def test_opening_a_flake_tells_what_was_fetched(pool: EvaluatorPool, tmp_path: Path) -> None:
    rev = "1" * 40
    more = f"&rev={rev}&lastModified=1577836800&revCount=3"
    async with pool.lend(outputs_flake(tmp_path / "flake", "{ }", more=more)) as child:
        tree = await open_flake(child)
    assert tree.path.startswith("/nix/store/")
    assert (tree.rev, tree.last_modified, tree.rev_count) == (rev, 1577836800, 3)
    assert tree.nar_hash == run_nix("hash", "path", tree.path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{ outputs = { self }: { x = ; }; }", "syntax error"),
        ("{ outputs = { self }: { x = 1; };", r"unexpected end of file[\s\S]*flake\.nix:1:"),
        ("", "unexpected end of file"),
        ('{ outputs = { self }: throw "no outputs today"; }', "no outputs today"),
        ("{ outputs = { self }: 5; }", "expected a set|is an integer"),
        ('{ inputs.x.url = "git+file:///nowhere"; outputs = x: { }; }', "lock|nowhere"),
    ],
)
async def test_a_broken_flake_is_one_clear_error(
    pool: EvaluatorPool, tmp_path: Path, text: str, reason: str
) -> None:
    async with pool.lend(store_flake(tmp_path / "flake", text)) as child:
        with pytest.raises(FlakeUnusable) as refused:
            await open_flake(child)
    assert re.search(reason, str(refused.value))
    assert headline(str(refused.value)).startswith("error: ")


async def test_a_file_that_ends_in_the_middle_is_no_request_that_goes_on(
    pool: EvaluatorPool, tmp_path: Path
) -> None:
    """Nix 2.8 would wait for the rest of it, from us."""
    text = "{ outputs = { self }: { good = 1; bad = import ./bad.nix; }; }"
    flake = store_flake(tmp_path / "flake", text, {"bad.nix": "{ a = "})
    async with pool.lend(flake) as child:
        await open_flake(child)
        for _ in range(2):
            await child.begin("builtins.deepSeq [ (s 1) flake.outputs.bad (s 3) ] 5")
            assert await child.hear() == Answer(1, "")
            ended = await child.hear()
            assert isinstance(ended, Refused)
            assert "unexpected end of file" in headline(ended.message)
            assert "-source/bad.nix:1:" in ended.message
            assert (await child.ask("flake.outputs.good")).value == 1


async def test_a_flake_that_is_not_there(pool: EvaluatorPool, tmp_path: Path) -> None:
    empty = run_nix("store", "add-path", "--name", "source", str(_folder(tmp_path / "empty")))
    for url, reason in (
        (f"path:{empty}?narHash={quote(run_nix('hash', 'path', empty), safe='')}", "flake.nix"),
        (f"git+file://{tmp_path}/none?rev={'0' * 40}", "none"),
        ("nixpkgs", "nixpkgs"),
        ("https://" + "x" * 7000, "longer than 6 KiB"),
    ):
        async with pool.lend(FlakeAddress(url)) as child:
            with pytest.raises(FlakeUnusable, match=reason):
                await open_flake(child)


async def test_the_first_attribute_that_exists(pool: EvaluatorPool, tmp_path: Path) -> None:
    url = outputs_flake(
        tmp_path / "flake",
        '{ packages.x86_64-linux.a = throw "later"; legacyPackages.x86_64-linux.b = 2; c = 3; }',
    )
    async with pool.lend(url) as child:
        await open_flake(child)
        for name, prefix in (
            ("a", ("packages", "x86_64-linux")),
            ("b", ("legacyPackages", "x86_64-linux")),
            ("c", ()),
        ):
            candidates = candidate_paths((name,), ["x86_64-linux"])
            assert await first_existing(child, candidates) == (*prefix, name)
        with pytest.raises(NoSuchAttribute, match=r"neither packages\.x86_64-linux\.zz nor legacy.* nor zz"):
            await first_existing(child, candidate_paths(("zz",), ["x86_64-linux"]))


async def test_fetching_locked_inputs(pool: EvaluatorPool, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "repository")
    (folder / "file").write_text("content")
    rev = commit(folder)
    async with pool.lend(None, Role.FETCH) as child:
        tree = await fetch_tree(child, {"type": "git", "url": f"file://{folder}", "rev": rev})
        assert await trio.Path(tree.path, "file").read_text() == "content"
        assert tree.rev == rev
        again = await fetch_tree(
            child, {"type": "path", "path": tree.path, "narHash": str(tree.nar_hash), "lastModified": 5}
        )
        assert (again.path, again.last_modified) == (tree.path, 5)
        with pytest.raises(EvaluationFailed, match="nowhere"):
            await fetch_tree(child, {"type": "git", "url": "file:///nowhere", "rev": "0" * 40})


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
