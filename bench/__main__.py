"""`python -m bench [NAME] [--json] [--graph FILE] [--scale]`: measure what NAME is or begins."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import pkgutil
import signal
import sys
import tempfile
from pathlib import Path

import attrs
import structlog

from bench import metrics
from bench.harness import Figure, Metric, Options, Result, measure, say


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure Gradient against Nix.")
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="a metric, or its first words")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--graph",
        type=Path,
        metavar="FILE",
        help="derivations as JSON, one a line; else they are made up",
    )
    parser.add_argument("--scale", action="store_true", help="also what needs a million derivations")
    arguments = parser.parse_args()
    chosen = {metric: what for metric, what in all_metrics().items() if _matches(metric.name, arguments.name)}
    if not chosen:
        known = ", ".join(metric.name for metric in all_metrics())
        parser.error(f"no metric is named {arguments.name!r}; there are {known}")
    # What the server's parts have to say is not for who reads the figures.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    # As an interrupt does, so that folders and the servers in them go.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = Options(arguments.graph, arguments.scale)
    kept = True
    for metric, what in chosen.items():
        if isinstance(metric, Figure) and metric.scale and not options.scale:
            continue
        say(what)
        with tempfile.TemporaryDirectory(prefix="gradient-bench-") as folder:
            result = _result(metric, Path(folder), options)
        _show(result, as_json=arguments.json)
        kept = kept and result.kept is not False
    return 0 if kept else 1


def all_metrics() -> dict[Metric | Figure, str]:
    """The METRIC of every module of bench.metrics, and the module's word for it."""
    found: dict[Metric | Figure, str] = {}
    for module in pkgutil.iter_modules(metrics.__path__, f"{metrics.__name__}."):
        imported = importlib.import_module(module.name)
        found[imported.METRIC] = (imported.__doc__ or "").partition("\n")[0]
    return found


def _result(metric: Metric | Figure, folder: Path, options: Options) -> Result:
    return metric.result(folder, options) if isinstance(metric, Figure) else measure(metric, folder)


def _matches(name: str, asked: str) -> bool:
    return not asked or name == asked or name.startswith(f"{asked}.")


def _show(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(attrs.asdict(result)), flush=True)
        return
    line = f"{result.metric:20} {result.value:9.3f} {result.unit}"
    if result.baseline_value is not None:
        line += f"  baseline {result.baseline_value:9.3f} {result.unit}  ratio {result.ratio:6.3f}"
    print(line, flush=True)
    if result.baseline is not None:
        print(f"{'':20} against: {result.baseline}", flush=True)
    if result.limit is not None:
        verdict = "kept" if result.kept else "NOT KEPT"
        print(
            f"{'':20} {result.limit}: {verdict}", *(f"{k}={v}" for k, v in result.details.items()), flush=True
        )


try:
    code = main()
except* KeyboardInterrupt:
    code = 128 + signal.SIGINT
sys.exit(code)
