"""What a hostile worker may send: its own message is refused in words, and the writer goes on."""

from __future__ import annotations

from typing import Any

import attrs
import psycopg
import pytest
import trio

from gradient.graph.assignments import ClaimBuild, ClaimEvaluation
from gradient.graph.build_failures import BuildFailed
from gradient.graph.build_outputs import StoreBuildOutput
from gradient.graph.evaluation_reports import EvalStreamCompleted, EvaluationPhase, StoreEvalStats
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.messages import MAX_MESSAGES, AddMessage
from gradient.graph.nar import CommitNars
from gradient.graph.pg import Connection, fetch_all, fetch_value
from gradient.graph.pg_errors import is_content_error
from gradient.graph.record import Record
from gradient.graph.transaction import Rejected, Transaction
from gradient.graph.walk_completeness import unwalk_derivations
from gradient.graph.writer import GraphWriter
from gradient.model import (
    BuildMetrics,
    BuildProduct,
    BuiltOutput,
    EntryPoint,
    EvaluationStatus,
    FailureKind,
    MessageLevel,
    OutputPath,
    Repository,
    Span,
)
from tests.graph.world import LIMITS, START, WORKER, World, derivation, drv, hash_part, nar, out

BIG = 2**64 - 1


@attrs.define(eq=False)
class Bench:
    writer: GraphWriter
    connection: Connection
    evaluation: int

    async def refused(self, message: Any) -> Exception:
        """The error of a message; afterwards a good one is applied."""
        with pytest.raises(Exception) as refusal:  # of any kind: it is looked at below
            await self.writer.submit(message)
        assert is_content_error(refusal.value)
        await self.writer.submit(Record(self.evaluation, (derivation("after"),)))
        return refusal.value

    async def value(self, query: str) -> Any:
        return await fetch_value(self.connection, query)

    async def rows(self, query: str) -> list[tuple[Any, ...]]:
        return await fetch_all(self.connection, query)

    async def forget(self, name: str) -> None:
        """Take a derivation out again."""
        await self.connection.execute("DELETE FROM derivation WHERE name = %s", (name,))


@pytest.fixture
async def bench(database_url: str, connection: Connection, nursery: trio.Nursery) -> Bench:
    await connection.execute("INSERT INTO project (name, created_at) VALUES ('main', now())")
    await connection.execute("INSERT INTO cache (name, created_at) VALUES ('main', now())")
    writer = GraphWriter(database_url, lambda moves: None, lambda: START)
    await nursery.start(writer.run)
    evaluation = await writer.submit(CreateEvaluation("main", Repository("git+https://example.org/x")))
    assignment = await writer.submit(ClaimEvaluation(evaluation, WORKER, "w"))
    assert assignment is not None
    await writer.submit(EvaluationPhase(assignment, EvaluationStatus.EVALUATING_DERIVATION))
    return Bench(writer, connection, evaluation)


BAD_DERIVATIONS = {
    "no store path": attrs.evolve(derivation("a"), drv_path="/etc/passwd"),
    "no derivation": attrs.evolve(derivation("a"), drv_path=out("a")),
    "an input that is none": attrs.evolve(derivation("a"), dependencies=(out("b"),)),
    "an input that is no path": attrs.evolve(derivation("a"), dependencies=("x" * 10**6,)),
    "an output that is no path": attrs.evolve(derivation("a"), outputs=(OutputPath("out", "/nix/store/x"),)),
    "an output without a path": attrs.evolve(derivation("a"), outputs=(OutputPath("out", ""),)),
    "an output with a long name": attrs.evolve(derivation("a"), outputs=(OutputPath("o" * 300, out("a")),)),
    "no outputs": attrs.evolve(derivation("a"), outputs=()),
    "a source that is no path": attrs.evolve(derivation("a"), input_sources=("../..",)),
    "NUL in a system": attrs.evolve(derivation("a"), architecture="x86\0linux"),
    "NUL in a feature": attrs.evolve(derivation("a"), required_features=("k\0m",)),
    "half of a surrogate pair": attrs.evolve(derivation("a"), pname="\ud800"),
    "a long system": attrs.evolve(derivation("a"), architecture="x" * 10**5),
    "a long package name": attrs.evolve(derivation("a"), pname="x" * 10**5),
    "too many features": attrs.evolve(derivation("a"), required_features=tuple(map(str, range(100)))),
    "a limit beyond 32 bits": attrs.evolve(derivation("a"), timeout_secs=BIG),
    "a limit below 1": attrs.evolve(derivation("a"), max_silent_secs=-5),
    "a long name": attrs.evolve(derivation("a"), drv_path=drv("a" * 300)),
    "two outputs of one name": attrs.evolve(
        derivation("a"), outputs=(OutputPath("out", out("a")), OutputPath("out", out("b")))
    ),
    "two outputs of one path": attrs.evolve(
        derivation("a"), outputs=(OutputPath("out", out("a")), OutputPath("dev", out("a")))
    ),
    "an edge to itself": derivation("a", ["a"]),
    "NUL in an input": attrs.evolve(derivation("a"), dependencies=(drv("b\0"),)),
    "NUL in a package name": attrs.evolve(derivation("a"), pname="a\0"),
    "NUL in its path": derivation("a\0"),
    "NUL in the name of an output": attrs.evolve(derivation("a"), outputs=(OutputPath("o\0", out("a")),)),
    "NUL in the path of an output": attrs.evolve(derivation("a"), outputs=(OutputPath("out", out("a\0")),)),
    "NUL in a source": attrs.evolve(derivation("a"), input_sources=(out("a\0"),)),
}


