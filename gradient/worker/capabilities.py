"""What this machine can build: its systems, features, cores and memory. Layer: worker, IO at start only."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from gradient.settings.tables import Worker
from gradient.wire.messages import WorkerCapabilities

# The command was renamed in 2.20; neither name works everywhere.
_SHOW_CONFIG: Final = (("show-config",), ("config", "show"))
# It reads two files.
_CONFIG_LIMIT: Final = 20.0  # seconds
_SYSTEMS: Final = {"Linux": "linux", "Darwin": "darwin"}
_PROCESSORS: Final = {"arm64": "aarch64", "amd64": "x86_64", "AMD64": "x86_64"}
_MIB: Final = 2**20


@attrs.frozen
class Host:
    """What was found out about the machine. `systems` has the native one first."""

    systems: tuple[str, ...]
    features: tuple[str, ...]
    cores: int
    ram_mb: int


async def find_host(nix: Path) -> Host:
    """Ask Nix for its systems and features; where it does not tell, the machine's own system."""
    config = await _nix_config(nix)
    native = _text(config.get("system")) or native_system()
    extra = _words(config.get("extra-platforms"))
    return Host(
        systems=tuple(dict.fromkeys((native, *extra))),
        features=tuple(sorted(_words(config.get("system-features")))),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        ram_mb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MIB,
    )


def worker_capabilities(host: Host, settings: Worker, nix_version: str) -> WorkerCapabilities:
    """What the server is told."""
    return WorkerCapabilities(
        architectures=host.systems,
        system_features=host.features,
        max_concurrent_builds=settings.build.max_concurrent,
        max_concurrent_evals=settings.eval.max_concurrent,
        cpu_count=host.cores,
        ram_total_mb=host.ram_mb,
        zone=settings.zone,
        endpoint=settings.endpoint,
        nix_version=nix_version,
    )


def native_system() -> str:
    """The system of this machine in Nix's words: `x86_64-linux`."""
    machine, system = platform.machine(), platform.system()
    return f"{_PROCESSORS.get(machine, machine)}-{_SYSTEMS.get(system, system.lower())}"


async def _nix_config(nix: Path) -> dict[str, Any]:
    for command in _SHOW_CONFIG:
        argv = [nix, "--extra-experimental-features", "nix-command", *command, "--json"]
        with trio.move_on_after(_CONFIG_LIMIT):
            done = await trio.run_process(
                argv, capture_stdout=True, stderr=subprocess.DEVNULL, stdin=b"", check=False
            )
            if done.returncode == 0:
                return _settings(done.stdout)
    return {}


def _settings(output: bytes) -> dict[str, Any]:
    """Setting -> value, from `{"system": {"value": "x86_64-linux", ...}, ...}`."""
    try:
        found = json.loads(output)
    except ValueError:
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {name: entry.get("value") for name, entry in entries if isinstance(entry, Mapping)}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _words(value: object) -> list[str]:
    """A setting that is a list: newer Nix writes it as one, older as words."""
    if isinstance(value, str):
        return value.split()
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
