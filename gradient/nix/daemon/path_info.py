"""What a store knows of one valid path. Layer: rank 1, pure."""

from __future__ import annotations

import attrs

from gradient.nix.daemon.primitives import (
    Decoder,
    read_bool,
    read_string,
    read_strings,
    read_u64,
    string,
    u64,
)
from gradient.nix.daemon.primitives import strings as encode_strings


@attrs.frozen
class PathInfo:
    """A valid store path. Paths are full; `nar_hash` is SHA-256 in base 16 without prefix; sizes in bytes.

    `deriver` and `ca` are None where unknown. `registered` is in seconds since the epoch. `ultimate`:
    built here, so trusted without a signature.
    """

    path: str
    nar_hash: str
    nar_size: int
    references: tuple[str, ...] = ()
    deriver: str | None = None
    signatures: tuple[str, ...] = ()
    ca: str | None = None
    registered: int = 0
    ultimate: bool = False


def encode(info: PathInfo) -> bytes:
    """`info` with its path first, as it stands before a NAR."""
    return b"".join(
        (
            string(info.path),
            string(info.deriver or ""),
            string(info.nar_hash),
            encode_strings(info.references),
            u64(info.registered),
            u64(info.nar_size),
            u64(info.ultimate),
            encode_strings(info.signatures),
            string(info.ca or ""),
        )
    )


def read_keyed() -> Decoder[PathInfo]:
    """A path info with its path first."""
    path = yield from read_string()
    return (yield from read_unkeyed(path))


def read_unkeyed(path: str) -> Decoder[PathInfo]:
    """The path info of `path`, which the wire does not repeat."""
    deriver = yield from read_string()
    nar_hash = yield from read_string()
    references = yield from read_strings()
    registered = yield from read_u64()
    nar_size = yield from read_u64()
    ultimate = yield from read_bool()
    signatures = yield from read_strings()
    ca = yield from read_string()
    return PathInfo(
        path=path,
        nar_hash=nar_hash,
        nar_size=nar_size,
        references=references,
        deriver=deriver or None,
        signatures=signatures,
        ca=ca or None,
        registered=registered,
        ultimate=ultimate,
    )
