"""The requests of a Nix client, read from the daemon's side: how long each is and what it wants built.

Layer: rank 1, pure. For our proxy, which forwards bytes and needs only this much. Reading an
evaluation's client is the whole purpose: what such a client has no use for is not in `SHAPES`, and
what is not there is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import attrs

from gradient.nix.daemon.operations import Op
from gradient.nix.daemon.primitives import (
    Decoder,
    pairs,
    read_pairs,
    read_string,
    read_strings,
    read_u64,
    u64,
)

T = TypeVar("T")

_OPTION_NUMBERS: Final = 12
_MAX_BUILD_JOBS: Final = 4  # its index among them
# Settings by which a client could have the daemon build after all.
_BUILD_SETTINGS: Final = frozenset({"max-jobs", "build-max-jobs", "builders"})


@attrs.frozen
class Shape:
    """`read` consumes the arguments and returns the paths to be built; framed content may follow them."""

    read: Callable[[], Decoder[tuple[str, ...]]]
    has_content: bool = False


def recorded(decoder: Decoder[T]) -> Decoder[tuple[T, bytes]]:
    """What `decoder` returns, and the bytes it consumed."""
    consumed = bytearray()
    try:
        need = next(decoder)
        while True:
            piece = yield need
            consumed += piece
            need = decoder.send(piece)
    except StopIteration as stop:
        return stop.value, bytes(consumed)


def read_options_without_building() -> Decoder[bytes]:
    """The arguments of SetOptions, changed so that the daemon starts no build for this client."""
    numbers = []
    for _ in range(_OPTION_NUMBERS):
        numbers.append((yield from read_u64()))
    settings = yield from read_pairs()
    numbers[_MAX_BUILD_JOBS] = 0
    kept = [(name, value) for name, value in settings if name not in _BUILD_SETTINGS]
    return b"".join(map(u64, numbers)) + pairs([*kept, ("builders", "")])


def _sequence(*readers: Callable[[], Decoder[object]]) -> Callable[[], Decoder[tuple[str, ...]]]:
    def read() -> Decoder[tuple[str, ...]]:
        for reader in readers:
            yield from reader()
        return ()

    return read


def _read_derived_paths() -> Decoder[tuple[str, ...]]:
    """Arguments of BuildPaths and BuildPathsWithResults; the wanted outputs (`!out`) are left out."""
    derived_paths = yield from read_strings()
    yield from read_u64()  # mode
    return tuple(dict.fromkeys(path.partition("!")[0] for path in derived_paths))


def _read_path() -> Decoder[tuple[str, ...]]:
    return ((yield from read_string()),)


def _read_derivation() -> Decoder[tuple[str, ...]]:
    """Arguments of BuildDerivation, which carries the whole derivation."""
    drv_path = yield from read_string()
    for _ in range((yield from read_u64())):
        for _ in ("name", "path", "hash algorithm", "hash"):
            yield from read_string()
    yield from read_strings()  # input sources
    yield from read_string()  # platform
    yield from read_string()  # builder
    yield from read_strings()  # its arguments
    yield from read_pairs()  # environment
    yield from read_u64()  # mode
    return (drv_path,)


_number, _text, _texts = read_u64, read_string, read_strings
_path_info = (_text, _text, _text, _texts, _number, _number, _number, _texts, _text)

SHAPES: Final[Mapping[int, Shape]] = {
    Op.IS_VALID_PATH: Shape(_sequence(_text)),
    Op.QUERY_REFERRERS: Shape(_sequence(_text)),
    Op.ADD_TO_STORE: Shape(_sequence(_text, _text, _texts, _number), has_content=True),
    Op.BUILD_PATHS: Shape(_read_derived_paths),
    Op.ENSURE_PATH: Shape(_read_path),
    Op.ADD_TEMP_ROOT: Shape(_sequence(_text)),
    Op.ADD_INDIRECT_ROOT: Shape(_sequence(_text)),
    Op.SYNC_WITH_GC: Shape(_sequence()),
    Op.QUERY_DERIVATION_OUTPUTS: Shape(_sequence(_text)),
    Op.QUERY_ALL_VALID_PATHS: Shape(_sequence()),
    Op.QUERY_PATH_INFO: Shape(_sequence(_text)),
    Op.QUERY_DERIVATION_OUTPUT_NAMES: Shape(_sequence(_text)),
    Op.QUERY_PATH_FROM_HASH_PART: Shape(_sequence(_text)),
    Op.QUERY_SUBSTITUTABLE_PATH_INFO: Shape(_sequence(_text)),
    Op.QUERY_SUBSTITUTABLE_PATH_INFOS: Shape(_sequence(read_pairs)),
    Op.QUERY_VALID_PATHS: Shape(_sequence(_texts, _number)),
    Op.QUERY_SUBSTITUTABLE_PATHS: Shape(_sequence(_texts)),
    Op.QUERY_VALID_DERIVERS: Shape(_sequence(_text)),
    Op.BUILD_DERIVATION: Shape(_read_derivation),
    Op.NAR_FROM_PATH: Shape(_sequence(_text)),
    Op.ADD_TO_STORE_NAR: Shape(_sequence(*_path_info, _number, _number), has_content=True),
    Op.QUERY_MISSING: Shape(_sequence(_texts)),
    Op.QUERY_DERIVATION_OUTPUT_MAP: Shape(_sequence(_text)),
    Op.REGISTER_DRV_OUTPUT: Shape(_sequence(_text)),
    Op.QUERY_REALISATION: Shape(_sequence(_text)),
    Op.ADD_MULTIPLE_TO_STORE: Shape(_sequence(_number, _number), has_content=True),
    Op.BUILD_PATHS_WITH_RESULTS: Shape(_read_derived_paths),
}
