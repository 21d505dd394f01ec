"""`gradient work`: a worker alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import click
import trio

from gradient.cli import options
from gradient.cli.output import Output
from gradient.cli.run import log_to_stderr, run, signal_exit
from gradient.cli.worker_child import LEASH, Leash
from gradient.nursery.signals import Stop


@click.command(short_help="Run a worker: it evaluates and builds for a server.")
@click.option("--server", metavar="URL", help="The server's HTTP address. Default: the one on this host.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Holds the worker token. Default: the server's own, on its host.",
)
@click.option(LEASH, "leashed", is_flag=True, hidden=True)
@options.with_json
@options.with_data_dir
@options.with_nix
@options.with_config
def work(
    server: str | None,
    token_file: Path | None,
    leashed: bool,
    json: bool,
    data_dir: Path | None,
    nix: str | None,
    config: Path | None,
) -> NoReturn:
    """Run a worker: it fetches, evaluates and builds for a server. SIGTERM and Ctrl-C stop it in 5 s."""
    out = Output("work", json)
    log_to_stderr("warning" if leashed else "info")

    async def command(stop: Stop) -> int:
        binary = options.nix_binary(nix)
        await options.check_nix(binary)
        if token_file is not None:  # found out now, not with each try to connect
            options.given_token(token_file)
        from gradient.work import work as run_worker

        async def work_for(server_url: str | None) -> None:
            settings = options.make_settings(
                config,
                server__data_dir=data_dir,
                worker__server_url=server_url,
                worker__token_file=token_file,
                worker__nix=binary,
            )
            await run_worker(settings, stop, signals=False)

        await (_leashed(stop, work_for) if leashed else work_for(server))
        out.object({})
        return signal_exit(stop)

    run(out, command)


async def _leashed(stop: Stop, work_for: Callable[[str], Awaitable[None]]) -> None:
    """Work for as long as the `gradient up` that started us lives."""
    leash = Leash()
    server_url = await leash.server_url(stop)
    if server_url is None:
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leash.hold, stop)
        await work_for(server_url)
        nursery.cancel_scope.cancel()
