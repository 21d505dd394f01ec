"""Options that several commands share, and the settings and connections that they make."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import click

from gradient.cli.faults import BadEnvironment, BadUsage
from gradient.settings import Address, DataDir, Settings, load, program, read_secret, settings_file
from gradient.settings.tables import Server

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[F], F]

NEEDS_NIX: Final = "install Nix 2.8 or newer (Debian: apt-get install nix-bin), or name one with --nix PATH"


class AddressType(click.ParamType):  # type: ignore[type-arg]
    """HOST:PORT."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        """The address; refuses anything else in click's way."""
        try:
            return value if isinstance(value, Address) else Address.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _all(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    return lambda command: reduce(lambda function, option: option(function), reversed(options), command)


with_json: Final = click.option(
    "--json", is_flag=True, help="End stdout with one JSON object; everything else goes to stderr."
)
with_config: Final = click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="Settings (TOML)."
)
with_data_dir: Final = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Database, cache, keys and tokens. Default: ${XDG_STATE_HOME:-~/.local/state}/gradient.",
)
with_nix: Final = click.option(
    "--nix",
    metavar="PATH",
    help="The `nix` to use; builds then go through the nix-daemon beside it, never through a socket.",
)
with_listeners: Final = _all(
    click.option("--http", type=AddressType(), help="API, cache and pages. Default: 127.0.0.1:3000."),
    click.option("--proto", type=AddressType(), help="Where workers connect. Default: 127.0.0.1:3001."),
    click.option("--database-url", metavar="DSN", help="A PostgreSQL 15 or newer. Default: one of our own."),
)
with_server: Final = _all(
    click.option("--server", metavar="URL", help="The server. Default: the one that runs on this host."),
    click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Holds the API token. Default: the administrator's, on the server's host.",
    ),
)
# The variable is how scripts/run has another default.
with_flake: Final = click.argument(
    "flake", default=".", envvar="GRADIENT_FLAKE", metavar="[FLAKE[#ATTRIBUTES]]"
)


def make_settings(config: Path | None, **flags: object) -> Settings:
    """The settings in force; `flags` by attribute path with `__` for a dot (`server__data_dir`).

    Raises SettingsError.
    """
    named = {_spelled(name): value for name, value in flags.items()}
    return load(config or settings_file(os.environ), environ=os.environ, flags=named)


def _spelled(name: str) -> str:
    """`server__data_dir` as settings files spell it, `server.dataDir`."""
    return ".".join(
        head + "".join(map(str.capitalize, rest))
        for head, *rest in (part.split("_") for part in name.split("__"))
    )


def on_any_port(settings: Settings, *, http_given: bool, proto_given: bool) -> Settings:
    """The settings for a server of one run: listeners that nobody asked for take any free port."""
    server, default = settings.server, Server()
    if not http_given and server.http == default.http:
        server = attrs.evolve(server, http=Address(default.http.host, 0))
    if not proto_given and server.proto == default.proto:
        server = attrs.evolve(server, proto=Address(default.proto.host, 0))
    return attrs.evolve(settings, server=server)


def nix_binary(given: str | None) -> Path | None:
    """The `nix` that --nix names, by path or by a name on PATH; None when it was not given."""
    if given is None:
        return None
    found = shutil.which(os.path.expanduser(given))
    if found is None:
        raise BadEnvironment(f"--nix {given}: no program is there; {NEEDS_NIX}")
    return Path(found).absolute()


async def check_nix(nix: Path | None) -> None:
    """Find out before anything starts whether there is a Nix to work with.

    Raises BadEnvironment, NixMissing.
    """
    from gradient.nix.daemon.address import find_daemon

    if nix is None and shutil.which("nix") is None:
        raise BadEnvironment(f"there is no `nix` on PATH: {NEEDS_NIX}")
    await find_daemon(None if nix is None else str(nix))


@attrs.frozen
class Connection:
    """Where the server is and with which token to write; `token` None where there is none to be found.
    `here`: the data directory says that it runs there."""

    url: str
    token: str | None = attrs.field(repr=False)
    here: bool = False


def find_server(
    server: str | None, data_dir: Path | None, token_file: Path | None, config: Path | None
) -> Connection:
    """The server that was named, or the one that runs on this host. Blocking, short.

    The token found in the data directory goes to the server of that directory only. Raises BadEnvironment
    when there is no server, BadUsage for a token file that cannot be read, SettingsError.
    """
    data = DataDir(make_settings(config, server__data_dir=data_dir).server.data_dir)
    local = _local_url(data)
    url = (server or local or "").rstrip("/")
    if not url:
        raise BadEnvironment(
            f"no server runs on {data.root}: start one with `{program()} serve`,"
            " or name one with --server URL"
        )
    here = url == local
    if token_file is not None:
        return Connection(url, given_token(token_file), here)
    return Connection(url, _admin_token(data) if data_dir is not None or here else None, here)


def _local_url(data: DataDir) -> str | None:
    try:
        return data.http_url.read_text().strip()
    except OSError:
        return None


def given_token(file: Path) -> str:
    """The token in the file that was named. Blocking, short. Raises BadUsage, InsecureSecret."""
    try:
        return read_secret(file)
    except OSError as error:
        raise BadUsage(f"--token-file {file}: {error.strerror}") from error


def _admin_token(data: DataDir) -> str | None:
    """None where it is not ours to read: the server then says that a token is needed."""
    try:
        return read_secret(data.admin_token)
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return None
