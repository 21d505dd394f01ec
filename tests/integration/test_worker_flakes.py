"""Flake jobs on a real Nix: sources, walks, batches, failing attributes, locked inputs, imports."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gradient.model import CachedSource, FailureKind, FlakeJob, FlakeStep, JobKind, MessageLevel, Repository
from gradient.nar.pack import pack_small
from gradient.nar.tree import Directory, regular_file
from gradient.nix.evaluator.findings import Progress
from gradient.nix.hashes import Hash
from gradient.nix.store_path import StorePath, make_source_path
from gradient.wire import messages as wire
from gradient.worker import flake_job
from gradient.worker.downloads import Downloader
from gradient.worker.errors import JobFault, failure_of
from gradient.worker.fetch import fetch_source
from gradient.worker.flake_job import run_flake_job
from tests.integration.worker_support import Bench, bench, derivation, nix
from tests.patience import PATIENCE, until

pytestmark = pytest.mark.nix

ALL = (FlakeStep.FETCH_FLAKE, FlakeStep.EVALUATE_FLAKE, FlakeStep.EVALUATE_DERIVATIONS)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Bench]:
    with trio.fail_after(PATIENCE):
        async with bench(tmp_path) as made:
            yield made


def repository(folder: Path, files: dict[str, str]) -> str:
    """A git repository with one commit of `files`, a script and a symlink; its URL."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("run.sh")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    return f"git+file://{folder}"


def rev_of(url: str) -> str:
    argv = ["git", "-C", url.removeprefix("git+file://"), "rev-parse", "HEAD"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def in_store(text: str, **files: str) -> CachedSource:
    """A flake that is in the store already."""
    folder = Path(os.environ["PYTEST_FLAKE_FOLDER"], os.urandom(6).hex())
    folder.mkdir()
    for name, content in {"flake.nix": text, **{n.replace("_", "."): c for n, c in files.items()}}.items():
        (folder / name).write_text(content)
    return CachedSource(nix("nix", "store", "add-path", "--name", "source", str(folder)))


@pytest.fixture(autouse=True)
def flake_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flakes").mkdir()
    monkeypatch.setenv("PYTEST_FLAKE_FOLDER", str(tmp_path / "flakes"))


def outputs(text: str) -> CachedSource:
    """A flake in the store whose packages of `s` are `text`."""
    return in_store(f"{{ outputs = {{ self }}: {{ packages.s = {text}; }}; }}")


async def run(at: Bench, **spec: Any) -> None:
    job = at.job(JobKind.EVAL)
    await run_flake_job(job, FlakeJob(**{"steps": ALL, "wildcards": ("packages.s.*",), **spec}), at.machine)


def records(at: Bench) -> list[Any]:
    return [record for result in at.server.sent(wire.EvalResult) for record in result.derivations]


def entry_points(at: Bench) -> dict[str, str]:
    results = at.server.sent(wire.EvalResult)
    return {entry.attr: entry.drv_path for result in results for entry in result.entry_points}


# --- sources --------------------------------------------------------------------------------------


async def test_a_repository_becomes_the_path_that_nix_gives_it(at: Bench, tmp_path: Path) -> None:
    url = repository(tmp_path / "repo", {"flake.nix": "{ outputs = _: { }; }", "b/c": "1", "b-d": "2"})
    rev = rev_of(url)
    spec = FlakeJob(ALL, repository=Repository(url))
    source = await fetch_source(spec, at.machine, Downloader(at.job(), at.machine))
    fetched = f'(builtins.fetchTree {{ type = "git"; url = "{url[4:]}"; rev = "{rev}"; }}).outPath'
    expected = nix("nix", "eval", "--raw", "--impure", "--expr", fetched)
    assert source.store_path == expected
    assert source.nar_hash == nix("nix", "hash", "path", expected)
    assert (source.rev, source.rev_count) == (rev, 1)


async def test_evaluation_sees_what_nix_sees_also_below_the_top(at: Bench, tmp_path: Path) -> None:
    text = """{ outputs = { self }: { packages.s.x = derivation {
      name = "x"; system = "s"; builder = "b"; rev = self.rev; when = self.lastModified;
      src = ./.; count = self.revCount; }; }; }"""
    url = repository(tmp_path / "repo", {"flake.nix": text, "below/flake.nix": text})
    rev = rev_of(url)
    for query in ("", "&dir=below"):
        await run(at, repository=Repository(f"{url}?ref=HEAD{query}", rev))
        expected = nix("nix", "eval", "--raw", f"{url}?rev={rev}{query}#packages.s.x.drvPath")
        assert entry_points(at) == {"packages.s.x": expected}
        at.server.reports.clear()


async def test_a_fetch_only_job_uploads_the_source_and_evaluates_nothing(at: Bench, tmp_path: Path) -> None:
    url = repository(tmp_path / "repo", {"flake.nix": "{ outputs = _: { }; }"})
    await run(at, steps=(FlakeStep.FETCH_FLAKE,), repository=Repository(url))
    fetching, fetched = at.server.reports
    assert isinstance(fetching, wire.Fetching)
    assert isinstance(fetched, wire.FetchResult)
    assert fetched.flake_source is not None
    assert list(at.cache.uploaded) == [fetched.flake_source.store_path]


async def test_other_sources_are_fetched_by_nix(at: Bench, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "flake.nix").write_text("{ outputs = _: { }; }")
    spec = FlakeJob(ALL, repository=Repository(f"path:{tmp_path}/tree"))
    source = await fetch_source(spec, at.machine, Downloader(at.job(), at.machine))
    assert source.store_path == nix("nix", "store", "add-path", "--name", "source", str(tmp_path / "tree"))
    assert source.nar_hash == nix("nix", "hash", "path", source.store_path)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("git+file:///nowhere/at/all", "nowhere"),
        ("path:/nowhere/at/all", "nowhere"),
        ("/some/folder", "a worker cannot see"),
        ("github:only-owner", "OWNER/REPOSITORY"),
    ],
)
async def test_a_source_that_is_none_fails_for_good_in_words(at: Bench, url: str, words: str) -> None:
    with pytest.raises(Exception) as caught:
        await run(at, repository=Repository(url))
    failure = failure_of(caught.value)
    assert (failure.kind, failure.is_bug) == (FailureKind.PERMANENT, False)
    assert words in failure.text


