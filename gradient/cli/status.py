"""`gradient status`: what a server and its workers are doing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from gradient.cli import options
from gradient.cli.output import Output
from gradient.cli.run import interruptible, log_to_stderr, run
from gradient.cli.text import clean, count


@click.command()
@options.with_json
@options.with_server
@options.with_data_dir
@options.with_config
def status(
    json: bool,
    server: str | None,
    token_file: Path | None,
    data_dir: Path | None,
    config: Path | None,
) -> NoReturn:
    """Show workers, evaluations and the queue."""
    out = Output("status", json)
    log_to_stderr("warning")

    async def command() -> int:
        from gradient.cli.api import Api
        from gradient.http.client import HttpClient

        connection = options.find_server(server, data_dir, token_file, config)
        async with HttpClient() as client:
            api = Api(client, connection)
            facts, now = await api.server(), await api.status()
        out.result(f"Gradient {facts.version} at {connection.url}")
        for line in status_lines(now):
            out.result(line)
        out.object({"server": connection.url, "version": facts.version, **now})
        return 0

    run(out, interruptible(command))


def status_lines(now: dict[str, Any]) -> Iterator[str]:
    """The answer of /api/v1/status for people. Pure."""
    queue = now["queue"]
    yield (
        f"{count(queue['building'], 'build')} running, {queue['queued']} queued, "
        f"{queue['created']} waiting for dependencies"
    )
    for worker in now["workers"]:
        running = [clean(job["name"]) for job in worker["running"]]
        busy = f"{count(len(running), 'job')} running: {', '.join(running)}" if running else "idle"
        yield f"worker {clean(worker['name'])}: {', '.join(worker['architectures'])}; {busy}"
    if not now["workers"]:
        yield "no worker is connected"
    for evaluation in now["evaluations"]:
        waiting = evaluation["waiting"]
        why = f": {clean(waiting['words'])}" if waiting else ""
        of = " ".join(clean(evaluation["repository"] or evaluation["comment"] or "a source").split())
        yield f"evaluation {evaluation['evaluation']} of {of}: {evaluation['status']}{why}"
    for name, child in now["children"].items():
        if child["state"] == "backing off":
            yield f"{name} is restarting: {clean(str(child['last_error']))}"
