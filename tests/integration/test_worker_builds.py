"""Build jobs on a real Nix: logs, outputs, products, limits, failures, aborts, prefetch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import MockClock

from gradient.model import BuildKind, BuildSpec, BuildStage, FailureKind, OutputPath
from gradient.nar.pack import pack_small
from gradient.nar.tree import regular_file
from gradient.nix.derivation import Derivation, Output, write_derivation
from gradient.nix.hashes import Hash
from gradient.nix.store_path import StorePath, make_output_path, make_source_path, make_text_path
from gradient.nursery.stop_window import STOP_WINDOW
from gradient.wire import messages as wire
from gradient.worker.build_job import run_build_job
from gradient.worker.downloads import Downloader
from gradient.worker.errors import JobFault, failure_of
from tests.integration.worker_support import (
    Bench,
    bench,
    derivation,
    instantiate,
    nix,
    spec_of,
)
from tests.patience import PATIENCE, until

pytestmark = pytest.mark.nix


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Bench]:
    with trio.fail_after(PATIENCE):
        async with bench(tmp_path) as made:
            yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that builders, which run as other users, may write to."""
    with tempfile.TemporaryDirectory(prefix="gradient-worker-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


async def failure(at: Bench, expression: str, **limits: int) -> JobFault:
    with pytest.RaisesGroup(JobFault, flatten_subgroups=True, allow_unwrapped=True) as caught:
        await run_build_job(at.job(), spec_of(instantiate(expression), **limits), at.machine, 1)
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, JobFault)
    return error


async def test_a_build_reports_its_log_outputs_and_products_then_uploads(at: Bench) -> None:
    script = (
        "echo first; echo second; mkdir -p $out/nix-support; echo data > $out/file; "
        "echo report text $out/file > $out/nix-support/hydra-build-products; echo $out > $dev"
    )
    drv_path = instantiate(derivation(script, attributes='outputs = [ "out" "dev" ];'))
    spec = spec_of(drv_path)
    await run_build_job(at.job(), spec, at.machine, 3)
    reports = at.server.reports
    assert reports[0] == wire.Building("job:1", 1, 7)
    assert at.server.log.splitlines()[:2] == ["first", "second"]
    (output,) = at.server.sent(wire.BuildOutput)
    assert not output.substituted
    assert output.metrics is not None
    assert output.metrics.concurrent_builds == 3
    described = {built.name: built for built in output.outputs}
    out, dev = (path.path for path in spec.outputs if path.name in described)
    by_name = {path.name: path.path for path in spec.outputs}
    assert {out, dev} == set(by_name.values())
    (product,) = described["out"].products
    assert (product.file_type, product.name, product.size) == ("report", "file", 5)
    for built in output.outputs:
        assert nix("nix-store", "-q", "--hash", built.path) == built.nar_hash
        assert int(nix("nix-store", "-q", "--size", built.path)) == built.nar_size
        header, packed = at.cache.uploaded[built.path]
        assert (packed.nar_hash, packed.nar_size) == (built.nar_hash, built.nar_size)
        assert header.deriver == StorePath.parse(drv_path).base_name
    # dev names out, and out its own product file.
    assert at.cache.uploaded[by_name["dev"]][0].references == (StorePath.parse(by_name["out"]).base_name,)
    stages = [stage.stage for stage in at.server.sent(wire.Stage)]
    assert stages == [BuildStage.BUILD, BuildStage.UPLOAD]
    # The first upload of a session asks; it has no grant yet.
    assert [type(query) for query in at.server.queries] == [wire.CacheQuery]


async def test_outputs_that_are_there_are_uploaded_all_the_same(at: Bench) -> None:
    drv_path = instantiate(derivation("echo 1 > $out"))
    await run_build_job(at.job(), spec_of(drv_path), at.machine, 1)
    at.cache.uploaded.clear()
    at.server.reports.clear()
    await run_build_job(at.job(), spec_of(drv_path), at.machine, 1)
    (output,) = at.server.sent(wire.BuildOutput)
    assert (output.substituted, output.metrics) == (True, None)
    assert set(at.cache.uploaded) == {spec_of(drv_path).outputs[0].path}
    assert at.server.log == ""


async def test_a_failed_build_is_permanent_and_has_its_log(at: Bench) -> None:
    error = await failure(at, derivation("echo about to fail; exit 3"))
    assert error.kind is FailureKind.PERMANENT
    assert "exit code 3" in str(error)
    assert "about to fail" in at.server.log
    assert at.server.sent(wire.BuildOutput) == []