# --- the walk -------------------------------------------------------------------------------------


async def test_the_diamond_is_published_parents_first_and_files_before_results(at: Bench) -> None:
    source = CachedSource(nix("nix", "store", "add-path", "--name", "source", str(EXAMPLES / "diamond")))
    late: list[str] = []

    def check(report: object) -> None:
        if isinstance(report, wire.EvalResult):
            late.extend(r.drv_path for r in report.derivations if r.drv_path not in at.cache.uploaded)

    at.server.on_report = check
    await run(at, cached=source, wildcards=("packages.x86_64-linux.*",))
    assert late == []
    found = {r.drv_path: r for r in records(at)}
    assert len(found) == len(records(at)) == 4
    order = list(found)
    roots = set(entry_points(at).values())
    for path, record in found.items():
        assert set(record.dependencies) <= set(found)
        parents = [p for p in found if path in found[p].dependencies]
        assert path in roots or any(order.index(parent) < order.index(path) for parent in parents)
    expected = {
        f"packages.x86_64-linux.{name}": nix(
            "nix", "eval", "--raw", f"{EXAMPLES}/diamond#packages.x86_64-linux.{name}.drvPath"
        )
        for name in ("a", "b", "c", "d", "default")
    }
    assert entry_points(at) == expected
    statuses = [type(r) for r in at.server.reports if not isinstance(r, wire.EvalResult)]
    assert statuses == [
        wire.Fetching, wire.FetchResult, wire.EvaluatingFlake, wire.EvaluatingDerivations, wire.EvalStats,
    ]  # fmt: skip
    (stats,) = at.server.sent(wire.EvalStats)
    assert (stats.attributes, stats.derivations, stats.failed_attributes) == (5, 4, 0)


