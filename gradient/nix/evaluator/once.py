"""One evaluation by a process of its own, for its error text. Layer: rank 1: a process and a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from gradient.nix.evaluator.messages import tidy
from gradient.nix.evaluator.transcript import MAX_DIAGNOSTICS, without_colour

# What failed in a child fails again as fast; nobody waits for long.
TIME_LIMIT: Final = 60.0  # seconds
# Of address space. Nobody watches this process's memory.
MEMORY_LIMIT: Final = 2**32  # bytes
# From SIGKILL to the end of the process.
REAP_LIMIT: Final = 5.0  # seconds

# The end of what it says, where the error is.
_SCRIPT: Final = f'ulimit -v {MEMORY_LIMIT // 2**10}; "$@" 2>&1 >/dev/null | tail -c {MAX_DIAGNOSTICS}'


async def error_of(argv: Sequence[str], environment: dict[str, str], folder: Path) -> str:
    """Run a command that is expected to fail and return its error, "" when it gives none within TIME_LIMIT.

    Cancelled or not, nothing of it is left running."""
    process = await trio.lowlevel.open_process(
        ("/bin/sh", "-c", _SCRIPT, "sh", *argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = b""
    try:
        with trio.move_on_after(TIME_LIMIT):
            said = b"".join([piece async for piece in process.stdout])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with trio.move_on_after(REAP_LIMIT, shield=True):
            await process.wait()
            await process.stdout.aclose()
    text = without_colour(said).decode("utf-8", "replace")
    return tidy(text[text.find("error:") :]) if "error:" in text else ""