@pytest.fixture
def prompt_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the log is sent at once: under a clock that stands still it would never be."""
    monkeypatch.setattr("gradient.worker.build_log.CHUNK_AGE", 0)


@pytest.mark.usefixtures("prompt_log")
async def test_a_build_without_a_word_is_stopped_after_its_silence(
    at: Bench, nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    async def pass_the_time() -> None:
        await until(lambda: at.server.log)
        mock_clock.jump(10)
        mock_clock.rate = 1

    nursery.start_soon(pass_the_time)
    error = await failure(at, derivation("echo begun; sleep 600"), silent=10)
    assert (error.kind, "printed nothing for 10 s" in str(error)) == (FailureKind.TIMEOUT, True)
    assert at.server.log == "begun\n"


@pytest.mark.usefixtures("prompt_log")
async def test_a_build_that_goes_on_is_stopped_after_its_limit(
    at: Bench, nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    """It prints something between any two moments at which its silence is long enough."""

    async def pass_the_time() -> None:
        for _ in range(3):
            lines = len(at.server.log)
            await until(lambda lines=lines: len(at.server.log) > lines)
            mock_clock.jump(4)
        mock_clock.rate = 1

    nursery.start_soon(pass_the_time)
    script = "while true; do echo line; sleep 0.2; done"
    error = await failure(at, derivation(script), timeout=12, silent=6)
    assert (error.kind, "longer than 12 s" in str(error)) == (FailureKind.TIMEOUT, True)


async def test_what_this_worker_cannot_do_is_refused_after_building(at: Bench) -> None:
    spec = spec_of(instantiate(derivation("echo > $out")))
    for kind in (BuildKind.SUBSTITUTE, BuildKind.DOWNLOAD):
        at.server.reports.clear()
        with pytest.raises(JobFault, match="this worker cannot"):
            await run_build_job(at.job(), attrs.evolve(spec, kind=kind), at.machine, 1)
        assert [type(report) for report in at.server.reports] == [wire.Building]


async def test_an_abort_ends_the_builder_and_its_children(
    at: Bench, folder: Path, mock_clock: MockClock
) -> None:
    mock_clock.rate = 0.1  # no machine is too slow for the stop window
    script = f"sleep 600 & echo $! > {folder}/child; echo $$ > {folder}/builder; echo ready; wait"
    drv_path = instantiate(derivation(script))
    ready = trio.Event()
    at.server.on_report = lambda report: ready.set() if isinstance(report, wire.LogChunk) else None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_build_job, at.job(), spec_of(drv_path), at.machine, 1)
        await ready.wait()
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    # That is how long a stopping worker waits for its jobs.
    assert trio.current_time() - began < STOP_WINDOW
    pids = [int((folder / name).read_text()) for name in ("child", "builder")]
    await until(lambda: not any(map(is_alive, pids)))


async def test_a_refused_upload_is_an_outage_and_a_failing_one_is_tried_again(
    at: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradient.worker.uploads.FIRST_PAUSE", 0.01)
    at.cache.statuses = [503, 401]
    drv_path = instantiate(derivation("echo 1 > $out"))
    await run_build_job(at.job(), spec_of(drv_path), at.machine, 1)
    assert len(at.cache.uploaded) == 1
    at.cache.uploaded.clear()
    at.cache.statuses = [413]
    with pytest.raises(JobFault, match=r"HTTP 413: .*as scripted") as caught:
        await run_build_job(at.job(), spec_of(drv_path), at.machine, 1)
    assert caught.value.kind is FailureKind.TRANSIENT


async def test_a_second_build_of_a_session_uploads_without_a_question(at: Bench) -> None:
    job = at.job()
    await run_build_job(job, spec_of(instantiate(derivation("echo 1 > $out"))), at.machine, 1)
    at.server.queries.clear()
    await run_build_job(job, spec_of(instantiate(derivation("echo 2 > $out"))), at.machine, 1)
    assert at.server.queries == []
    assert len(at.cache.uploaded) == 2


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def content_of(path: str) -> bytes | None:
    """The content of a file in the store, None when there is none."""
    return Path(path).read_bytes() if Path(path).exists() else None


# --- prefetch -------------------------------------------------------------------------------------


def put(at: Bench, path: StorePath, content: bytes, *references: StorePath, ca: str | None = None) -> str:
    """Put a file into the cache, and not into the store; its full path."""
    data, packed = pack_small(regular_file(content))
    url = f"http://cache.test/{path.hash_part}"
    at.cache.files[url] = data
    at.cache.held[path.path()] = wire.CachedPathInfo(
        path.path(),
        True,
        url=url,
        nar_hash=packed.nar_hash,
        nar_size=packed.nar_size,
        references=tuple(reference.base_name for reference in references),
        ca=ca,
    )
    return path.path()


def put_text(at: Bench, name: str, content: bytes, *references: StorePath) -> StorePath:
    path = make_text_path(name, Hash.of(content), references)
    put(at, path, content, *references, ca=f"text:{Hash.of(content).nix32()}")
    return path


async def test_a_closure_is_imported_with_its_references(at: Bench) -> None:
    salt = os.urandom(8).hex().encode()
    below = put_text(at, "below", b"below " + salt)
    middle = put_text(at, "middle", b"middle " + below.path().encode(), below)
    top = put_text(at, "top", b"top " + middle.path().encode() + below.path().encode(), below, middle)
    await Downloader(at.job(), at.machine).make_valid([top.path()])
    references = nix("nix-store", "-q", "--references", top.path()).split()
    assert sorted(references) == sorted([below.path(), middle.path()])
    assert content_of(middle.path()) == b"middle " + below.path().encode()


async def test_a_damaged_nar_is_reported_and_never_imported(at: Bench) -> None:
    content = os.urandom(8).hex().encode()
    path = put_text(at, "damaged", content)
    url = at.cache.held[path.path()].url
    assert url is not None
    at.cache.files[url], _ = pack_small(regular_file(content[::-1]))
    await expect_unavailable(at, path)
    at.cache.files[url] = b"no zstd at all"
    await expect_unavailable(at, path)
    at.cache.files[url] = 410
    await expect_unavailable(at, path)
    assert content_of(path.path()) is None


async def expect_unavailable(at: Bench, path: StorePath) -> None:
    with pytest.raises(JobFault) as caught:
        await Downloader(at.job(), at.machine).make_valid([path.path()])
    failed = failure_of(caught.value)
    assert (failed.kind, failed.missing_paths) == (FailureKind.INPUTS_UNAVAILABLE, (path.path(),))


async def test_all_that_is_lost_is_named_at_once(at: Bench) -> None:
    """Also what refers to another lost one; and what is there is imported, unless it refers to one."""
    salt = os.urandom(8).hex().encode()
    lost = [put_text(at, "lost-0", salt)]
    for number in range(1, 12):
        lost.append(put_text(at, f"lost-{number}", lost[-1].path().encode(), lost[-1]))
    above = put_text(at, "above", lost[-1].path().encode(), lost[-1])
    whole = put_text(at, "whole", b"whole " + salt)
    for path in lost:
        at.cache.files[f"http://cache.test/{path.hash_part}"] = 404
    with pytest.raises(JobFault, match=r"lost-.* and 9 more: HTTP 404$") as caught:
        await Downloader(at.job(), at.machine).make_valid([whole.path(), above.path()])
    assert caught.value.missing_paths == tuple(sorted(path.path() for path in lost))
    assert (content_of(above.path()), content_of(whole.path())) == (None, b"whole " + salt)


async def test_an_input_that_the_cache_does_not_have_is_named(at: Bench) -> None:
    path = make_source_path(Hash.of(os.urandom(8)))
    with pytest.raises(JobFault) as caught:
        await Downloader(at.job(), at.machine).make_valid([path.path()])
    assert caught.value.missing_paths == (path.path(),)
    assert await Downloader(at.job(), at.machine).pull([path.path()]) == {path.path()}


async def test_a_build_fetches_what_it_needs_first(at: Bench) -> None:
    """The `.drv` and the source it reads are in the cache only."""
    source = put_text(at, "input", os.urandom(8).hex().encode() + b"\n")
    drv = unbuilt(f"read -r line < {source.path()}; echo $line > $out", source)
    text = write_derivation(drv)
    path = make_text_path("fetched.drv", Hash.of(text), [source])
    put(at, path, text, source, ca=f"text:{Hash.of(text).nix32()}")
    output = drv.outputs[0].path
    spec = BuildSpec(7, path.path(), BuildKind.BUILD, (OutputPath("out", output),), False, 60, 60, drv.system)
    await run_build_job(at.job(), spec, at.machine, 1)
    assert at.server.sent(wire.Stage)[0].stage is BuildStage.PREFETCH
    assert output in at.cache.uploaded
    assert content_of(output) == content_of(source.path())


def unbuilt(script: str, source: StorePath) -> Derivation:
    """A derivation that no store has seen, with its output path."""
    drv = Derivation(
        name="fetched",
        outputs=(Output("out", ""),),
        input_drvs={},
        input_srcs=(source.path(),),
        system="x86_64-linux",
        builder="/bin/sh",
        args=("-c", script),
        env={"out": "", "name": "fetched"},
    )
    out = make_output_path("fetched", "out", Hash.of(write_derivation(drv))).path()
    return attrs.evolve(drv, outputs=(Output("out", out),), env={**drv.env, "out": out})