@pytest.mark.parametrize("name", BAD_DERIVATIONS)
async def test_a_bad_derivation_fails_its_batch_alone(bench: Bench, name: str) -> None:
    bad = BAD_DERIVATIONS[name]
    error = await bench.refused(Record(bench.evaluation, (derivation("good"), bad)))
    assert repr(bad.drv_path.rpartition("/")[2])[1:-1][:70] in str(error)
    assert len(str(error)) < 1000
    assert await bench.value("SELECT count(*) FROM derivation") == 1  # `after`; nothing of the batch


CIRCLES: dict[str, tuple[list[dict[str, list[str]]], list[str]]] = {
    "in one batch": ([{"good": [], "a": ["b"], "b": ["c"], "c": ["a"]}], ["a", "b", "c"]),
    "over two batches": ([{"a": ["b"]}, {"b": ["a"], "good": []}], ["b"]),
    "over three batches": ([{"a": ["b"]}, {"b": ["c"]}, {"c": ["a"]}], ["c"]),
    "below what is in order": ([{"top": ["a", "x"], "x": []}, {"a": ["b", "x"], "b": ["a"]}], ["a", "b"]),
    "beside what is still a stub": ([{"a": ["b", "stub"]}, {"b": ["a", "stub"]}], ["b"]),
}


@pytest.mark.parametrize("name", CIRCLES)
async def test_a_batch_that_closes_a_circle_fails_alone(bench: Bench, name: str) -> None:
    """Nothing of it stays, what it says is in words, and the batches before it are as they were."""
    (*before, last), members = CIRCLES[name]
    for batch in before:
        await bench.writer.submit(record(bench.evaluation, batch))
    picture = await bench.rows(GRAPH)
    error = await bench.refused(record(bench.evaluation, last))
    assert any(str(error).startswith(f"{drv(member)}: it needs itself, through ") for member in members)
    await bench.forget("after")
    assert await bench.rows(GRAPH) == picture


@pytest.mark.parametrize("more", ["here", "there", "both"])
async def test_derivations_that_share_only_some_outputs_are_refused(bench: Bench, more: str) -> None:
    """In one batch and over two; those that share all of them are one path made in two ways."""
    shared = OutputPath("out", out("shared"))
    first = (shared, *([OutputPath("dev", out("a"))] if more in {"there", "both"} else []))
    second = (shared, *([OutputPath("dev", out("b"))] if more in {"here", "both"} else []))
    a, b = derivation("a", outputs=first), derivation("b", outputs=second)
    twin = derivation("twin", outputs=first)
    for batch in ((a, b, derivation("good")), (derivation("good"), b, a)):
        error = await bench.refused(Record(bench.evaluation, batch))
        assert {drv("a"), drv("b")} <= {*str(error).replace(":", " ").replace(",", " ").split()}
        assert await bench.value("SELECT count(*) FROM derivation") == 1  # `after`
    await bench.writer.submit(Record(bench.evaluation, (a,)))
    await bench.writer.submit(Record(bench.evaluation, (twin,)))
    error = await bench.refused(Record(bench.evaluation, (b,)))
    assert str(error).startswith(f"{drv('b')}: ")
    assert await bench.value("SELECT count(*) FROM derivation") == 3


async def test_a_walked_derivation_gains_no_input(bench: Bench) -> None:
    """Nor would that close a circle that nobody sees: both are walked to their leaves."""
    await bench.writer.submit(record(bench.evaluation, {"a": ["b"], "b": []}))
    await bench.writer.submit(record(bench.evaluation, {"b": ["a", "c"]}))
    assert await bench.value("SELECT count(*) FROM derivation_dependency") == 1


def record(evaluation: int, graph: dict[str, list[str]]) -> Record:
    return Record(evaluation, tuple(derivation(name, inputs) for name, inputs in graph.items()))


