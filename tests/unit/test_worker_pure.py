"""The worker's decisions: scores, bundles, import order, failures, budgets, attributes, measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradient.http.errors import ConnectFailed
from gradient.model import FailureKind
from gradient.nar.bundle import BundleItem, EntryHeader
from gradient.nar.tree import regular_file
from gradient.nix.daemon.errors import DaemonError, DaemonGone
from gradient.nix.evaluator.errors import EvaluatorUnusable
from gradient.nix.evaluator.flake import FlakeUnusable
from gradient.nix.flake_lock import reference_of
from gradient.nix.flake_url import parse_flake_ref
from gradient.wire.messages import CachedPathInfo, Candidate, RequiredPath
from gradient.worker.build_log import TokenBucket
from gradient.worker.capabilities import _settings, _words
from gradient.worker.downloads import import_order, import_refused
from gradient.worker.errors import MAX_TEXT, JobFault, build_failure_kind, failure_of
from gradient.worker.fetch import tree_attributes
from gradient.worker.git_process import GitError
from gradient.worker.metrics import Metrics
from gradient.worker.offers import paths_of, score
from gradient.worker.products import read_products
from gradient.worker.uploads import BUNDLE_ENTRIES, SMALL_NAR, plan_bundles


def path(name: str) -> str:
    return f"/nix/store/{name:0>32}-{name}"


# --- offers ---------------------------------------------------------------------------------------


def test_a_score_counts_what_is_missing() -> None:
    candidate = Candidate(
        "build:1",
        (RequiredPath(path("a"), 10), RequiredPath(path("b"), 20), RequiredPath(path("c"))),
        (path("o"),),
    )
    assert paths_of([candidate, candidate]) == [path("a"), path("b"), path("c"), path("o")]
    found = score(candidate, frozenset({path("a")}))
    assert (found.missing_count, found.missing_nar_size, found.outputs_present) == (2, 20, False)
    assert score(candidate, frozenset({path("o")})).outputs_present


def test_outputs_that_are_unknown_are_not_present() -> None:
    assert not score(Candidate("eval:1"), frozenset()).outputs_present
    floating = Candidate("build:1", output_paths=("",))
    assert paths_of([floating]) == []
    assert not score(floating, frozenset()).outputs_present


# --- uploads --------------------------------------------------------------------------------------


def item(name: str, size: int | None) -> BundleItem:
    return BundleItem(EntryHeader(path(name), nar_size=size), regular_file(b""))


def test_small_nars_share_a_bundle_and_large_ones_do_not() -> None:
    items = [item("1", 1000), item("2", SMALL_NAR + 1), item("3", None), item("4", 1000)]
    names = [[i.header.store_path for i in bundle] for bundle in plan_bundles(items)]
    assert names == [[path("2")], [path("3")], [path("1"), path("4")]]
    assert plan_bundles([]) == []


def test_a_bundle_is_bounded_in_entries_and_bytes() -> None:
    many = plan_bundles([item(str(n), 1) for n in range(BUNDLE_ENTRIES + 1)])
    assert [len(bundle) for bundle in many] == [BUNDLE_ENTRIES, 1]
    heavy = plan_bundles([item(str(n), SMALL_NAR) for n in range(5)])
    assert [len(bundle) for bundle in heavy] == [4, 1]


# --- downloads ------------------------------------------------------------------------------------


def info(name: str, *references: str) -> CachedPathInfo:
    return CachedPathInfo(path(name), True, references=tuple(map(path, references)))


def test_references_are_imported_first() -> None:
    closure = {i.path: i for i in (info("a", "b", "c", "a"), info("b", "c"), info("c", "elsewhere"))}
    assert import_order(closure) == [path("c"), path("b"), path("a")]


def test_references_in_a_circle_are_refused() -> None:
    closure = {i.path: i for i in (info("a", "b"), info("b", "a"))}
    with pytest.raises(JobFault, match="circle"):
        import_order(closure)


def test_an_import_that_the_store_refuses_is_the_machines_trouble() -> None:
    """Another worker may be trusted; and whoever reads it learns what to do."""
    refused = import_refused(
        path("a"), DaemonError("cannot add path '...' because it lacks a valid signature")
    )
    assert refused.kind is FailureKind.TRANSIENT
    assert "lacks a valid signature; let the daemon trust this worker's user (trusted-users" in str(refused)
    assert "trusted-users" not in str(import_refused(path("a"), DaemonError("the database is busy")))


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (JobFault(FailureKind.TIMEOUT, "x"), FailureKind.TIMEOUT),
        (DaemonGone("closed"), FailureKind.TRANSIENT),
        (DaemonError("path '/nix/store/x' is not valid"), FailureKind.TRANSIENT),
        (DaemonError("hash mismatch"), FailureKind.PERMANENT),
        (ConnectFailed("refused"), FailureKind.TRANSIENT),
        (GitError("Could not resolve host: example.org"), FailureKind.TRANSIENT),
        (GitError("repository 'x' not found"), FailureKind.PERMANENT),
        (FlakeUnusable("no flake.nix"), FailureKind.PERMANENT),
        (EvaluatorUnusable("no such program"), FailureKind.TRANSIENT),
        (OSError(28, "No space left on device"), FailureKind.TRANSIENT),
    ],
)
def test_what_an_error_means(error: Exception, kind: FailureKind) -> None:
    failure = failure_of(ExceptionGroup("g", [error]))
    assert failure.kind is kind
    assert not failure.is_bug
    assert str(error) in failure.text


def test_a_fault_decides_over_what_followed_from_it() -> None:
    fault = JobFault(FailureKind.INPUTS_UNAVAILABLE, "gone", (path("a"),))
    failure = failure_of(ExceptionGroup("g", [DaemonGone("closed"), ExceptionGroup("h", [fault])]))
    assert (failure.kind, failure.missing_paths) == (FailureKind.INPUTS_UNAVAILABLE, (path("a"),))


def test_an_unknown_error_is_a_bug_and_permanent() -> None:
    failure = failure_of(KeyError("x"))
    assert failure.is_bug
    assert failure.kind is FailureKind.PERMANENT


def test_texts_are_bounded_and_plain() -> None:
    text = failure_of(DaemonError("\x1b[31mred\x1b[0m " + "x" * 2 * MAX_TEXT)).text
    assert text.startswith("red x")
    assert len(text) == MAX_TEXT + 1


@pytest.mark.parametrize("text", ["cannot allocate memory", "write: No space left on device", "broken pipe"])
def test_a_build_that_blames_the_machine_is_transient(text: str) -> None:
    assert build_failure_kind(text) is FailureKind.TRANSIENT
    assert build_failure_kind("builder failed with exit code 1") is FailureKind.PERMANENT


def test_what_a_builder_printed_blames_nobody() -> None:
    text = "builder for 'x.drv' failed with exit code 1;\n  last 1 log lines:\n  > No space left on device"
    assert build_failure_kind(text) is FailureKind.PERMANENT


# --- log budget -----------------------------------------------------------------------------------


def test_a_bucket_fills_up_in_its_period() -> None:
    bucket = TokenBucket(100, 10.0)
    assert bucket.take(100, 0.0)
    assert not bucket.take(11, 1.0)
    assert bucket.take(20, 2.0)
    assert not bucket.take(1, 2.0)
    assert not bucket.take(101, 1000.0)
    assert bucket.take(100, 1000.0)


# --- fetchTree ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "github:owner/repo",
        "github:owner/repo/0123456789012345678901234567890123456789?host=example.org",
        "gitlab:group%2Fsub/repo/branch",
        "git+https://example.org/repo?ref=main&submodules=1",
        "git+https://example.org/repo?key=value",
        "https://example.org/x.tar.gz?narHash=sha256-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA%3D",
        "path:/some/where",
    ],
)
def test_attributes_describe_the_same_reference(url: str) -> None:
    reference = parse_flake_ref(url)
    assert reference_of(tree_attributes(reference)) == reference


# --- products -------------------------------------------------------------------------------------


def test_products_stay_within_the_outputs(tmp_path: Path) -> None:
    output, other = tmp_path / "out", tmp_path / "other"
    (output / "nix-support").mkdir(parents=True)
    other.mkdir()
    (output / "report.html").write_text("12345")
    (output / "a b.txt").write_text("1")
    (output / "doc").mkdir()
    (output / "escape").symlink_to("/etc/passwd")
    (output / "nix-support" / "hydra-build-products").write_text(
        f"report html {output}/report.html index\n"
        f'file text "{output}/a b.txt"\n'
        f"doc manual {output}/doc\n"
        f"file evil {output}/../other\n"
        f"file evil {output}/escape\n"
        "file evil /etc/passwd\n"
        f"file missing {output}/nothing\n"
        "two words\n"
    )
    found = read_products(str(output), [str(output)])
    assert [(p.file_type, p.subtype, p.name, p.size) for p in found] == [
        ("report", "html", "report.html", 5),
        ("file", "text", "a b.txt", 1),
        ("doc", "manual", "doc", None),
    ]
    assert read_products(str(other), [str(other)]) == ()


# --- machine --------------------------------------------------------------------------------------


def test_metrics_are_measured_between_calls(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    (tmp_path / "stat").write_text("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1\n")
    metrics = Metrics(tmp_path)
    assert metrics.take().cpu_usage_pct is None
    (tmp_path / "stat").write_text("cpu  130 0 120 850 0 0 0 0 0 0\n")
    taken = metrics.take()
    assert (taken.cpu_usage_pct, taken.ram_free_mb) == (50.0, 2)
    (tmp_path / "stat").unlink()
    assert metrics.take().cpu_usage_pct is None


def test_settings_of_every_nix_are_read() -> None:
    config = _settings(b'{"system": {"value": "x86_64-linux"}, "odd": 3}')
    assert config == {"system": "x86_64-linux"}
    assert _settings(b"no json") == {}
    assert _words("a b") == _words(["a", "b", 3]) == ["a", "b"]
    assert _words(None) == []
