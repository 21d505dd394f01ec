"""`gradient serve`: the server alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NoReturn

import attrs
import click
import trio

from gradient.cli import options
from gradient.cli.output import Output
from gradient.cli.run import log_to_stderr, run, signal_exit
from gradient.nursery.signals import Stop
from gradient.settings import Address


@click.command()
@options.with_json
@options.with_data_dir
@options.with_listeners
@options.with_config
def serve(
    json: bool,
    data_dir: Path | None,
    http: Address | None,
    proto: Address | None,
    database_url: str | None,
    config: Path | None,
) -> NoReturn:
    """Run the server: database, scheduler, cache and pages. SIGTERM and Ctrl-C drain it.

    With --json the object says where it listens, as soon as it does.
    """
    out = Output("serve", json)
    log_to_stderr("info")

    async def command(stop: Stop) -> int:
        settings = options.make_settings(
            config,
            server__data_dir=data_dir,
            server__http=http,
            server__proto=proto,
            database__url=database_url,
        )
        from gradient import serve as server

        async with trio.open_nursery() as nursery:
            serving = await nursery.start(partial(server.serve, settings, stop))
            out.knows(serving.cache_url, serving.public_key)
            out.result(f"Gradient serves at {serving.http_url}, for workers at {serving.proto_url}")
            out.object(attrs.asdict(serving))
        return signal_exit(stop)

    run(out, command)