async def test_each_path_goes_up_once_with_its_references(at: Bench) -> None:
    source = in_store(
        "{ outputs = { self }: { packages.s = let d = n: derivation"
        ' { name = n; system = "s"; builder = "b"; src = ./data_txt; }; in { a = d "a"; b = d "b"; }; }; }',
        data_txt="data",
    )
    await run(at, cached=source)
    sent = [path for request in at.cache.requests for path in request]
    # The source itself goes up beside the evaluation, and is an input of nothing here.
    assert len(sent) == len(set(sent))
    for record in records(at):
        header, packed = at.cache.uploaded[record.drv_path]
        names = (*record.dependencies, *record.input_sources)
        assert header.references == tuple(sorted(StorePath.parse(path).base_name for path in names))
        assert nix("nix-store", "-q", "--hash", record.drv_path) == packed.nar_hash
        assert header.nar_size == packed.nar_size
        assert header.ca is not None
        assert header.ca.startswith("text:sha256:")
        assert set(record.input_sources) <= set(at.cache.uploaded)


async def test_what_the_graph_knows_is_not_walked_but_named(at: Bench) -> None:
    source = outputs(f"rec {{ a = {derivation('')}; b = {derivation('$a', attributes='inherit a;')}; }}")
    await run(at, cached=source)
    both = {record.drv_path for record in records(at)}
    a, b = entry_points(at)["packages.s.a"], entry_points(at)["packages.s.b"]
    at.server.reports.clear()
    at.server.known = {a}
    await run(at, cached=source)
    assert [record.drv_path for record in records(at)] == [b]
    assert entry_points(at) == {"packages.s.a": a, "packages.s.b": b}
    at.server.reports.clear()
    await run(at, cached=source, full_walk=True)
    assert {record.drv_path for record in records(at)} == both == {a, b}


ENDLESS = "(let l = builtins.genList (x: x) 1000000; f = builtins.foldl'; in f (a: x: f (b: y: b) a l) 0 l)"


async def test_a_slow_attribute_does_not_hold_back_what_was_found_before(at: Bench) -> None:
    source = outputs(f"{{ early = {derivation('')}; late = {ENDLESS}; }}")
    published = trio.Event()

    def watch(report: object) -> None:
        if isinstance(report, wire.EvalResult) and report.entry_points:
            published.set()

    at.server.on_report = watch
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(run, at, cached=source))
        await published.wait()
        nursery.cancel_scope.cancel()
    assert list(entry_points(at)) == ["packages.s.early"]


# --- failures -------------------------------------------------------------------------------------


async def test_a_failing_attribute_is_told_before_the_last_result_and_alone(at: Bench) -> None:
    await run(at, cached=outputs(f'{{ good = {derivation("")}; bad = throw "too bad"; }}'))
    (message,) = at.server.sent(wire.EvalMessage)
    assert (message.level, message.source) == (MessageLevel.ERROR, "nix-eval:packages.s.bad")
    assert "too bad" in message.message
    assert list(entry_points(at)) == ["packages.s.good"]
    reports = at.server.reports
    last = max(i for i, report in enumerate(reports) if isinstance(report, wire.EvalResult))
    assert reports.index(message) < last
    assert at.server.sent(wire.EvalStats)[0].failed_attributes == 1


