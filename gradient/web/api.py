"""The API of evaluations and builds, and uploads. Layer: web; docs/api.md has the shapes."""

from __future__ import annotations

import re
from typing import Any, Final

from quart import Response, request

from gradient.graph import build_reads, evaluation_reads
from gradient.graph.build_reads import BuildRow
from gradient.graph.evaluation_end import AbortEvaluation
from gradient.graph.evaluations import CreateEvaluation
from gradient.graph.promises import promised_paths
from gradient.model import CachedSource, Repository, WalkMode
from gradient.nix.errors import NixError
from gradient.nix.flake_ref import FlakeKind
from gradient.nix.flake_url import parse_flake_ref
from gradient.nix.hashes import Hash
from gradient.nix.store_path import StorePath
from gradient.nix.wildcard import parse_wildcards
from gradient.web.answers import json_answer
from gradient.web.errors import BadRequest, NotFound
from gradient.web.inputs import Fields, read_fields, read_optional_fields
from gradient.web.routes import ID, Route
from gradient.web.site import Site
from gradient.web.snapshot import build_json, causes_of, evaluation_json, read_snapshot, snapshot_json
from gradient.web.words import REASONS

DEFAULT_LIMIT: Final = 50
MAX_COMMENT: Final = 4096  # characters
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LOCAL: Final = frozenset({FlakeKind.FOLDER, FlakeKind.PATH})

# --- evaluations ----------------------------------------------------------------------------------


async def create_evaluation(site: Site) -> Response:
    """Create an evaluation of a repository or of an uploaded source."""
    who = await site.gate.admit(request.headers.get("Authorization"))
    message = await _requested_evaluation(site, who)
    evaluation = await site.submit(message)
    urls = site.urls.seen_by(request.headers.get("Host"))
    answer = {"evaluation": evaluation, "url": urls.evaluation(evaluation)}
    return json_answer(answer, 201)


async def list_evaluations(site: Site) -> Response:
    """The newest evaluations."""
    text = request.args.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadRequest("`limit` is a number")
    async with site.readers.connection() as connection:
        rows = await evaluation_reads.evaluations(connection, int(text))
    return json_answer({"evaluations": [evaluation_json(row) for row in rows]})


async def show_evaluation(site: Site, evaluation: int) -> Response:
    """The snapshot."""
    async with site.readers.connection() as connection:
        snapshot = await read_snapshot(connection, evaluation)
    if snapshot is None:
        raise NotFound(f"there is no evaluation {evaluation}")
    return json_answer(snapshot_json(snapshot))


async def abort_evaluation(site: Site, evaluation: int) -> Response:
    """Abort it; one that has ended stays as it is."""
    who = await site.gate.admit(request.headers.get("Authorization"))
    (await read_optional_fields()).end()
    async with site.readers.connection() as connection:
        if await evaluation_reads.evaluation(connection, evaluation) is None:
            raise NotFound(f"there is no evaluation {evaluation}")
    aborted = await site.submit(AbortEvaluation(evaluation, f"aborted by {who}"))
    return json_answer({"evaluation": evaluation, "aborted": aborted}, 202)


async def _requested_evaluation(site: Site, who: str) -> CreateEvaluation:
    fields = await read_fields()
    repository, source = fields.object("repository"), fields.object("source")
    if (repository is None) == (source is None):
        raise BadRequest("exactly one of `repository` and `source` is needed")
    try:
        wildcards = fields.texts("wildcards")
        if wildcards:
            parse_wildcards(wildcards)
        message = CreateEvaluation(
            project=site.project,
            repository=None if repository is None else _repository(repository),
            cached=None if source is None else await _source(site, source),
            wildcards=wildcards,
            walk_mode=WalkMode.FULL if fields.flag("full_walk") else WalkMode.PRUNED,
            started_by=who,
            comment=(fields.text("comment") or "")[:MAX_COMMENT] or None,
        )
    except NixError as error:
        raise BadRequest(str(error)) from error
    fields.end()
    return message


def _repository(fields: Fields) -> Repository:
    url, commit = fields.required_text("url"), fields.text("commit")
    fields.end()
    if parse_flake_ref(url).kind in _LOCAL:
        raise BadRequest("a local path means nothing to a worker: upload it, and name it as `source`")
    if commit is not None and _COMMIT.fullmatch(commit) is None:
        raise BadRequest("`repository.commit` must be a full commit id")
    return Repository(url, commit)


async def _source(site: Site, fields: Fields) -> CachedSource:
    source = CachedSource(
        store_path=fields.required_text("store_path"),
        nar_hash=fields.text("nar_hash"),
        rev=fields.text("rev"),
        last_modified=fields.number("last_modified"),
        rev_count=fields.number("rev_count"),
        dir=fields.text("dir") or "",
    )
    fields.end()
    path = StorePath.parse(source.store_path)
    if source.nar_hash is not None:
        Hash.parse(source.nar_hash, "sha256")
    if source.rev is not None and _COMMIT.fullmatch(source.rev) is None:
        raise BadRequest("`source.rev` must be a full commit id")
    if source.dir.startswith("/") or ".." in source.dir.split("/"):
        raise BadRequest("`source.dir` must be a folder below the source")
    if not await promised_paths(site.readers, site.submit, [path.hash_part], site.clock()):
        raise BadRequest(f"{path} is not in the cache: upload it first")
    return source


# --- builds ---------------------------------------------------------------------------------------


async def show_build(site: Site, build: int) -> Response:
    """A build with its attempts, outputs and products, and what it waits for."""
    async with site.readers.connection() as connection:
        rows = await build_reads.builds(connection, [build])
        if not rows:
            raise NotFound(f"there is no build {build}")
        causes = await causes_of(connection, rows)
        answer = {
            **build_json(rows[0], causes.get(build, ())),
            **_facts(rows[0]),
            "outputs": await build_reads.outputs(connection, build),
            "products": await build_reads.products(connection, build),
            "attempts": [_attempt_json(row) for row in await build_reads.attempts(connection, build)],
            "blocked_by": [
                {"build": row.build, "name": row.name, "status": row.status.label}
                for row in await build_reads.blockers(connection, build)
            ],
        }
    return json_answer(answer)


def _facts(row: BuildRow) -> dict[str, Any]:
    return {"required_features": row.required_features, "substituted": row.substituted}


def _attempt_json(row: build_reads.AttemptRow) -> dict[str, Any]:
    return {
        "attempt": row.attempt,
        "outcome": row.outcome.name.capitalize(),
        "reason": None if row.reason is None else REASONS[row.reason],
        "message": row.message,
        "worker": row.worker,
        "started_at": row.started_at,
        "finished_at": row.finished_at,
    }


# --- uploads --------------------------------------------------------------------------------------


async def upload(site: Site) -> Response:
    """Take in a bundle of NARs."""
    await site.gate.admit_upload(request.headers.get("Authorization"))
    committed = await site.uploads.take(request.body)
    return json_answer({"committed": committed})


ROUTES: Final = (
    Route("POST", "/api/v1/evaluations", create_evaluation),
    Route("GET", "/api/v1/evaluations", list_evaluations),
    Route("GET", f"/api/v1/evaluations/<{ID}:evaluation>", show_evaluation),
    Route("POST", f"/api/v1/evaluations/<{ID}:evaluation>/abort", abort_evaluation),
    Route("GET", f"/api/v1/builds/<{ID}:build>", show_build),
    Route("POST", "/api/v1/uploads", upload),
)
