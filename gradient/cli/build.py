"""`gradient build`: an evaluation on a server that runs already."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click

from gradient.cli import options
from gradient.cli.flake_arg import parse_flake_arg
from gradient.cli.output import Output
from gradient.cli.run import interruptible, log_to_stderr, run


@click.command(short_help="Evaluate and build FLAKE on a server that runs already.")
@options.with_flake
@options.with_json
@options.with_server
@options.with_data_dir
@options.with_config
def build(
    flake: str,
    json: bool,
    server: str | None,
    token_file: Path | None,
    data_dir: Path | None,
    config: Path | None,
) -> NoReturn:
    """Have FLAKE evaluated and built by a server and its workers, and follow it.

    FLAKE is what `nix build` takes; a local one is packed and uploaded. Ctrl-C ends only the following.
    """
    out = Output("build", json)
    log_to_stderr("warning")

    async def command() -> int:
        from gradient.cli.api import Api
        from gradient.cli.evaluate import evaluate, prepare, report
        from gradient.http.client import HttpClient

        parsed = parse_flake_arg(flake)
        connection = options.find_server(server, data_dir, token_file, config)
        async with HttpClient() as client:
            api = Api(client, connection)
            facts = await api.server()
            out.knows(facts.cache_url, facts.public_key)
            outcome = await evaluate(api, await prepare(parsed), out)
        report(outcome, out)
        return outcome.exit

    def interrupted() -> str:
        return "interrupted" + (f"; evaluation {out.evaluation} goes on" if out.evaluation else "")

    run(out, interruptible(command, interrupted))
