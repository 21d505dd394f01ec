"""`.drv` files: the ATerm text as a `Derivation` value, and back byte for byte. Layer: rank 0, pure.

An evaluation reads thousands of them, so nothing here goes over characters: with the escapes
undone, every quote is a delimiter, and one split takes the file apart into strings and punctuation.
One expression then checks the punctuation alone. Store paths are checked on the way: a path in a
`Derivation` is always valid.

Sources: NixOS/nix, doc/manual/source/protocols/derivation-aterm.md; src/libstore/derivations.cc.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, TypeVar

import attrs

from gradient.nix.errors import NixError, excerpt
from gradient.nix.store_path import PATH_PATTERN, STORE_DIR, InvalidStorePath, check_name

# A derivation carries its whole environment; real ones reach a few MiB. More is not read.
MAX_SIZE: Final = 64 * 2**20  # bytes
# The suffix of the store path's name.
EXTENSION: Final = ".drv"


def drv_path(hash_part: str, name: str) -> str:
    """The store path of a derivation's file; its name is without `.drv`."""
    return f"{STORE_DIR}/{hash_part}-{name}{EXTENSION}"


class InvalidDerivation(NixError):
    """The bytes are no derivation that we read."""


@attrs.frozen
class Output:
    """One output as the file has it.

    `path` is "" while unknown (floating content-addressed, or behind one). `hash_algo` is `sha256` or
    `r:sha256` for a content-addressed output, and `hash` its base16 digest when it is fixed.
    """

    name: str
    path: str
    hash_algo: str = ""
    hash: str = ""


@attrs.frozen
class Derivation:
    """A `.drv` file. `name` has no `.drv`; paths are full store paths; `outputs` keep the file's order.

    Strings are UTF-8 with surrogate escapes: any byte survives the round trip.
    """

    name: str
    outputs: tuple[Output, ...]
    input_drvs: Mapping[str, tuple[str, ...]]  # .drv path -> names of the outputs it uses
    input_srcs: tuple[str, ...]
    system: str
    builder: str
    args: tuple[str, ...]
    env: Mapping[str, str]  # structured attributes are the JSON text in `__json`

    @property
    def is_fixed_output(self) -> bool:
        """Whether the content is known before the build, so that it may use the network."""
        if len(self.outputs) != 1:
            return False
        return self.outputs[0].name == "out" and self.outputs[0].hash not in {"", "impure"}

    @property
    def has_known_outputs(self) -> bool:
        """Whether every output path is known before the build."""
        return all(output.path for output in self.outputs)


# --- reading --------------------------------------------------------------------------------------


def _list_of(item: str) -> str:
    """The punctuation of a list of `item`, its inside captured."""
    return rf"\[((?:{item}(?:,{item})*)?)\]"


# Punctuation, with a bare quote for each string: Derive([(",",",")],[(",["])],["],",",["],[(",")]).
# Every choice is decided by the next character, so a mismatch costs linear time.
_NAMES: Final = r'(?:"(?:,")*)?'
_INPUT: Final = re.compile(rf'\(",\[({_NAMES})\]\)')
_PARTS: Final = (
    _list_of(r'\(",",","\)'),  # outputs: name, path, hash algorithm, hash
    _list_of(rf'\(",\[{_NAMES}\]\)'),  # input derivations: path, names of outputs
    _list_of('"'),  # input sources
    '"',  # system
    '"',  # builder
    _list_of('"'),  # arguments
    _list_of(r'\(","\)'),  # environment: name, value
)
_GRAMMAR: Final = re.compile(rf"Derive\({','.join(_PARTS)}\)")
_PATH: Final = re.compile(PATH_PATTERN)
_OUTPUT_NAME: Final = re.compile(r"[0-9a-zA-Z+._?=-]+")

# Stand in for what an escape means, until the text is split. UTF-8 never decodes to a lone high surrogate.
_BACKSLASH: Final = "\ud800"
_QUOTE: Final = "\ud801"

T = TypeVar("T")


def parse_derivation(data: bytes, name: str) -> Derivation:
    """Read the bytes of a `.drv` file; `name` is its store path's name, with or without `.drv`.

    Raises InvalidDerivation, also for the `DrvWithVersion` form of dynamic derivations.
    """
    name = _checked_name(name)
    try:
        return _parse(data, name)
    except _Fault as fault:
        raise InvalidDerivation(f"{name} is no derivation that can be read: {fault}") from None


class _Fault(Exception):
    """What is wrong with the text; parse_derivation says with which."""


