"""`gradient up`: a server in this process, a worker in a child, one evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Final, NoReturn

import attrs
import click
import trio

from gradient.cli import options
from gradient.cli.faults import Exit, Interrupted
from gradient.cli.flake_arg import FlakeArg, parse_flake_arg
from gradient.cli.options import Connection
from gradient.cli.output import Output
from gradient.cli.run import log_to_stderr, run
from gradient.cli.up_processes import Server, real_server, run_processes
from gradient.cli.worker_child import WorkerChild, worker_command
from gradient.nursery.signals import Stop
from gradient.settings import Address, DataDir, Settings, program, read_secret

if TYPE_CHECKING:
    from gradient.cli.api import ServerFacts
    from gradient.cli.outcome import Outcome

# With --once nobody is there who could connect another worker.
GIVE_UP_AFTER: Final = 60.0  # seconds


@attrs.frozen
class Up:
    """What the command line asked for."""

    flake: FlakeArg
    settings: Settings
    config: Path | None
    once: bool
    keep_serving: bool


@click.command(short_help="Start server and worker, evaluate and build FLAKE, serve it.")
@options.with_flake
@click.option("--once", is_flag=True, help="Exit when the evaluation ends; any free ports are good.")
@click.option("--keep-serving", is_flag=True, help="With --once: go on serving until a signal, then exit.")
@options.with_json
@options.with_data_dir
@options.with_listeners
@options.with_nix
@options.with_config
def up(
    flake: str,
    once: bool,
    keep_serving: bool,
    json: bool,
    data_dir: Path | None,
    http: Address | None,
    proto: Address | None,
    database_url: str | None,
    nix: str | None,
    config: Path | None,
) -> NoReturn:
    """Start a server and a worker, evaluate FLAKE and build it, and serve what was built.

    FLAKE is what `nix build` takes: a folder, a git repository, or a URL; `.` by default. Behind # stand
    the attributes, with wildcards: `.#packages.x86_64-linux.*`. Without them it is every package and check
    of the worker's systems.
    """
    out = Output("up", json)
    log_to_stderr("warning")

    async def command(stop: Stop) -> int:
        binary = options.nix_binary(nix)
        settings = options.make_settings(
            config,
            server__data_dir=data_dir,
            server__http=http,
            server__proto=proto,
            database__url=database_url,
            worker__nix=binary,
        )
        if once:
            settings = options.on_any_port(
                settings, http_given=http is not None, proto_given=proto is not None
            )
        order = Up(parse_flake_arg(flake), settings, config, once, keep_serving)
        await options.check_nix(settings.worker.nix)
        return await run_up(order, out, stop)

    run(out, command)


async def run_up(up: Up, out: Output, stop: Stop) -> int:
    """Do it; the exit code. Raises the faults of all that takes part, after everything has stopped."""
    worker = WorkerChild(worker_command(*_worker_options(up)), partial(_relay, out))
    server = Server(partial(real_server, up.settings))
    work = _Work(up, out, stop)
    await run_processes(server, worker, stop, work.run)
    return work.exit()


@attrs.define(eq=False)
class _Work:
    """What is done between start and stop."""

    up: Up
    out: Output
    stop: Stop
    # The evaluation's code, once it has one.
    code: Exit | None = attrs.field(default=None, init=False)

    async def run(self, server: Server) -> None:
        """Evaluate and report; then serve on, unless that was all."""
        # Here rather than above: the worker's interpreter loads meanwhile, and so does the server.
        from gradient.cli.api import Api
        from gradient.cli.evaluate import evaluate, prepare, report
        from gradient.http.client import HttpClient

        order = await prepare(self.up.flake)
        http_url = (await server.ready()).http_url
        patience = GIVE_UP_AFTER if self.up.once else math.inf
        async with HttpClient() as client:
            api = Api(client, await self._connection(http_url))
            facts = await api.server()
            self.out.knows(facts.cache_url, facts.public_key)
            self.out.result(f"Gradient {facts.version} serves at {http_url}")
            outcome = await evaluate(api, order, self.out, patience)
        self.code = outcome.exit
        serves_on = self.up.keep_serving or not self.up.once
        report(outcome, self.out, self._what_next(outcome, facts, serves_on=serves_on))
        if serves_on:
            await self.stop.gently.wait()

    def exit(self) -> Exit:
        """The evaluation's code; a Ctrl-C counts as an interruption unless it is how the run is to end."""
        if self.code is None:
            raise Interrupted("interrupted; the next start goes on with what is not built yet")
        if self.stop.signal is Signals.SIGINT and not self.up.keep_serving:
            return Exit.INTERRUPTED
        return self.code

    def _what_next(self, outcome: Outcome, facts: ServerFacts, *, serves_on: bool) -> Iterator[str]:
        """How to use the cache, and what can be done now."""
        yield from cache_lines(facts.cache_url, facts.public_key, serves_on=serves_on)
        if not serves_on:
            yield f"Next: {program()} up FLAKE    (the same, and serves on at a fixed address)"
            return
        yield f"Next: {program()} build FLAKE    (evaluates another flake here; Ctrl-C ends this server)"
        if failed := outcome.first_failed:
            yield f"      {program()} log {failed}    (the whole log of a failed build)"

    async def _connection(self, http_url: str) -> Connection:
        data = DataDir(self.up.settings.server.data_dir)
        return Connection(http_url, await trio.to_thread.run_sync(read_secret, data.admin_token))


def cache_lines(cache_url: str, public_key: str, *, serves_on: bool) -> Iterator[str]:
    """How to use the cache."""
    yield f"To substitute from this cache{'' if serves_on else ' while it is served'}, put into nix.conf:"
    yield f"  extra-substituters = {cache_url}"
    yield f"  extra-trusted-public-keys = {public_key}"


def _worker_options(up: Up) -> Iterator[str]:
    yield from ("--data-dir", str(up.settings.server.data_dir))
    if up.config is not None:
        yield from ("--config", str(up.config))
    if up.settings.worker.nix is not None:
        yield from ("--nix", str(up.settings.worker.nix))


def _relay(out: Output, line: str) -> None:
    """What the worker says; not why it ends, which is then said as our own end."""
    if not line.startswith("gradient work: "):
        out.note(f"worker: {line}")
