"""The base of everything this package refuses. Layer: rank 0.

Each format has its own subclass next to its parser. A message is one line that a person can act on:
what is wrong, where, and what would be right.
"""

from __future__ import annotations


class NixError(Exception):
    """Something that came from Nix, a user or a peer is not what it should be."""


def excerpt(text: str, limit: int = 80) -> str:
    """`text` quoted for a one-line message, cut to `limit` characters: what is refused may be hostile."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
