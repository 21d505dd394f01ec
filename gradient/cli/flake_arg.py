"""`FLAKE[#WILDCARD]` of the command line: what is evaluated, and who fetches it.

A local path is packed and uploaded by this process, because a worker elsewhere cannot see it. Everything
else, `git+file://` included, is for the worker to fetch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import attrs

from gradient.cli.faults import BadFlake
from gradient.nix.errors import NixError
from gradient.nix.flake_ref import FlakeKind, FlakeRef
from gradient.nix.flake_url import IndirectFlakeRef, parse_flake
from gradient.nix.wildcard import parse_wildcards


@attrs.frozen
class Local:
    """A flake on this machine. `whole_folder`: exactly this folder (`path:`), repository or not."""

    path: Path
    whole_folder: bool = False
    dir: str = ""


@attrs.frozen
class Remote:
    """A flake that the worker fetches, as a canonical URL."""

    url: str


Where: TypeAlias = Local | Remote


@attrs.frozen
class FlakeArg:
    """What is evaluated. `wildcards` empty: the packages and checks of the workers' systems."""

    where: Where
    wildcards: tuple[str, ...] = ()


def parse_flake_arg(text: str) -> FlakeArg:
    """Read the argument; looks at the file system only to tell a bare name from a folder.

    Raises BadFlake.
    """
    try:
        flake, fragment = _parse(text)
        if fragment:
            parse_wildcards([fragment])
    except NixError as error:
        raise BadFlake(str(error)) from error
    return FlakeArg(_where(flake), (fragment,) if fragment else ())


def _parse(text: str) -> tuple[FlakeRef, str]:
    try:
        return parse_flake(text)
    except IndirectFlakeRef as error:
        if not Path(error.path).is_dir():
            raise
        return parse_flake(f"./{text}")


def _where(flake: FlakeRef) -> Where:
    if flake.kind not in (FlakeKind.FOLDER, FlakeKind.PATH):
        return Remote(str(flake))
    if flake != FlakeRef(flake.kind, flake.location, dir=flake.dir):
        raise BadFlake(
            f"{flake}: a local path is taken as it is now: write git+file://{Path(flake.location).absolute()}"
            " with ?ref= or ?rev= for another state of it"
        )
    path = Path(flake.location).expanduser()
    if flake.kind is FlakeKind.PATH:
        return Local(path, whole_folder=True, dir=flake.dir)
    return Local(path / flake.dir)
