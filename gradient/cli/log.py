"""`gradient log`: the log of a build, named by its number, its derivation (path or name), or an attribute."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs
import click

from gradient.cli import options
from gradient.cli.faults import BadUsage, Fault, NotFound, ServerUnreachable
from gradient.cli.output import Output
from gradient.cli.run import interruptible, log_to_stderr, run
from gradient.cli.text import clean
from gradient.model import BuildStatus
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
    """Print a build's log.

    BUILD is its number or its .drv path, or, of the last evaluation, an attribute or a derivation's name.
    """
    out = Output("log", json)
    log_to_stderr("warning")

    async def command() -> int:
        from gradient.cli.api import Api
        from gradient.http.client import HttpClient

        connection = options.find_server(server, data_dir, token_file, config)
        async with HttpClient() as client:
            api = Api(client, connection)
            wanted = await _find(api, build)
            kept = await _print(api, wanted, follow, out)
        out.object({"build": build, "log": kept})
        return 0

    run(out, interruptible(command))


@attrs.frozen
class Wanted:
    """What the user named, in the user's word for it: a build, or a derivation (`build` is None)."""

    name: str
    address: str
    build: int | None = None


async def _find(api: Api, build: str) -> Wanted:
    """Where its log is."""
    if build.startswith(STORE_DIR):
        try:
            path = StorePath.parse(build)
        except NixError as error:
            raise BadUsage(str(error)) from error
        return Wanted(build, f"{await api.cache()}/log/{path.base_name}")
    number = int(build) if _is_number(build) else await _build_of_last_evaluation(api, build)
    return Wanted(build, f"/api/v1/builds/{number}/log", number)


async def _why_none(api: Api, wanted: Wanted) -> str:
    if wanted.build is None:
        return f"the cache has no log of {wanted.name}"
    return why_no_log(await api.build(wanted.build))


def why_no_log(build: dict[str, Any]) -> str:
    """Why a build has no log, from the server's answer about it. Pure."""
    what = f"{clean(build['name'])} (build {build['build']})"
    match build["status"]:
        case BuildStatus.COMPLETED.label:
            return f"{what} wrote no log"
        case BuildStatus.SUBSTITUTED.label:
            return f"{what} was not built here: its outputs were there already, or came from another cache"
        case BuildStatus.DEPENDENCY_FAILED.label:
            return f"{what} was not built: {clean(build['reason'] or 'a dependency failed')}"
        case _:
            return f"{what} has no log{': it ' + clean(build['reason']) if build['reason'] else ''}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


async def _build_of_last_evaluation(api: Api, name: str) -> int:
    newest = await api.evaluations(1)
    if not newest:
        raise NotFound(f"there is no build {name}: the server has no evaluation yet")
    evaluation = await api.evaluation(newest[0]["evaluation"])
    return pick_build(evaluation, name)


def pick_build(evaluation: dict[str, Any], name: str) -> int:
    """The build of an attribute, given whole or by its end (`hello` for `packages.x86_64-linux.hello`), or
    else of a derivation with this name.

    Pure. Raises NotFound, BadUsage when several are meant."""
    attribute = _pick_attribute(evaluation, name)
    if attribute is not None:
        return attribute
    named = {build["build"]: build["drv_path"] for build in evaluation["builds"] if build["name"] == name}
    if not named:
        raise NotFound(
            f"evaluation {evaluation['evaluation']} has no attribute {name}, and no build of that name"
        )
    if len(named) > 1:
        raise BadUsage(f"{name} can be {' or '.join(sorted(named.values())[:5])}: give its path")
    return int(next(iter(named)))


def _pick_attribute(evaluation: dict[str, Any], attribute: str) -> int | None:
    points = {point["attr"]: point["build"] for point in evaluation["entry_points"]}
    matching = [attribute] if attribute in points else [a for a in points if a.endswith(f".{attribute}")]
    if len(matching) > 1:
        raise BadUsage(f"{attribute} can be {' or '.join(sorted(matching)[:5])}: give the whole attribute")
    if not matching:
        return None
    build = points[matching[0]]
    if build is None:
        raise NotFound(f"{matching[0]} did not evaluate, so there is no build of it")
    return int(build)


async def _print(api: Api, wanted: Wanted, follow: bool, out: Output) -> str:
    """Print the log while it comes; with --json, nothing is printed and the text is returned."""
    kept: list[str] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    terminal = sys.stdout.isatty()
    # The cache has only logs that are complete: nothing to follow.
    query = "?follow=1" if follow and wanted.build is not None else ""
    async with api.download(wanted.address + query) as log:
        if log.status == 404:
            raise NotFound(await _why_none(api, wanted))
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