async def test_what_only_pretends_to_be_a_derivation_fails_alone(at: Bench) -> None:
    fake = '{ type = "derivation"; drvPath = "/nix/store/00000000000000000000000000000000-fake.drv"; }'
    await run(at, cached=outputs(f"{{ good = {derivation('')}; one = {fake}; two = {fake}; }}"))
    messages = {message.source: message.message for message in at.server.sent(wire.EvalMessage)}
    assert set(messages) == {"nix-eval:packages.s.one", "nix-eval:packages.s.two"}
    assert all(message.endswith("-fake.drv is not in the local store") for message in messages.values())
    assert list(entry_points(at)) == ["packages.s.good"]
    (stats,) = at.server.sent(wire.EvalStats)
    assert (stats.attributes, stats.failed_attributes) == (1, 2)


async def test_an_attribute_path_that_is_too_long_fails_alone(at: Bench) -> None:
    """The server's index has no room for it."""
    long = "x" * 3000
    await run(at, cached=outputs(f"{{ good = {derivation('')}; {long} = {derivation('')}; }}"))
    (message,) = at.server.sent(wire.EvalMessage)
    assert message.message == "its attribute path is longer than 2000 bytes"
    assert len(message.source) == 2000
    assert list(entry_points(at)) == ["packages.s.good"]


async def test_a_target_that_leads_to_nothing_is_an_error(at: Bench) -> None:
    await run(at, cached=outputs(f"{{ a = {derivation('')}; }}"), wildcards=("packages.s.a", "packages.s.b"))
    errors = [error for result in at.server.sent(wire.EvalResult) for error in result.errors]
    assert errors == ["packages.s.b: target matched no derivations: packages.s has no b, only a"]


async def test_default_targets_may_be_missing_unless_all_are(at: Bench) -> None:
    system = at.machine.host.systems[0]
    text = "{{ outputs = {{ self }}: {{ packages.{}.a = {}; }}; }}"
    await run(at, cached=in_store(text.format(system, derivation(""))), wildcards=())
    assert [r.errors for r in at.server.sent(wire.EvalResult) if r.errors] == []
    assert list(entry_points(at)) == [f"packages.{system}.a"]
    at.server.reports.clear()
    await run(at, cached=in_store("{ outputs = { self }: { }; }"), wildcards=())
    (errors,) = [r.errors for r in at.server.sent(wire.EvalResult) if r.errors]
    assert "no packages and no checks" in errors[0]


async def test_a_flake_that_does_not_evaluate_fails_for_good(at: Bench) -> None:
    with pytest.RaisesGroup(Exception, flatten_subgroups=True) as caught:
        await run(at, cached=in_store("{ outputs = { self }: { x = ; }; }"))
    failure = failure_of(caught.value)
    assert (failure.kind, failure.is_bug) == (FailureKind.PERMANENT, False)
    assert "syntax error" in failure.text


