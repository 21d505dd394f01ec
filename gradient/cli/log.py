"""`gradient log`: the log of a build, named by its number, its derivation, or an attribute."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from gradient.cli import options
from gradient.cli.faults import BadUsage, Fault, NotFound, ServerUnreachable
from gradient.cli.output import Output
from gradient.cli.run import interruptible, log_to_stderr, run
from gradient.cli.text import clean
from gradient.nix.errors import NixError
from gradient.nix.store_path import STORE_DIR, StorePath

if TYPE_CHECKING:
    from gradient.cli.api import Api

# One string of the JSON object; the longest log the server keeps.
MAX_KEPT: Final = 64 * 2**20  # bytes


@click.command()
@click.argument("build", metavar="BUILD")
@click.option("--follow", "-f", is_flag=True, help="Wait for what is still to come.")
@options.with_json
@options.with_server
@options.with_data_dir
@options.with_config
def log(
    build: str,
    follow: bool,
    json: bool,
    server: str | None,
    token_file: Path | None,
    data_dir: Path | None,
    config: Path | None,
) -> NoReturn:
    """Print a build's log. BUILD is its number, its .drv path, or an attribute of the last evaluation."""
    out = Output("log", json)
    log_to_stderr("warning")

    async def command() -> int:
        from gradient.cli.api import Api
        from gradient.http.client import HttpClient

        connection = options.find_server(server, data_dir, token_file, config)
        async with HttpClient() as client:
            api = Api(client, connection)
            kept = await _print(api, build, await _address(api, build, follow), out)
        out.object({"build": build, "log": kept})
        return 0

    run(out, interruptible(command))


async def _address(api: Api, build: str, follow: bool) -> str:
    """Where the log of what the user named is."""
    if build.startswith(STORE_DIR):
        try:
            path = StorePath.parse(build)
        except NixError as error:
            raise BadUsage(str(error)) from error
        return f"{await api.cache()}/log/{path.base_name}"
    number = int(build) if _is_number(build) else await _build_of_attribute(api, build)
    return f"/api/v1/builds/{number}/log{'?follow=1' if follow else ''}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


async def _build_of_attribute(api: Api, attribute: str) -> int:
    newest = await api.evaluations(1)
    if not newest:
        raise NotFound("the server has no evaluation yet")
    evaluation = await api.evaluation(newest[0]["evaluation"])
    return pick_build(evaluation, attribute)


def pick_build(evaluation: dict[str, Any], attribute: str) -> int:
    """The build of an attribute, given whole or by its end (`hello` for `packages.x86_64-linux.hello`).

    Pure. Raises NotFound, BadUsage when several attributes end so."""
    points = {point["attr"]: point["build"] for point in evaluation["entry_points"]}
    matching = [attribute] if attribute in points else [a for a in points if a.endswith(f".{attribute}")]
    if len(matching) > 1:
        raise BadUsage(f"{attribute} can be {' or '.join(sorted(matching)[:5])}: give the whole attribute")
    if not matching:
        raise NotFound(f"evaluation {evaluation['evaluation']} has no attribute {attribute}")
    build = points[matching[0]]
    if build is None:
        raise NotFound(f"{matching[0]} did not evaluate, so there is no build of it")
    return int(build)


async def _print(api: Api, build: str, address: str, out: Output) -> str:
    """Print the log while it comes; with --json, nothing is printed and the text is returned."""
    kept: list[str] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    terminal = sys.stdout.isatty()
    async with api.download(address) as log:
        if log.status == 404:
            raise NotFound(f"there is no build {build}, or it has no log")
        if log.status != 200:
            raise ServerUnreachable(f"the server answered with HTTP status {log.status}")
        size = 0
        async for piece in log:
            size += len(piece)
            text = decoder.decode(piece)
            if not out.json:
                sys.stdout.write(clean(text) if terminal else text)
                sys.stdout.flush()
            elif size <= MAX_KEPT:
                kept.append(text)
            else:
                raise Fault(f"the log is larger than {MAX_KEPT} bytes: read it without --json")
    return "".join(kept)