def _parse(data: bytes, name: str) -> Derivation:
    if len(data) > MAX_SIZE:
        raise _Fault(f"it has {len(data)} bytes, more than {MAX_SIZE}")
    if data.startswith(b"DrvWithVersion("):
        raise _Fault("dynamic derivations (DrvWithVersion) are not supported")
    strings, (outputs, inputs, sources, arguments, environment) = _take_apart(data)
    return Derivation(  # the arguments take their strings in the order of the file
        name=name,
        outputs=tuple(_output(*strings(4)) for _ in range(outputs.count('"') // 4)),
        input_drvs=_unique(
            [
                (_path(*strings(1)), _output_names(strings(names.count('"'))))
                for names in _INPUT.findall(inputs)
            ],
            "input derivation",
        ),
        input_srcs=tuple(map(_path, strings(sources.count('"')))),
        system=strings(1)[0],
        builder=strings(1)[0],
        args=tuple(strings(arguments.count('"'))),
        env=_environment(strings(environment.count('"'))),
    )


def _take_apart(data: bytes) -> tuple[Callable[[int], list[str]], Sequence[str]]:
    """A function that gives the next so many strings, and the punctuation of each list."""
    parts = _undo_escapes(data.decode("utf-8", "surrogateescape")).split('"')
    punctuation = _GRAMMAR.fullmatch('"'.join(parts[::2]))
    if punctuation is None or len(parts) % 2 == 0:
        raise _Fault("it is not of the form Derive([outputs],[inputs],[sources],system,builder,[args],[env])")
    strings = parts[1::2]
    if any(_QUOTE in part for part in strings):
        strings = [part.replace(_QUOTE, '"') for part in strings]
    following = iter(strings)
    return lambda count: list(islice(following, count)), punctuation.groups()


def _undo_escapes(text: str) -> str:
    """`text` with its escapes undone, but for the escaped quotes: they stay apart from the delimiters."""
    if "\\" not in text:
        return text
    text = text.replace("\\\\", _BACKSLASH).replace('\\"', _QUOTE)
    text = text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")
    if "\\" in text:
        raise _Fault("it has an escape that Nix does not write")
    return text.replace(_BACKSLASH, "\\")


def _output(name: str, path: str, hash_algo: str, digest: str) -> Output:
    return Output(_output_name(name), path and _path(path), hash_algo, digest)


def _output_names(names: list[str]) -> tuple[str, ...]:
    return tuple(map(_output_name, names))


def _output_name(name: str) -> str:
    if _OUTPUT_NAME.fullmatch(name) is None:
        raise _Fault(f"{excerpt(name)} is no name of an output")
    return name


def _path(text: str) -> str:
    if _PATH.fullmatch(text) is None:
        raise _Fault(f"{excerpt(text)} is no store path")
    return text


def _environment(strings: list[str]) -> dict[str, str]:
    return _unique(list(zip(strings[::2], strings[1::2], strict=True)), "variable")


def _unique(pairs: list[tuple[str, T]], what: str) -> dict[str, T]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Fault(f"the same {what} stands there twice")
    return found


def _checked_name(name: str) -> str:
    try:
        return check_name(name.removesuffix(EXTENSION))
    except InvalidStorePath as error:
        raise InvalidDerivation(str(error)) from error


# --- writing --------------------------------------------------------------------------------------

_ESCAPES: Final = str.maketrans({'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def write_derivation(derivation: Derivation) -> bytes:
    """The bytes of the `.drv` file, as Nix writes them: lists that are sets come out sorted by bytes."""
    outputs = [
        f'("{output.name}","{output.path}",{_quote(output.hash_algo)},{_quote(output.hash)})'
        for output in sorted(derivation.outputs, key=lambda output: output.name)
    ]
    inputs = [
        f'("{path}",{_list(map(_quote, sorted(names)))})'
        for path, names in sorted(derivation.input_drvs.items())
    ]
    environment = [
        f"({_quote(key)},{_quote(value)})"
        for key, value in sorted(derivation.env.items(), key=lambda item: _encode(item[0]))
    ]
    parts = [
        _list(outputs),
        _list(inputs),
        _list(map(_quote, sorted(derivation.input_srcs))),
        _quote(derivation.system),
        _quote(derivation.builder),
        _list(map(_quote, derivation.args)),
        _list(environment),
    ]
    return _encode(f"Derive({','.join(parts)})")


def _list(items: Iterable[str]) -> str:
    return f"[{','.join(items)}]"


def _quote(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
