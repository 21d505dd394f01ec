"""Bytes that do not compress, and are the same in every run."""

from __future__ import annotations

import random


def noise(size: int, seed: int = 0) -> bytes:
    """`size` bytes; another `seed` gives others."""
    return random.Random(seed).randbytes(size)
