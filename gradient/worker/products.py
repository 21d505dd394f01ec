"""`nix-support/hydra-build-products` of an output: what a build offers for download. Layer: worker.

A builder wrote the file: lines that are no products are passed over, and a path must stay within the
outputs of this build, symlinks included. Blocking IO: call from a worker thread.
Source: Hydra's manual, "Build products": `type subtype path [default page]`, the path maybe quoted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from gradient.model import BuildProduct

# A page of links, not a database.
MAX_FILE: Final = 256 * 2**10  # bytes
MAX_PRODUCTS: Final = 256

_LINE: Final = re.compile(r'\s*(\S+)\s+(\S+)\s+("[^"]*"|\S+)')


def read_products(output: str, outputs: Collection[str]) -> tuple[BuildProduct, ...]:
    """The products that `output` names below any of `outputs`, which are full store paths."""
    products: list[BuildProduct] = []
    for line in _lines(Path(output, "nix-support", "hydra-build-products")):
        if (match := _LINE.match(line)) and len(products) < MAX_PRODUCTS:
            product = _product(match[1], match[2], match[3].strip('"'), outputs)
            products += [product] if product is not None else []
    return tuple(products)


def _lines(file: Path) -> list[str]:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    with open(descriptor, "rb") as opened:
        try:
            return opened.read(MAX_FILE).decode("utf-8", "replace").splitlines()
        except OSError:  # a folder of that name
            return []


def _product(file_type: str, subtype: str, path: str, outputs: Collection[str]) -> BuildProduct | None:
    if not _is_within(path, outputs):
        return None
    try:
        real = os.path.realpath(path, strict=True)
        size = None if os.path.isdir(real) else os.stat(real).st_size
    except OSError:
        return None
    if not _is_within(real, outputs):
        return None
    return BuildProduct(file_type, subtype, os.path.basename(path.rstrip("/")), path, size)


def _is_within(path: str, outputs: Collection[str]) -> bool:
    normal = os.path.normpath(path)
    return any(normal == output or normal.startswith(f"{output}/") for output in outputs)