async def test_an_evaluation_over_its_limit_times_out(
    at: Bench, nursery: trio.Nursery, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress()
    monkeypatch.setattr(flake_job, "Progress", lambda: progress)

    async def pass_the_time() -> None:
        await until(lambda: progress.at == {"packages.s.b"})
        mock_clock.jump(60)
        mock_clock.rate = 1

    nursery.start_soon(pass_the_time)
    source = outputs(f"{{ a = {derivation('')}; b = {ENDLESS}; c = {derivation('')}; }}")
    with pytest.raises(JobFault) as caught:
        await run(at, cached=source, timeout_secs=60)
    assert caught.value.kind is FailureKind.TIMEOUT
    assert str(caught.value) == "the evaluation took longer than 60 s; it was at packages.s.b"


# --- locked inputs --------------------------------------------------------------------------------


def locked(**inputs: dict[str, Any]) -> str:
    """A lock file with these inputs, locked to these attributes."""
    nodes: dict[str, Any] = {
        name: {"locked": at, "original": {"type": "path", "path": at["path"]}, "flake": False}
        for name, at in inputs.items()
    }
    nodes["root"] = {"inputs": {name: name for name in inputs}}
    return json.dumps({"nodes": nodes, "root": "root", "version": 7})


async def test_a_locked_input_comes_from_the_cache(at: Bench) -> None:
    content = os.urandom(8).hex()
    data, packed = pack_small(Directory([(b"value", regular_file(content.encode()))]))
    nar_hash = Hash.parse(packed.nar_hash)
    path = make_source_path(nar_hash).path()
    at.cache.files["http://cache.test/input"] = data
    at.cache.held[path] = wire.CachedPathInfo(
        path,
        True,
        url="http://cache.test/input",
        nar_hash=packed.nar_hash,
        nar_size=packed.nar_size,
        ca=f"fixed:r:{packed.nar_hash}",
    )
    source = in_store(
        "{ inputs.data = { url = path:/nowhere; flake = false; }; outputs = { self, data }: { packages.s.x ="
        ' derivation { name = builtins.readFile "${data}/value"; system = "s"; builder = "b"; }; }; }',
        flake_lock=locked(
            data={"type": "path", "path": "/nowhere", "narHash": nar_hash.sri(), "lastModified": 1}
        ),
    )
    await run(at, cached=source)
    assert entry_points(at)["packages.s.x"].endswith(f"-{content}.drv")
    assert at.server.sent(wire.EvalMessage) == []


async def test_an_input_that_cannot_be_had_is_a_warning(at: Bench) -> None:
    missing = {
        "type": "path",
        "path": "/nowhere",
        "narHash": Hash.of(os.urandom(8)).sri(),
        "lastModified": 1,
    }
    source = in_store(
        "{ inputs.data = { url = path:/nowhere; flake = false; }; outputs = { self, data }: { packages.s = {"
        f" good = {derivation('')}; bad = {derivation('', attributes='inherit data;')}; }}; }}; }}",
        flake_lock=locked(data=missing),
    )
    await run(at, cached=source)
    messages = {message.source: message for message in at.server.sent(wire.EvalMessage)}
    assert messages["fetch"].level is MessageLevel.WARNING
    assert "nowhere" in messages["fetch"].message
    assert "packages.s.good" in entry_points(at)
    assert "nix-eval:packages.s.bad" in messages


# --- import from derivation -----------------------------------------------------------------------


async def test_an_import_is_published_built_elsewhere_and_evaluation_goes_on(at: Bench) -> None:
    imported = derivation("echo '\"from-a-build\"' > $out", name="imported")
    named = derivation("", name="${import imported}")
    source = outputs(f"let imported = {imported}; in {{ early = {derivation('')}; late = {named}; }}")
    seen: list[Any] = []

    async def build(request: wire.ImportRequest) -> wire.ImportResult:
        seen.extend([*records(at), *entry_points(at)])
        for path in request.drv_paths:
            await trio.to_thread.run_sync(nix, "nix-store", "-r", path)
        return wire.ImportResult(request.job_id, request.request_id)

    at.server.on_import = build
    await run(at, cached=source)
    (ifd,) = [r for r in seen if getattr(r, "ifd", False)]
    # All that was found before is published, so that it may build meanwhile.
    assert "packages.s.early" in seen
    assert f"other.{ifd.architecture}.imported" in seen
    assert ifd.drv_path in at.cache.uploaded
    assert entry_points(at)["packages.s.late"].endswith("-from-a-build.drv")
    assert at.server.sent(wire.EvalMessage) == []


async def test_an_import_that_cannot_be_built_fails_its_attribute(at: Bench) -> None:
    imported = derivation("exit 1", name="imported")
    late = derivation("", name="${import imported}")
    source = outputs(f"let imported = {imported}; in {{ late = {late}; ok = {derivation('')}; }}")

    async def fail(request: wire.ImportRequest) -> wire.ImportResult:
        await trio.lowlevel.checkpoint()
        (path,) = request.drv_paths
        return wire.ImportResult(request.job_id, request.request_id, path, "its build failed")

    at.server.on_import = fail
    await run(at, cached=source)
    (message,) = at.server.sent(wire.EvalMessage)
    assert message.source == "nix-eval:packages.s.late"
    assert "its build failed" in message.message
    assert "packages.s.ok" in entry_points(at)
