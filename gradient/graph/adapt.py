"""How Python values become parameters of a statement, and rows become attrs values.

Layer: rank 2, no IO. Only `pg.py` needs this.

**The statement says its types.** An `int`, a `str`, a list and `None` go out as text of unknown type,
and PostgreSQL takes the type from the statement: from the column it is compared with or stored in, or
from a cast (`%(ids)s::bigint[]`). psycopg's own dumpers would pick int2, int4 or int8 by value, so the
same statement would be prepared once per size of its numbers, and a list with a small number in it
would not be a `bigint[]`. Unknown has one shape whatever the value is, NULL and the empty list
included: one statement is one prepared statement, and `PREPARE` in a test checks what production runs.

Two rules follow for who writes SQL: cast where nothing else says the type (PostgreSQL refuses with
"could not determine data type of parameter"), and cast in arithmetic with an interval or in a bare
`SELECT %(x)s`, which would be text.

Typed as psycopg has them: `bool`, `float`, `bytes`, aware `datetime` (timestamptz). A `dict` is jsonb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import attrs
import psycopg
from psycopg.adapt import AdaptersMap, Dumper, PyFormat
from psycopg.cursor_async import AsyncCursor
from psycopg.types.array import BaseListDumper, ListDumper
from psycopg.types.json import JsonbDumper

T = TypeVar("T")


class _IntDumper(Dumper):
    """Any int, an IntEnum too, as its digits."""

    def dump(self, obj: int) -> bytes:
        return b"%d" % obj


class _ArrayDumper(ListDumper):
    """A list, tuple or set as an array literal, with fast ways for ints and for strings.

    The general way costs about 1 µs an item, the fast ones 0.1 µs.
    """

    def get_key(self, obj: Any, format: PyFormat) -> type:
        return self.cls

    def upgrade(self, obj: Any, format: PyFormat) -> BaseListDumper:
        return self

    def dump(self, obj: Iterable[Any]) -> bytes:
        items = list(obj)
        kinds = {type(item) for item in items} - {type(None)}
        if all(issubclass(kind, int) and kind is not bool for kind in kinds):
            text = ",".join(["NULL" if item is None else int.__repr__(item) for item in items])
        elif kinds == {str}:
            text = ",".join(["NULL" if item is None else _quoted(item) for item in items])
        else:
            return bytes(super().dump(items) or b"")
        if "\0" in text:
            raise psycopg.DataError("PostgreSQL text cannot hold a NUL character")
        return b"{%s}" % text.encode()


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_dumper(int, _IntDumper)
    # Without its own entry an enum member would go out by its name.
    adapters.register_dumper(IntEnum, _IntDumper)
    for sequence in (list, tuple, set, frozenset):
        adapters.register_dumper(sequence, _ArrayDumper)
    adapters.register_dumper(dict, JsonbDumper)
    return adapters


ADAPTERS = _adapters()


def rows_as(cls: type[T]) -> Callable[[AsyncCursor[Any]], Callable[[Sequence[Any]], T]]:
    """A row factory that makes attrs values: columns go to fields by name, in any order.

    Raises `psycopg.ProgrammingError` when a column has no field or a field without default has no column.
    """
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)  # type: ignore[arg-type]
    arguments = [field.alias for field in fields if field.init]
    required = {field.alias for field in fields if field.init and field.default is attrs.NOTHING}

    def maker(cursor: AsyncCursor[Any]) -> Callable[[Sequence[Any]], T]:
        columns = [column.name for column in cursor.description or ()]
        if columns == arguments:
            return lambda values: cls(*values)
        if not required <= set(columns) <= set(arguments) or len(set(columns)) != len(columns):
            raise psycopg.ProgrammingError(f"columns {columns} do not make a {cls.__name__}({arguments})")
        return lambda values: cls(**dict(zip(columns, values, strict=True)))

    return maker
