"""Flakes in a child: opening one, and fetching locked inputs. Layer: rank 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from gradient.nix.attr_path import AttrPath, render_attr_path
from gradient.nix.evaluator import expressions
from gradient.nix.evaluator.child import Child
from gradient.nix.evaluator.errors import EvaluationFailed, EvaluatorError

# Longer than any URL that git or an HTTP server takes; a line of it still fits the child's pipe.
MAX_URL: Final = 6 * 2**10  # bytes


class FlakeUnusable(EvaluatorError):
    """There is no flake at this address, or its `flake.nix` does not evaluate; the message is Nix's."""


class NoSuchAttribute(EvaluatorError):
    """The flake has none of the attributes that could have been meant."""


@attrs.frozen
class FetchedTree:
    """A fetched source as flake evaluation sees it. `nar_hash` is SRI, `last_modified` epoch seconds."""

    path: str
    nar_hash: str | None
    rev: str | None
    last_modified: int | None
    rev_count: int | None


async def open_flake(child: Child) -> FetchedTree:
    """Fetch and read the flake this child was lent for; its outputs stay unevaluated.

    A second call only repeats what is known. Raises FlakeUnusable, ChildDied."""
    assert child.flake is not None
    if len(child.flake.url) > MAX_URL:
        raise FlakeUnusable(f"the flake reference is longer than {MAX_URL // 2**10} KiB")
    if not child.opened:
        await child.define(expressions.flake_definitions(child.flake))
        child.opened = True
    try:
        return _tree((await child.ask(expressions.FLAKE_INFO)).value)
    except EvaluationFailed as error:
        raise FlakeUnusable(str(error)) from error


async def first_existing(child: Child, candidates: Sequence[AttrPath]) -> AttrPath:
    """The first of `candidates` (as `gradient.nix.attr_path.candidate_paths` lists them) that the opened
    flake has.

    Raises NoSuchAttribute; EvaluationFailed when what leads to one does not evaluate; ChildDied."""
    for path in candidates:
        if (await child.ask(expressions.exists(path))).value is True:
            return path
    names = " nor ".join(map(render_attr_path, candidates))
    raise NoSuchAttribute(f"the flake has {'neither' if len(candidates) > 1 else 'no'} {names}")


async def fetch_tree(child: Child, locked: Mapping[str, str | int | bool]) -> FetchedTree:
    """Fetch one locked input (the `locked` attributes of a lock file's node) into the store.

    Lend the child with Role.FETCH. Raises EvaluationFailed with Nix's words, ChildDied."""
    return _tree((await child.ask(expressions.fetch_tree(dict(locked)))).value)


def _tree(value: object) -> FetchedTree:
    fields = value if isinstance(value, dict) else {}
    return FetchedTree(
        path=_text(fields.get("path")) or "",
        nar_hash=_text(fields.get("narHash")),
        rev=_text(fields.get("rev")),
        last_modified=_number(fields.get("lastModified")),
        rev_count=_number(fields.get("revCount")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
