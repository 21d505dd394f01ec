"""The pages: what runs here, and one evaluation. Layer: web.

Plain HTML that works without scripts; a page of something unfinished asks the browser to load it again.
Everything from outside is escaped by the templates, and log text is stripped of its control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import attrs
from quart import Response, render_template, request

from gradient.graph import evaluation_reads
from gradient.graph.build_reads import BuildRow
from gradient.graph.evaluation_reads import EvaluationRow, MessageRow
from gradient.graph.log_reads import log_tails
from gradient.model import EVALUATION_TERMINAL, BuildStatus, EvaluationStatus, MessageLevel
from gradient.nix.build_failure import failure_reason
from gradient.settings import program
from gradient.web.answers import HTML, text_answer
from gradient.web.errors import NotFound
from gradient.web.routes import ID, Route
from gradient.web.site import Site
from gradient.web.snapshot import (
    ATTRIBUTE_SOURCE,
    Snapshot,
    entry_points_json,
    failed_attributes,
    read_snapshot,
    waiting_json,
)
from gradient.web.words import STATUS_WORDS, count, duration, plain_log, why_not_built

EVALUATIONS_SHOWN: Final = 50
# Failing builds whose log is shown; the others have a link.
TAILS_SHOWN: Final = 20
TAIL_LINES: Final = 25
# Seconds after which a page of something unfinished is loaded again.
RELOAD: Final = 3

# Nothing is loaded from anywhere, and nothing runs.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_FAILED: Final = frozenset(
    {BuildStatus.FAILED_PERMANENT, BuildStatus.FAILED_TIMEOUT, BuildStatus.FAILED_TRANSIENT}
)
_GROUPS: Final[tuple[tuple[str, Callable[[BuildRow], bool]], ...]] = (
    ("Failed", lambda build: build.status in _FAILED),
    ("Building", lambda build: build.status is BuildStatus.BUILDING),
    ("Not built because a dependency failed", lambda build: build.status is BuildStatus.DEPENDENCY_FAILED),
    ("Waiting", lambda build: build.status is BuildStatus.QUEUED or _is_wanted(build)),
    ("Aborted", lambda build: build.status is BuildStatus.ABORTED),
    ("Done", lambda build: build.status in {BuildStatus.COMPLETED, BuildStatus.SUBSTITUTED}),
    ("Not needed", lambda build: not _is_wanted(build)),
)


@attrs.frozen
class EvaluationView:
    """An evaluation as a page shows it."""

    id: int
    what: str
    status: str
    tone: str
    waiting: str | None
    counts: str
    took: str
    created_at: datetime
    ended: bool


@attrs.frozen
class BuildView:
    """A build as a page shows it."""

    id: int
    name: str
    status: str
    tone: str
    why: str | None
    causes: Sequence[tuple[int, str]]
    worker: str | None
    took: str
    error: str | None
    # The end of its log; only of failed builds.
    log: str
    # Where its log is, if it runs or ran here; "" otherwise.
    log_url: str


async def index(site: Site) -> Response:
    """What this server does and did."""
    async with site.readers.connection() as connection:
        rows = await evaluation_reads.evaluations(connection, EVALUATIONS_SHOWN)
    now = site.clock()
    evaluations = [evaluation_view(row, now) for row in rows]
    return await _page(
        "index.html",
        evaluations=evaluations,
        workers=list(site.workers),
        cache_url=site.urls.seen_by(request.headers.get("Host")).cache(site.cache.name),
        public_key=site.cache.public_key,
        version=site.version,
        program=program(),
        duration=lambda since: duration(since, now),
        reload=RELOAD if any(not view.ended for view in evaluations) else None,
    )


async def evaluation(site: Site, evaluation: int) -> Response:
    """One evaluation: what it wanted, what became of it, and why."""
    async with site.readers.connection() as connection:
        snapshot = await read_snapshot(connection, evaluation)
        if snapshot is None:
            raise NotFound(f"There is no evaluation {evaluation}.")
        failed = [build.build for build in snapshot.builds if build.status in _FAILED][:TAILS_SHOWN]
        tails = await log_tails(connection, failed) if failed else {}
    now = site.clock()
    view = evaluation_view(snapshot.evaluation, now)
    builds = [build_view(snapshot, build, tails.get(build.build, b""), now) for build in snapshot.builds]
    return await _page(
        "evaluation.html",
        evaluation=view,
        entry_points=entry_points_json(snapshot.entry_points, snapshot.messages),
        entry_tones=_entry_tones(snapshot),
        status_words=STATUS_WORDS,
        messages=[(message.level.name.lower(), _shown(message)) for message in snapshot.messages],
        groups=grouped(snapshot.builds, builds),
        builds_total=snapshot.evaluation.named,
        builds_shown=len(builds),
        reload=None if view.ended else RELOAD,
    )


def evaluation_view(row: EvaluationRow, now: datetime) -> EvaluationView:
    """The words for an evaluation. Pure."""
    ended = row.status in EVALUATION_TERMINAL
    waiting = waiting_json(row)
    return EvaluationView(
        id=row.id,
        what=_what(row),
        status=_EVALUATION_WORDS.get(row.status, row.status.label),
        tone=_EVALUATION_TONES.get(row.status, "busy"),
        waiting=None if waiting is None else waiting["words"],
        counts=_counts(row),
        took=duration(row.created_at, row.finished_at if ended else now),
        created_at=row.created_at,
        ended=ended,
    )


def build_view(snapshot: Snapshot, row: BuildRow, tail: bytes, now: datetime) -> BuildView:
    """The words for a build. Pure."""
    causes = snapshot.causes.get(row.build, ())
    running = row.status is BuildStatus.BUILDING
    return BuildView(
        id=row.build,
        name=row.name,
        status=STATUS_WORDS[row.status.label],
        tone=build_tone(row.status),
        why=why_not_built(row, causes),
        causes=[(cause.build, cause.name) for cause in causes],
        worker=row.worker if running or row.status in _FAILED else None,
        took=duration(row.started_at, now if running else row.finished_at),
        error=failure_reason(_plain(row.error or "")) if row.status in _FAILED else None,
        log="\n".join(plain_log(tail).rstrip("\n").split("\n")[-TAIL_LINES:]),
        log_url=_log_url(row),
    )


def _log_url(row: BuildRow) -> str:
    if row.status is BuildStatus.BUILDING:
        return f"/api/v1/builds/{row.build}/log?follow=1"
    ran = row.status is BuildStatus.COMPLETED or row.status in _FAILED
    return f"/api/v1/builds/{row.build}/log" if ran and row.started_at else ""


def grouped(rows: Iterable[BuildRow], views: Iterable[BuildView]) -> list[tuple[str, list[BuildView]]]:
    """The builds under the headings a person looks for, empty ones left out; each build once. Pure."""
    groups: dict[str, list[BuildView]] = {title: [] for title, _ in _GROUPS}
    for row, view in zip(rows, views, strict=True):
        groups[next(title for title, belongs in _GROUPS if belongs(row))].append(view)
    return [(title, members) for title, members in groups.items() if members]


def build_tone(status: BuildStatus) -> str:
    """The class of a status in the style sheet."""
    if status in {BuildStatus.COMPLETED, BuildStatus.SUBSTITUTED}:
        return "good"
    if status in _FAILED or status is BuildStatus.DEPENDENCY_FAILED:
        return "bad"
    return "busy" if status is BuildStatus.BUILDING else "calm"


_EVALUATION_WORDS: Final = {
    EvaluationStatus.EVALUATING_FLAKE: "Evaluating",
    EvaluationStatus.EVALUATING_DERIVATION: "Evaluating",
}
_EVALUATION_TONES: Final = {
    EvaluationStatus.COMPLETED: "good",
    EvaluationStatus.FAILED: "bad",
    EvaluationStatus.ABORTED: "calm",
    EvaluationStatus.QUEUED: "calm",
    EvaluationStatus.WAITING: "warn",
}


def _entry_tones(snapshot: Snapshot) -> dict[str, str]:
    tones = {row.attr: build_tone(row.status) for row in snapshot.entry_points}
    return {**dict.fromkeys(failed_attributes(snapshot.messages), "bad"), **tones}


def _is_wanted(build: BuildRow) -> bool:
    return build.status is BuildStatus.CREATED and build.wanted


def _what(row: EvaluationRow) -> str:
    """What was evaluated, in the shortest words that tell: `my-flake#hello at 0123456789ab`."""
    source = row.flake_source or {}
    name = row.repository or row.comment or str(source.get("store_path", "an uploaded source"))
    asked = f"#{','.join(row.wildcards)}" if row.wildcards else ""
    revision = row.commit or source.get("rev")
    if revision:
        return f"{name}{asked} at {revision[:12]}"
    return f"{name}{asked}" if row.repository else f"{name}{asked} (no commit)"


def _counts(row: EvaluationRow) -> str:
    """`12 builds: 8 done, 2 building, 1 waiting, 1 failed or not tried`; one that has ended leaves to others
    what is building or waiting."""
    if not row.named:
        return "no builds yet" if row.status not in EVALUATION_TERMINAL else "nothing to build"
    over = row.status in EVALUATION_TERMINAL
    parts = {
        "done": row.named - row.active - row.failed,
        "building": 0 if over else row.building,
        "waiting": 0 if over else row.active - row.building,
        "failed or not tried": row.failed,
        "not waited for": row.active if over else 0,
    }
    shown = ", ".join(f"{number} {what}" for what, number in parts.items() if number > 0)
    return f"{count(row.named, 'build')}: {shown}"


def _shown(message: MessageRow) -> str:
    text = _plain(message.message).strip()
    if message.level is not MessageLevel.ERROR:
        return text
    attribute = message.source.removeprefix(ATTRIBUTE_SOURCE)
    about = f"{attribute}: " if attribute != message.source else ""
    return about + text.removeprefix("error: ")


def _plain(text: str) -> str:
    return plain_log(text.encode())


async def _page(template: str, **values: Any) -> Response:
    response = text_answer(await render_template(template, **values), content_type=HTML)
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["Cache-Control"] = "no-store"
    return response


ROUTES: Final = (
    Route("GET", "/", index),
    Route("GET", f"/evaluations/<{ID}:evaluation>", evaluation),
)
