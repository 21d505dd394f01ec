"""What the server itself is doing: health, address, workers, queue. Layer: web."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from quart import Response, request

from gradient.graph import build_reads, evaluation_reads
from gradient.model import JobKind
from gradient.nix.store_path import STORE_DIR
from gradient.nursery.health import ChildHealth, Moment, State
from gradient.passes.pool import Worker
from gradient.web.answers import json_answer
from gradient.web.routes import Route
from gradient.web.site import Site
from gradient.web.snapshot import evaluation_json


async def health(site: Site) -> Response:
    """200 while every child does its work, 503 otherwise; asks nothing of the database."""
    children = site.health.snapshot()
    status = "stopping" if site.live.closed else "degraded" if _any_failing(children) else "ok"
    answer = {"status": status, "version": site.version, "children": children_json(children)}
    return json_answer(answer, 200 if status == "ok" else 503)


async def server(site: Site) -> Response:
    """What a worker or the CLI asks first, with the addresses as it can reach them."""
    urls = site.urls.seen_by(request.headers.get("Host"))
    return json_answer(
        {
            "version": site.version,
            "proto_url": urls.proto,
            "cache_url": urls.cache(site.cache.name),
            "public_key": site.cache.public_key,
            "store_dir": STORE_DIR,
            "data_version": site.data_version,
        }
    )


async def status(site: Site) -> Response:
    """Workers, evaluations that have not ended, the queue, the children of the server."""
    async with site.readers.connection() as connection:
        evaluations = await evaluation_reads.active_evaluations(connection)
        queue = await build_reads.queue_sizes(connection)
    return json_answer(
        {
            "workers": [worker_json(worker) for worker in site.workers],
            "evaluations": [evaluation_json(row) for row in evaluations],
            "queue": {"queued": queue.queued, "building": queue.building, "created": queue.created},
            "children": children_json(site.health.snapshot()),
        }
    )


def worker_json(worker: Worker) -> dict[str, Any]:
    """A connected worker; `slots` and `running` count both kinds of job."""
    info = worker.info
    return {
        "id": str(worker.id),
        "name": worker.name,
        "architectures": info.architectures if info else (),
        "features": info.system_features if info else (),
        "slots": {
            "build": info.max_concurrent_builds if info else 0,
            "eval": info.max_concurrent_evals if info else 0,
        },
        "running": [
            {"job": job.job_id, "kind": _kind(job.kind), "name": job.name, "since": job.since}
            for job in worker.jobs.values()
        ],
        "since": worker.connected_at,
        "draining": worker.draining,
    }


def children_json(children: Iterable[ChildHealth]) -> dict[str, Any]:
    """The health table; times in seconds since the epoch."""
    return {
        child.name: {
            "state": child.state.value,
            "last_ok": _wall(child.last_good),
            "last_error": child.last_error,
            "restarts": child.restarts,
        }
        for child in children
    }


def _any_failing(children: Iterable[ChildHealth]) -> bool:
    return any(child.state is State.BACKING_OFF for child in children)


def _wall(moment: Moment | None) -> float | None:
    return None if moment is None else moment.wall


def _kind(kind: JobKind) -> str:
    return kind.name.lower()


ROUTES: Final = (
    Route("GET", "/health", health),
    Route("GET", "/api/v1/server", server),
    Route("GET", "/api/v1/status", status),
)
