"""Progress folded from events, as lines and as a tree."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from gradient.cli.display import TreeDisplay, display_of
from gradient.cli.plain import PlainLines
from gradient.cli.progress import Build, Moved, Progress, Said, Turned, Waits
from gradient.cli.tree import draw
from gradient.model import BuildStatus
from tests.unit.cli_support import build, snapshot

T0 = 1767225600.0  # 2026-01-01T00:00:00Z, when the snapshots' evaluation was created
OLD = "2025-12-31T00:00:00+00:00"  # before it
NEEDS = {
    "reason": {"kind": "workers"},
    "words": "waits for a worker for riscv64-linux (1 build, such as native)",
    "since": "2026-01-01T00:00:00+00:00",
}


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02}+00:00"


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, **fields}


def started(*events: dict[str, Any]) -> Progress:
    progress = Progress(started=T0, title="flake#hello")
    for number, value in enumerate(events):
        progress.fold(value, float(number))
    return progress


def first(status: str = "Building", **more: Any) -> dict[str, Any]:
    return event("snapshot", **snapshot(status, **more))


def told(progress: Progress, *events: dict[str, Any]) -> list[str]:
    lines = PlainLines(progress)
    return [line for number, value in enumerate(events) for line in lines.of(progress.fold(value, 0), number)]


def test_a_build_from_its_start_to_its_end() -> None:
    progress = started(first())
    assert told(
        progress,
        event("build", build=1, name="hello", status="Queued", at=at(1)),
        event("build", build=1, name="hello", status="Building", worker="w", at=at(2)),
        event("build", build=1, name="hello", status="Completed", worker="w", at=at(5)),
    ) == ["building hello on w", "built hello (3.0s)"]
    assert progress.having(BuildStatus.COMPLETED)[0].took(0) == 3.0


def test_a_failure_tells_the_end_of_its_log_and_its_dependents() -> None:
    progress = started(first())
    assert told(
        progress,
        event("build", build=1, name="broken", status="Building", worker="w", at=at(1)),
        event("log", build=1, text="compiling\nerror: \x1b[31mno"),
        event("log", build=1, text="pe\x1b[0m\n"),
        event("build", build=1, name="broken", status="FailedPermanent", at=at(2), error="exit code 1"),
        event(
            "build", build=2, name="dependent", status="DependencyFailed", at=at(2), reason="broken failed"
        ),
    ) == [
        "building broken on w",
        "failed broken (1.0s): exit code 1",
        "    > compiling",
        "    > error: nope",
        "not built dependent: broken failed",
    ]


def test_what_was_built_before_is_not_news() -> None:
    progress = started(first())
    happened = progress.fold(event("build", build=1, name="old", status="Completed", at=OLD), 0)
    assert happened == []
    assert progress.builds[1].earlier


def test_what_had_failed_before_is_tried_again_and_then_told() -> None:
    progress = started(first())
    old = event("build", build=1, name="broken", status="FailedPermanent", at=OLD, error="exit code 1")
    assert told(progress, event("log", build=1, text="old\n"), old) == []
    assert progress.fresh(BuildStatus.FAILED_PERMANENT) == []
    assert told(
        progress,
        {**old, "status": "Queued", "at": at(1)},
        event("log", build=1, text="new\n"),
        {**old, "at": at(2)},
    ) == ["failed broken: exit code 1", "    > new"]


def test_what_failed_again_between_two_looks_is_told() -> None:
    progress = started(first())
    old = event("build", build=1, name="broken", status="FailedPermanent", at=OLD)
    assert told(progress, old, {**old, "at": at(2)}) == ["failed broken"]


def test_what_had_failed_before_and_is_not_tried_again_is_told_at_the_end() -> None:
    progress = started(first())
    old = event("build", build=1, name="broken", status="FailedPermanent", at=OLD)
    above = event("build", build=2, name="above", status="DependencyFailed", at=OLD, reason="broken failed")
    assert told(progress, old, above, event("end", status="Failed")) == [
        "failed broken",
        "not built above: broken failed",
    ]


def test_a_snapshot_after_a_lost_connection_tells_what_was_missed() -> None:
    progress = started(first(builds=[build(1, "hello", "Queued")]))
    missed = build(1, "hello", "Completed", started_at=at(1), finished_at=at(2))
    assert told(progress, first("Completed", builds=[missed])) == ["built hello (1.0s)"]
    assert progress.ended
    assert told(progress, first("Completed", builds=[missed])) == []


def test_what_was_missed_is_told_in_its_order() -> None:
    names = ("runs", "broken", "needs", "top", "lib")  # as a snapshot has them
    progress = started(first(builds=[build(n, name, "Queued") for n, name in enumerate(names)]))
    missed = [
        build(0, "runs", "Building", worker="w", at=at(3)),
        build(1, "broken", "FailedPermanent", at=at(5)),
        build(2, "needs", "DependencyFailed", reason="broken failed", at=at(5)),
        build(3, "top", "Completed", at=at(4)),
        build(4, "lib", "Completed", at=at(2)),
    ]
    lines = told(progress, first(builds=missed))
    assert [line.split()[1] for line in lines] == ["lib", "runs", "top", "broken", "built"]


def test_messages_are_told_once() -> None:
    error = {"level": "Error", "source": "nix-eval:packages.x.y", "message": "error: no\nat flake.nix:3"}
    progress = started(first("EvaluatingFlake"))
    lines = told(progress, event("message", **error), first("EvaluatingFlake", messages=[error]))
    assert lines == ["does not evaluate: packages.x.y"]  # the report at the end has all of it


def test_errors_are_only_counted_before_the_report() -> None:
    unmatched = {"level": "Error", "source": "evaluation", "message": "nope: target matched no derivations"}
    counters = {"named": 1, "active": 1}
    lines = told(
        started(first("EvaluatingDerivation")),
        event("message", **unmatched),
        event("evaluation", status="Building", waiting=None, counters=counters),
    )
    assert lines == ["building 1 derivation; 1 error so far, told at the end"]


def test_a_server_that_is_away_is_waited_for_in_one_line() -> None:
    progress = started(first())
    lines = PlainLines(progress)
    assert [*lines.of(progress.away("does not answer"), 0)] == []  # it may be back in a moment
    assert [*lines.of(progress.away("is on fire"), 1)] == []
    assert [*lines.of((), 2)] == ["waits for the server, which does not answer"]
    assert drawn(progress, 1)[1] == "└── ⏸ waits for the server, which does not answer"
    progress.fold(first(), 3)
    assert progress.server is None
    assert [*lines.of(progress.away("does not answer"), 4)] == []
    progress.fold(first(), 5)
    assert [*lines.of((), 6)] == []  # it was


def test_a_server_that_stops_is_waited_for() -> None:
    progress = started(first())
    assert progress.fold(event("stopping"), 0) == [
        Waits("waits for the server, which is stopping: its next start goes on")
    ]


def test_building_says_how_much_of_it_is_left() -> None:
    counters = {"named": 6, "active": 2, "failed": 0, "queued": 2, "building": 0}
    some = event("evaluation", status="Building", waiting=None, counters=counters)
    assert told(started(first("Queued")), some) == ["building 2 of 6 derivations"]
    all_of_them = {**some, "counters": {**counters, "active": 6}}
    assert told(started(first("Queued")), all_of_them) == ["building 6 derivations"]


def test_a_long_evaluation_says_now_and_then_how_far_it_is() -> None:
    progress = started(first("EvaluatingFlake"))
    lines = PlainLines(progress)
    said = []
    for second in range(25):
        counts = {"attributes_done": second, "attributes_total": 40, "derivations": second * 10}
        said += lines.of(progress.fold(event("progress", **counts), second), second)
    assert said == [
        "evaluating: 1 of 40 attributes, 10 derivations",
        "evaluating: 11 of 40 attributes, 110 derivations",
        "evaluating: 21 of 40 attributes, 210 derivations",
    ]


def test_waiting_is_told_when_it_lasts() -> None:
    progress = started(first("Queued"))
    lines = PlainLines(progress)
    waits = event("evaluation", status="Waiting", waiting=NEEDS)
    assert [*lines.of(progress.fold(waits, 0), 0)] == []
    assert [*lines.of((), 1)] == []
    assert [*lines.of((), 2)] == [NEEDS["words"]]
    assert [*lines.of((), 3)] == []
    progress.fold(event("evaluation", status="Queued", waiting=None), 4)
    assert [*lines.of(progress.fold(waits, 5), 5)] == []
    assert [*lines.of(progress.fold(event("evaluation", status="Queued", waiting=None), 6), 8)] == []


def test_waiting_for_a_worker_is_counted_from_its_beginning() -> None:
    progress = started(first())
    assert progress.fold(event("evaluation", status="Waiting", waiting=NEEDS), 10) == [
        Turned("Waiting"),
        Waits(NEEDS["words"]),
    ]
    progress.fold(event("evaluation", status="Waiting", waiting=NEEDS), 20)
    assert progress.needs_worker_since == 10
    progress.fold(event("evaluation", status="Building", waiting=None), 30)
    assert progress.needs_worker_since is None
    progress.fold(event("evaluation", status="Waiting", waiting=NEEDS), 40)
    assert progress.needs_worker_since == 40


def test_waiting_for_something_else_is_not_waiting_for_a_worker() -> None:
    stuck = {"reason": {"kind": "graph_stuck"}, "words": "is repaired", "since": at(0)}
    progress = started(first(), event("evaluation", status="Waiting", waiting=stuck))
    assert progress.waiting == "is repaired"
    assert progress.needs_worker_since is None


def test_unknown_events_and_statuses_are_passed_over() -> None:
    progress = started(first(), event("build", build=1, name="x", status="Building", at=at(1)))
    assert progress.fold(event("news", of="tomorrow"), 0) == []
    assert progress.fold({}, 0) == []
    assert progress.fold(event("build", build=1, name="x", status="Sideways", at=at(2)), 0) == []
    assert progress.builds[1].status is BuildStatus.BUILDING


def test_happenings_are_values() -> None:
    progress = started(first())
    (moved,) = progress.fold(event("build", build=1, name="x", status="Building", at=at(1)), 0)
    assert isinstance(moved, Moved)
    assert isinstance(moved.build, Build)
    assert moved.before is BuildStatus.QUEUED
    assert Said("Error", "a", "b") == Said("Error", "a", "b")


# --- the tree -------------------------------------------------------------------------------------


def drawn(progress: Progress, second: int, height: int = 0, width: int = 70) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(draw(progress, T0 + second, height))
    return [line.rstrip() for line in capture.get().splitlines()]


def busy() -> Progress:
    return started(
        first("Building"),
        event("build", build=1, name="broken", status="Building", worker="w", at=at(1)),
        event("log", build=1, text="compiling\nerror: part 2 does not compile\n"),
        event("build", build=1, name="broken", status="FailedPermanent", at=at(2), error="exit code 1"),
        event(
            "build", build=2, name="dependent", status="DependencyFailed", at=at(2), reason="broken failed"
        ),
        event("build", build=3, name="slow", status="Building", worker="w", at=at(3)),
        event("build", build=4, name="quick", status="Building", worker="w", at=at(3)),
        event("build", build=4, name="quick", status="Completed", worker="w", at=at(4)),
        event(
            "evaluation",
            status="Waiting",
            waiting=NEEDS,
            counters={"named": 9, "active": 5, "failed": 1, "queued": 4, "building": 1},
        ),
    )


def test_the_tree_shows_what_failed_runs_waits_and_was_built() -> None:
    assert drawn(busy(), 68) == [
        "flake#hello",
        "├── ⚠ broken 1.0s: exit code 1",
        "│   ├── compiling",
        "│   └── error: part 2 does not compile",
        "├── ⏵ slow 1m05s on w",
        "├── ⊘ dependent: broken failed",
        "├── ✔ quick 1.0s",
        "└── ⏸ waits for a worker for riscv64-linux (1 build, such as native)",
        "∑ ⏵ 1 │ ✔ 3 │ ⏸ 4 │ ⚠ 1 │ ⊘ 1 │ 1m08s",
    ]


def test_the_tree_shows_how_far_the_evaluation_is() -> None:
    progress = started(first("EvaluatingFlake"))
    assert drawn(progress, 1)[:2] == ["flake#hello", "└── evaluating"]
    progress.fold(event("progress", attributes_done=3, attributes_total=None, derivations=1), 0)
    assert drawn(progress, 1)[1] == "└── evaluating: 3 attributes, 1 derivation"


def test_the_tree_fits_on_the_terminal() -> None:
    events = [event("build", build=n, name=f"b{n}", status="Building", at=at(1)) for n in range(500)]
    picture = drawn(started(first(), *events), 2, height=20)
    assert len(picture) < 20
    assert picture[-2] == "└── … and 487 more"


def test_long_names_are_cut_not_wrapped() -> None:
    progress = started(first(), event("build", build=1, name="n" * 200, status="Building", at=at(1)))
    assert len(drawn(progress, 2)) == 3
    assert all(len(line) <= 70 for line in drawn(progress, 2))


def test_markup_in_names_is_text() -> None:
    progress = started(first(), event("build", build=1, name="[red]x[/red]", status="Building", at=at(1)))
    assert "[red]x[/red]" in drawn(progress, 2)[1]


# --- on a terminal --------------------------------------------------------------------------------


def test_a_terminal_gets_a_tree_with_messages_above_it_and_keeps_the_sums() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=70, height=20, force_terminal=True, color_system=None)
    progress = busy()
    display = TreeDisplay(progress, console)
    display.tick()
    assert "⚠ broken" in screen.getvalue()
    display.happened([Said("Warning", "nix", "[bold]not markup[/bold]")])
    assert "warning: nix: [bold]not markup[/bold]" in screen.getvalue()
    display.close()
    # What erases the tree (up a line, clear it) stands before the line that stays.
    *_, end = screen.getvalue().splitlines()
    assert end.count("\x1b[1A\x1b[2K") == len(drawn(progress, 0))
    assert "\x1b[2K∑ ⏵ 1 │ ✔ 3 │ ⏸ 4 │ ⚠ 1 │ ⊘ 1 │" in end


def test_what_is_not_a_terminal_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = started(first())
    display = display_of(progress)
    display.happened(progress.fold(event("build", build=1, name="x", status="Building", at=at(1)), 0))
    display.tick()
    display.close()
    captured = capsys.readouterr()
    assert captured.err == "building x\n"
    assert captured.out == ""
