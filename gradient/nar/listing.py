"""The listing of a NAR, as `.ls` files of binary caches have it. Layer: nar, pure.

Source: NixOS/nix, `nix store ls --json` and the `.ls` files of `write-nar-listing` caches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from gradient.nar.reader import DirectoryBegins, DirectoryEnds, Event, FileBegins, SymlinkFound, parse

Listing: TypeAlias = dict[str, Any]


def list_tree(chunks: Iterable[bytes], nar_size: int | None = None) -> Listing:
    """The JSON value of a `.ls` file: types, sizes, targets, and where each file's content starts.

    Raises InvalidNar. Bytes of a name that are no UTF-8 become lone surrogates."""
    top: Listing = {}
    open_entries = [top]
    for event in parse(chunks, nar_size):
        if isinstance(event, DirectoryEnds):
            open_entries.pop()
        elif (entry := _entry(event)) is not None:
            name, value = entry
            open_entries[-1][name] = value
            if isinstance(event, DirectoryBegins):
                open_entries.append(value["entries"])
    return {"version": 1, "root": top[""]}


def _entry(event: Event) -> tuple[str, Listing] | None:
    match event:
        case DirectoryBegins(name=name):
            return _text(name), {"type": "directory", "entries": {}}
        case SymlinkFound(name=name, target=target):
            return _text(name), {"type": "symlink", "target": _text(target)}
        case FileBegins(name=name):
            executable = {"executable": True} if event.executable else {}
            content = {"size": event.size, "narOffset": event.offset}
            return _text(name), {"type": "regular", **executable, **content}
    return None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
