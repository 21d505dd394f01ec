"""The `gradient` command: its group of commands, and usage errors as one line."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from gradient import __version__
from gradient.cli.build import build
from gradient.cli.faults import Exit, one_line
from gradient.cli.log import log
from gradient.cli.serve import serve
from gradient.cli.status import status
from gradient.cli.up import up
from gradient.cli.work import work
from gradient.settings import program


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradient", message="%(prog)s %(version)s")
def gradient() -> None:
    """A Nix CI: evaluates flakes, builds every derivation once, and serves the result as a binary cache."""


for _command in (up, build, serve, work, log, status):
    gradient.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✔ gets a ?, not a traceback
    try:
        gradient.main(args=arguments, prog_name=program(), standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(int(Exit.USAGE))
    except click.UsageError as error:
        called = error.ctx.command_path if error.ctx else program()
        name = f"gradient{called.removeprefix(program())}"
        print(f"{name}: {one_line(error.format_message())} (see {called} --help)", file=sys.stderr)
        sys.exit(int(Exit.USAGE))
    except click.Abort:
        sys.exit(int(Exit.INTERRUPTED))
    sys.exit(0)
