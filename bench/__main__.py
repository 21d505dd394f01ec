"""`python -m bench [NAME] [--json]`: measure every metric whose name is or begins with NAME."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs

from bench import metrics
from bench.harness import Metric, Result, measure


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure Gradient against Nix.")
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="a metric, or its first words")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    chosen = [metric for metric in all_metrics() if _matches(metric.name, arguments.name)]
    if not chosen:
        known = ", ".join(metric.name for metric in all_metrics())
        parser.error(f"no metric is named {arguments.name!r}; there are {known}")
    for metric in chosen:
        with tempfile.TemporaryDirectory(prefix="gradient-bench-") as folder:
            _show(measure(metric, Path(folder)), as_json=arguments.json)
    return 0


def all_metrics() -> Iterator[Metric]:
    """The METRIC of every module of bench.metrics."""
    for module in pkgutil.iter_modules(metrics.__path__, f"{metrics.__name__}."):
        metric: Metric = importlib.import_module(module.name).METRIC
        yield metric


def _matches(name: str, asked: str) -> bool:
    return not asked or name == asked or name.startswith(f"{asked}.")


def _show(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(attrs.asdict(result)), flush=True)
        return
    ours, theirs = f"{result.value:9.3f} {result.unit}", f"{result.baseline_value:9.3f} {result.unit}"
    print(f"{result.metric:20} {ours}  baseline {theirs}  ratio {result.ratio:6.3f}", flush=True)
    print(f"{'':20} against: {result.baseline}", flush=True)


sys.exit(main())
