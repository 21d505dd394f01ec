"""Which attribute a short name means: `hello` is `packages.<system>.hello` to `nix build`, and to us.

Layer: worker. Needs the flake open, because the first of the candidates that exists is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from gradient.nix.attr_path import AttrPath, candidate_paths, render_attr_path
from gradient.nix.evaluator.child import Child
from gradient.nix.evaluator.errors import ChildDied, EvaluationFailed
from gradient.nix.evaluator.findings import FlakeAddress
from gradient.nix.evaluator.flake import NoSuchAttribute, first_existing, open_flake
from gradient.nix.evaluator.pool import EvaluatorPool
from gradient.nix.wildcard import ROOTS, plain_path


async def whole_names(
    pool: EvaluatorPool, flake: FlakeAddress, targets: Sequence[str], systems: Sequence[str]
) -> tuple[str, ...]:
    """`targets` with short names spelled out; wildcards, whole names and unknown ones stay as they are.

    Asks a child that discovery then finds warm, and none when there is nothing to ask. Raises
    FlakeUnusable, EvaluatorUnusable."""
    if not any(map(_short, targets)):
        return tuple(targets)
    async with pool.lend(flake) as child:
        try:
            await open_flake(child)
            return tuple([await _whole(child, target, systems) for target in targets])
        except ChildDied:
            return tuple(targets)  # discovery tries again, with another child


def _short(target: str) -> AttrPath | None:
    path = plain_path(target)
    return path if path is not None and path[0] not in ROOTS else None


async def _whole(child: Child, target: str, systems: Sequence[str]) -> str:
    path = _short(target)
    if path is None:
        return target
    candidates = candidate_paths(path, systems)
    try:
        return render_attr_path(await first_existing(child, candidates))
    except NoSuchAttribute:
        return render_attr_path(await _meant(child, candidates, path))
    except EvaluationFailed:
        return target  # discovery says what is wrong with it


async def _meant(child: Child, candidates: Sequence[AttrPath], path: AttrPath) -> AttrPath:
    """Where a name that is nowhere was looked for first: discovery says what there is instead."""
    for candidate in candidates[:-1]:
        with suppress(NoSuchAttribute, EvaluationFailed):
            await first_existing(child, [candidate[: -len(path)]])
            return candidate
    return path
