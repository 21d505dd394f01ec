"""Requests and their replies, one function an operation: what to send and how to read the answer.

Layer: rank 1, pure. `connection.py` sends them. Numbers are the protocol's; forms are those of 1.34
to 1.38 without features. Paths are full store paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum, StrEnum
from typing import Generic, TypeVar

import attrs

from gradient.nix.daemon import options as daemon_options
from gradient.nix.daemon import path_info
from gradient.nix.daemon.build_result import BuildResult, read_results
from gradient.nix.daemon.errors import DaemonProtocolError
from gradient.nix.daemon.options import DaemonOptions
from gradient.nix.daemon.path_info import PathInfo
from gradient.nix.daemon.primitives import (
    Decoder,
    read_bool,
    read_pairs,
    read_strings,
    read_u64,
    string,
    strings,
    u64,
)

T = TypeVar("T")


class Op(IntEnum):
    """Operation numbers of the protocol that we send, or forward as a proxy."""

    IS_VALID_PATH = 1
    QUERY_REFERRERS = 6
    ADD_TO_STORE = 7
    ADD_TEXT_TO_STORE = 8
    BUILD_PATHS = 9
    ENSURE_PATH = 10
    ADD_TEMP_ROOT = 11
    ADD_INDIRECT_ROOT = 12
    SYNC_WITH_GC = 13
    SET_OPTIONS = 19
    COLLECT_GARBAGE = 20
    QUERY_SUBSTITUTABLE_PATH_INFO = 21
    QUERY_DERIVATION_OUTPUTS = 22
    QUERY_ALL_VALID_PATHS = 23
    QUERY_PATH_INFO = 26
    QUERY_DERIVATION_OUTPUT_NAMES = 28
    QUERY_PATH_FROM_HASH_PART = 29
    QUERY_SUBSTITUTABLE_PATH_INFOS = 30
    QUERY_VALID_PATHS = 31
    QUERY_SUBSTITUTABLE_PATHS = 32
    QUERY_VALID_DERIVERS = 33
    BUILD_DERIVATION = 36
    ADD_SIGNATURES = 37
    NAR_FROM_PATH = 38
    ADD_TO_STORE_NAR = 39
    QUERY_MISSING = 40
    QUERY_DERIVATION_OUTPUT_MAP = 41
    REGISTER_DRV_OUTPUT = 42
    QUERY_REALISATION = 43
    ADD_MULTIPLE_TO_STORE = 44
    ADD_BUILD_LOG = 45
    BUILD_PATHS_WITH_RESULTS = 46


class AddMethod(StrEnum):
    """How AddToStore names content: by the hash of its NAR, of its bytes, or as text (`.drv` files)."""

    RECURSIVE = "fixed:r:sha256"
    FLAT = "fixed:sha256"
    TEXT = "text:sha256"


class BuildMode(IntEnum):
    """Build what is missing, repair broken outputs, or build again and compare."""

    NORMAL = 0
    REPAIR = 1
    CHECK = 2


@attrs.frozen
class Garbage:
    """What CollectGarbage deleted: full paths, and bytes freed."""

    paths: tuple[str, ...]
    bytes_freed: int


@attrs.frozen
class Operation(Generic[T]):
    """One operation: the bytes of its request (without framed content) and the decoder of its result."""

    op: Op
    arguments: bytes
    read_result: Callable[[], Decoder[T]]

    @property
    def request(self) -> bytes:
        """What goes on the wire."""
        return u64(self.op) + self.arguments


def set_options(options: DaemonOptions) -> Operation[None]:
    """Change the settings of this connection."""
    return Operation(Op.SET_OPTIONS, daemon_options.encode(options), _nothing)


def is_valid_path(path: str) -> Operation[bool]:
    """Whether `path` is registered in the store."""
    return Operation(Op.IS_VALID_PATH, string(path), read_bool)


def query_valid_paths(paths: Iterable[str]) -> Operation[frozenset[str]]:
    """Those of `paths` that are valid; nothing is substituted."""
    return Operation(Op.QUERY_VALID_PATHS, strings(paths) + u64(0), _path_set)


def query_path_info(path: str) -> Operation[PathInfo | None]:
    """What the store knows of `path`, None when it is not valid."""

    def read() -> Decoder[PathInfo | None]:
        found = yield from read_bool()
        return (yield from path_info.read_unkeyed(path)) if found else None

    return Operation(Op.QUERY_PATH_INFO, string(path), read)


def query_derivation_output_map(drv_path: str) -> Operation[dict[str, str | None]]:
    """Output name to path; None for an output whose path is not known before it is built."""

    def read() -> Decoder[dict[str, str | None]]:
        return {name: path or None for name, path in (yield from read_pairs())}

    return Operation(Op.QUERY_DERIVATION_OUTPUT_MAP, string(drv_path), read)


def add_temp_root(path: str) -> Operation[None]:
    """Keep `path` from garbage collection while this connection lives."""
    return Operation(Op.ADD_TEMP_ROOT, string(path), _one)


def add_indirect_root(link: str) -> Operation[None]:
    """Register the symlink `link` (absolute file name) as a garbage collection root."""
    return Operation(Op.ADD_INDIRECT_ROOT, string(link), _one)


def add_to_store(
    name: str, method: AddMethod, references: Iterable[str], *, repair: bool
) -> Operation[PathInfo]:
    """Add content-addressed content (framed after the request): a NAR for RECURSIVE, else plain bytes."""
    arguments = string(name) + string(method.value) + strings(sorted(references)) + u64(repair)
    return Operation(Op.ADD_TO_STORE, arguments, path_info.read_keyed)


def add_to_store_nar(info: PathInfo, *, repair: bool, dont_check_sigs: bool) -> Operation[None]:
    """Register `info` with its NAR (framed after the request)."""
    arguments = path_info.encode(info) + u64(repair) + u64(dont_check_sigs)
    return Operation(Op.ADD_TO_STORE_NAR, arguments, _nothing)


def add_multiple_to_store(*, repair: bool, dont_check_sigs: bool) -> Operation[None]:
    """Register many paths; framed after the request: count, then info and NAR of each."""
    return Operation(Op.ADD_MULTIPLE_TO_STORE, u64(repair) + u64(dont_check_sigs), _nothing)


def nar_from_path(path: str) -> Operation[None]:
    """Ask for the NAR of `path`, which follows the reply."""
    return Operation(Op.NAR_FROM_PATH, string(path), _nothing)


def build_paths_with_results(
    derived_paths: Sequence[str], mode: BuildMode, minor: int
) -> Operation[tuple[BuildResult, ...]]:
    """Make `derived_paths` valid."""
    arguments = strings(derived_paths) + u64(mode)
    return Operation(Op.BUILD_PATHS_WITH_RESULTS, arguments, lambda: read_results(minor))


def add_build_log(drv_path: str) -> Operation[None]:
    """Store the build log of `drv_path` (framed after the request)."""
    base_name = drv_path.rpartition("/")[2]  # the one operation that wants no full path
    return Operation(Op.ADD_BUILD_LOG, string(base_name), _one)


def delete_dead_paths(max_freed: int) -> Operation[Garbage]:
    """Delete what no root reaches, until `max_freed` bytes are freed."""
    delete_dead, ignore_liveness, obsolete = 2, 0, 0

    def read() -> Decoder[Garbage]:
        paths = yield from read_strings()
        freed = yield from read_u64()
        yield from read_u64()  # obsolete
        return Garbage(paths, freed)

    numbers = (ignore_liveness, max_freed, obsolete, obsolete, obsolete)
    arguments = u64(delete_dead) + strings(()) + b"".join(map(u64, numbers))
    return Operation(Op.COLLECT_GARBAGE, arguments, read)


def _nothing() -> Decoder[None]:
    yield from ()


def _one() -> Decoder[None]:
    if (yield from read_u64()) != 1:
        raise DaemonProtocolError("the daemon answered something else than 1 to a request that has no result")


def _path_set() -> Decoder[frozenset[str]]:
    return frozenset((yield from read_strings()))
