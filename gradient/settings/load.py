"""Settings from a TOML file, the environment and flags, each overriding the one before.

    file         [build] maxAttempts = 5
    environment  GRADIENT_BUILD__MAX_ATTEMPTS=5
    flag         build.maxAttempts, as the command line hands it over

A nested table adds a level: `[worker.eval] maxRss`, `GRADIENT_WORKER__EVAL__MAX_RSS`. Variables of
the environment without a double underscore (`GRADIENT_CONFIG`) are no settings and are left alone.
Unknown names and wrong values are refused: a typing mistake must not silently mean the default.
"""

from __future__ import annotations

import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

import attrs

from gradient.settings.address import Address
from gradient.settings.data_dir import default_data_dir
from gradient.settings.errors import SettingsError
from gradient.settings.tables import LEAST, Settings

ENVIRONMENT_PREFIX: Final = "GRADIENT_"
ENVIRONMENT_LEVEL: Final = "__"
# Names the settings file itself; one level, so it cannot be taken for a setting.
FILE_VARIABLE: Final = "GRADIENT_CONFIG"

# A setting's place: the attribute names from `Settings` down, `("worker", "eval", "max_rss")`.
Place = tuple[str, ...]


@attrs.frozen
class _Setting:
    """One leaf of `Settings`: its type without `None`, and its least value if it has one."""

    kind: type
    least: int | None

    def read(self, raw: object) -> object:
        """`raw`, from TOML or as text, as a value of `kind`. Raises ValueError with a reason."""
        value = _CONVERT.get(self.kind, _enum_of(self.kind))(raw)
        if self.least is not None and typing.cast(int, value) < self.least:
            raise ValueError(f"expected at least {self.least}, got {value}")
        return value


def load(
    file: Path | None = None,
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """The settings in force. `flags` are keyed as in TOML, with dots; a flag of None was not given.

    Raises SettingsError, one line, for a file that cannot be read, an unknown name or a wrong value.
    """
    values: dict[Place, object] = {("server", "data_dir"): default_data_dir(environ)}
    values.update(_from_file(file) if file is not None else ())
    values.update(_from_environment(environ))
    values.update(_from_flags(flags or {}))
    return typing.cast(Settings, _build(Settings, values, ()))


def settings_file(environ: Mapping[str, str]) -> Path | None:
    """The file that `GRADIENT_CONFIG` names, else `~/.config/gradient/gradient.toml` if there is one."""
    if named := environ.get(FILE_VARIABLE):
        return Path(named)
    home = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".config")
    usual = Path(home) / "gradient" / "gradient.toml"
    return usual if usual.is_file() else None


# --- the three sources ----------------------------------------------------------------------------


def _from_file(file: Path) -> Iterator[tuple[Place, object]]:
    try:
        document = tomllib.loads(file.read_text())
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not valid TOML: {error}") from error
    for path, raw in _leaves(document, ()):
        table = f"[{'.'.join(path[:-1])}] " if path[:-1] else ""
        yield _checked(tuple(map(_snake, path)), raw, f"{file}: {table}{path[-1]}", path)


def _leaves(table: Mapping[str, Any], above: Place) -> Iterator[tuple[Place, object]]:
    for key, value in table.items():
        if isinstance(value, dict) and (*above, key) in TABLES:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[Place, object]]:
    for name, raw in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and ENVIRONMENT_LEVEL in name:
            place = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split(ENVIRONMENT_LEVEL))
            yield _checked(place, raw, f"environment variable {name}")


def _from_flags(flags: Mapping[str, object]) -> Iterator[tuple[Place, object]]:
    for name, raw in flags.items():
        if raw is not None:
            path = tuple(name.split("."))
            yield _checked(tuple(map(_snake, path)), raw, f"flag {name}", path)


def _checked(place: Place, raw: object, where: str, spelled: Place | None = None) -> tuple[Place, object]:
    """The value that belongs at `place`; `where` names the source for the one line of an error."""
    setting = SETTINGS.get(place)
    if setting is None or (spelled is not None and spelled != tuple(map(_camel, place))):
        raise SettingsError(f"{where}: no such setting")
    try:
        return place, setting.read(raw)
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


# --- values ---------------------------------------------------------------------------------------


def _whole_number(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", raw):
        return int(raw)
    raise ValueError(f"expected a whole number, got {raw!r}")


def _text(raw: object) -> str:
    if isinstance(raw, str):
        return raw
    raise ValueError(f"expected text, got {raw!r}")


def _path(raw: object) -> Path:
    if isinstance(raw, (str, Path)) and str(raw):
        return Path(raw).expanduser().absolute()
    raise ValueError(f"expected a path, got {raw!r}")


def _address(raw: object) -> Address:
    return raw if isinstance(raw, Address) else Address.parse(_text(raw))


def _enum_of(kind: type) -> Callable[[object], object]:
    def read(raw: object) -> object:
        assert issubclass(kind, Enum), f"settings cannot hold a {kind.__name__}"
        try:
            return kind(raw)
        except ValueError:
            choices = ", ".join(str(member.value) for member in kind)
            raise ValueError(f"expected one of {choices}, got {raw!r}") from None

    return read


_CONVERT: Final[dict[type, Callable[[object], object]]] = {
    int: _whole_number,
    str: _text,
    Path: _path,
    Address: _address,
}


# --- the shape of Settings ------------------------------------------------------------------------


def _places(table: type, above: Place) -> Iterator[tuple[Place, _Setting]]:
    hints = typing.get_type_hints(table)
    for field in attrs.fields(table):
        place, kind = (*above, field.name), _without_none(hints[field.name])
        if attrs.has(kind) and kind is not Address:
            yield from _places(kind, place)
        else:
            yield place, _Setting(kind, field.metadata.get(LEAST))


def _without_none(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        (hint,) = [member for member in typing.get_args(hint) if member is not types.NoneType]
    return typing.cast(type, hint)


def _build(table: type, values: Mapping[Place, object], above: Place) -> object:
    """An instance of `table` from the values below `above`; what is not given keeps its default."""
    given: dict[str, object] = {}
    hints = typing.get_type_hints(table)
    for field in attrs.fields(table):
        place = (*above, field.name)
        if place in values:
            given[field.name] = values[place]
        elif place not in SETTINGS:
            given[field.name] = _build(hints[field.name], values, place)
    return table(**given)


def _snake(camel: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", camel).lower()


def _camel(snake: str) -> str:
    first, *rest = snake.split("_")
    return first + "".join(part.capitalize() for part in rest)


SETTINGS: Final[dict[Place, _Setting]] = dict(_places(Settings, ()))
# Every table of a file by its path: table names are one word each, so TOML spells them as we do.
TABLES: Final = frozenset(place[:depth] for place in SETTINGS for depth in range(1, len(place)))