# Everything that a batch writes, without what numbers its rows.
GRAPH = """
    SELECT d.name, d.walked, d.unwalked_inputs, b.status, b.blocking_deps, b.wanted,
           ARRAY(SELECT i.name FROM derivation_dependency e JOIN derivation i ON i.id = e.dependency
                 WHERE e.derivation = d.id ORDER BY 1),
           ARRAY(SELECT o.hash FROM derivation_output o WHERE o.derivation = d.id ORDER BY 1),
           EXISTS (SELECT FROM build_job j WHERE j.derivation = d.id)
    FROM derivation d LEFT JOIN derivation_build b ON b.derivation = d.id ORDER BY d.name
"""


# With what must be said of each.
BAD_ENTRIES = {
    "no path": (EntryPoint("pkgs.x", "nowhere"), "attribute 'pkgs.x': 'nowhere' is no store path"),
    "no derivation": (EntryPoint("pkgs.x", out("a")), f"attribute 'pkgs.x': {out('a')} is not the path of"),
    "never sent": (EntryPoint("pkgs.x", drv("nobody")), f"pkgs.x names {drv('nobody')}, which was never"),
    "a long attribute": (EntryPoint("a" * 10**5, drv("good")), f"{drv('good')!r}: its attribute path 'aaaa"),
    "NUL in the attribute": (
        EntryPoint("a\0b", drv("good")),
        f"{drv('good')!r}: its attribute path 'a\\x00b'",
    ),
    "NUL in its path": (EntryPoint("pkgs.x", drv("a\0")), "-a\\x00.drv' is no store path"),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
async def test_a_bad_entry_point_fails_its_batch_alone(bench: Bench, name: str) -> None:
    bad, words = BAD_ENTRIES[name]
    error = await bench.refused(Record(bench.evaluation, (derivation("good"),), (bad,)))
    assert words in str(error)
    assert len(str(error)) < 1000
    assert await bench.value("SELECT count(*) FROM entry_point") == 0
    assert await bench.value("SELECT count(*) FROM derivation") == 1  # `after`


async def test_the_longest_attribute_fits_its_index(bench: Bench) -> None:
    attr = "".join(chr(0x4E00 + i) for i in range(666))  # 1998 bytes that do not compress
    await bench.writer.submit(Record(bench.evaluation, (derivation("a"),), (EntryPoint(attr, drv("a")),)))
    assert await bench.value("SELECT eval FROM entry_point") == attr


async def test_the_longest_names_fit_the_index_of_metrics(bench: Bench) -> None:
    text = "".join(chr(0x20000 + i * 7) for i in range(256))  # 1024 bytes
    bad = attrs.evolve(derivation("a"), pname=text, architecture=text[::-1])
    await bench.writer.submit(CommitNars(1, (nar(drv("a")),)))
    await bench.writer.submit(Record(bench.evaluation, (bad,), (EntryPoint("a", drv("a")),)))
    assignment = await started(bench)
    await bench.writer.submit(StoreBuildOutput(assignment, (), False, BuildMetrics(1)))
    assert await bench.value("SELECT history_name FROM derivation_metric") == text


async def started(bench: Bench) -> int:
    """The assignment of the build of `a`."""
    query = f"SELECT id FROM derivation WHERE hash = '{hash_part('a.drv')}'"
    assignment = await bench.writer.submit(ClaimBuild(await bench.value(query), False, WORKER, "w"))
    assert assignment is not None
    return assignment


BAD_REPORTS = {
    "a size beyond 64 bits": lambda a: StoreBuildOutput(a, (BuiltOutput("out", out("a"), BIG),), False),
    "NUL in an output": lambda a: StoreBuildOutput(a, (BuiltOutput("o\0", out("a"), 1),), False),
    "a time beyond 32 bits": lambda a: StoreBuildOutput(a, (), False, BuildMetrics(BIG)),
    "a float beyond real": lambda a: StoreBuildOutput(a, (), False, BuildMetrics(1, avg_cpu_pct=1e300)),
    "NUL in a product": lambda a: StoreBuildOutput(
        a, (BuiltOutput("out", "", products=(BuildProduct("f\0", "", "", ""),)),), False
    ),
    "NUL in a timeline": lambda a: BuildFailed(
        a, FailureKind.PERMANENT, "", LIMITS, timeline=(Span("p\0", 0, 1),)
    ),
    "an assignment beyond 64 bits": lambda a: StoreBuildOutput(BIG, (), False),
}


@pytest.mark.parametrize("name", BAD_REPORTS)
async def test_a_bad_report_of_a_build_fails_alone(bench: Bench, name: str) -> None:
    await bench.writer.submit(CommitNars(1, (nar(drv("a")),)))
    await bench.writer.submit(Record(bench.evaluation, (derivation("a"),), (EntryPoint("a", drv("a")),)))
    assignment = await started(bench)
    await bench.refused(BAD_REPORTS[name](assignment))
    # The build can still end.
    await bench.writer.submit(BuildFailed(assignment, FailureKind.PERMANENT, "e\0rror", LIMITS))
    assert await bench.value("SELECT failure_message FROM build_attempt") == "error"


async def test_bad_numbers_of_an_evaluation_fail_alone(bench: Bench) -> None:
    error = await bench.refused(StoreEvalStats(bench.evaluation, BIG, 1, 1))
    assert isinstance(error, psycopg.DataError)
    assert isinstance(await bench.refused(EvalStreamCompleted(BIG)), psycopg.DataError)


async def test_messages_are_cut_and_counted(bench: Bench) -> None:
    await bench.writer.submit(AddMessage(bench.evaluation, MessageLevel.NOTICE, "s\0" * 10**4, "m\0" * 10**6))
    assert await bench.value("SELECT length(message) FROM evaluation_message") == 65536
    flood = tuple(f"warning {i}" for i in range(MAX_MESSAGES + 500))
    await bench.writer.submit(Record(bench.evaluation, warnings=flood))
    await bench.writer.submit(Record(bench.evaluation, warnings=("one more",)))
    assert await bench.value("SELECT count(*) FROM evaluation_message") == MAX_MESSAGES + 1


async def test_what_is_refused_is_said_in_words(bench: Bench) -> None:
    refused = await bench.refused(Record(bench.evaluation, (BAD_DERIVATIONS["no outputs"],)))
    assert isinstance(refused, Rejected)
    assert str(refused) == f"{drv('a')}: a derivation without outputs can never be done"
    refused = await bench.refused(Record(bench.evaluation, (BAD_DERIVATIONS["no store path"],)))
    assert isinstance(refused, Rejected)
    assert str(refused).startswith("'/etc/passwd' is no store path")
    refused = await bench.refused(Record(bench.evaluation + 1000, (derivation("a"),)))
    assert str(refused) == f"evaluation {bench.evaluation + 1000} does not exist"
    refused = await bench.refused(CreateEvaluation("nobody", Repository("git+https://example.org/x")))
    assert "no project 'nobody'" in str(refused)
    refused = await bench.refused(CreateEvaluation("main"))
    assert "one source" in str(refused)


@pytest.mark.parametrize("together", [False, True])
async def test_what_contradicts_an_earlier_record_changes_nothing(bench: Bench, together: bool) -> None:
    """Batches of one job may come as one: that makes no difference."""
    first = derivation("a", ["b"])
    other = attrs.evolve(
        first, architecture="other", outputs=(*first.outputs, OutputPath("dev", out("a", "dev")))
    )
    derivations = ((first, derivation("b")), (other,))
    points = ((EntryPoint("x", drv("a")),), (EntryPoint("x", drv("b")), EntryPoint("y", drv("a"))))
    batches = [Record(bench.evaluation, *batch) for batch in zip(derivations, points, strict=True)]
    if together:
        batches = [Record(bench.evaluation, sum(derivations, ()), sum(points, ()))]
    for batch in batches:
        await bench.writer.submit(batch)
    assert await bench.value("SELECT count(*) FROM derivation_output") == 2
    assert await bench.value("SELECT count(*) FROM derivation WHERE architecture = 'other'") == 0
    named = "SELECT t.eval, d.name FROM entry_point t JOIN derivation d ON d.id = t.derivation ORDER BY 1"
    assert await bench.rows(named) == [("x", "a"), ("y", "a")]


async def test_one_path_under_two_names_is_committed_once(bench: Bench) -> None:
    path = out("a")
    await bench.writer.submit(CommitNars(1, (nar(path), nar(path + "-more"))))
    assert await bench.value("SELECT count(*) FROM cached_path") == 1
    await bench.refused(CommitNars(1, (nar("/nix/store/short"),)))


async def test_what_is_walked_again_has_the_inputs_of_its_new_record(bench: Bench) -> None:
    """A `.drv` says the same each time; whoever says otherwise leaves no count that falls below zero."""
    await bench.writer.submit(record(bench.evaluation, {"a": ["b"]}))
    await bench.writer.submit(Unwalk(await bench.value("SELECT id FROM derivation WHERE name = 'a'")))
    await bench.writer.submit(record(bench.evaluation, {"a": ["c"], "c": []}))
    assert await bench.rows(
        "SELECT i.name FROM derivation_dependency e JOIN derivation i ON i.id = e.dependency"
    ) == [("c",)]
    await bench.writer.submit(record(bench.evaluation, {"b": []}))
    await World(bench.connection).check()


@attrs.frozen
class Unwalk:
    """What the collection of garbage does to a derivation."""

    derivation: int

    async def apply(self, tx: Transaction) -> None:
        await unwalk_derivations(tx, [self.derivation])
