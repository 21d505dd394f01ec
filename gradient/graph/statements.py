"""Named SQL statements. Layer: rank 2, no IO.

A statement is a module constant next to the functions that run it:

    CLAIM = Statement("claim_assignment", \"\"\"
        INSERT INTO dispatched_job ...
    \"\"\")

Each goes into one registry, so that a test can prepare and explain every statement of the program, and
a log line or a plan can be traced to its name. Parameters are psycopg's `%(name)s`; a literal percent
sign is `%%`. Statements may be composed from predicates with f-strings, at import.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from textwrap import dedent
from typing import Final

import attrs

import gradient.graph

_PLACEHOLDER: Final = re.compile(r"%\((\w+)\)s|%%")


class DuplicateStatement(Exception):
    """Two statements have one name."""


@attrs.frozen(init=False)
class Statement:
    """A SQL statement with a name that is unique in the program, and the module that defines it."""

    name: str
    text: str
    module: str

    def __init__(self, name: str, text: str) -> None:
        module = sys._getframe(1).f_globals["__name__"]
        self.__attrs_init__(name, dedent(text).strip(), module)
        other = _REGISTRY.setdefault(name, self)
        if other is not self:
            raise DuplicateStatement(f"statement {name!r} of {module} has the name of one of {other.module}")

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters, each once, in order of appearance."""
        return tuple(dict.fromkeys(filter(None, _PLACEHOLDER.findall(self.text))))

    @property
    def numbered(self) -> str:
        """The text as PostgreSQL sees it: `$1`, `$2` ... in the order of `parameters`."""
        numbers = {name: f"${number}" for number, name in enumerate(self.parameters, 1)}
        return _PLACEHOLDER.sub(lambda match: numbers.get(match[1], "%"), self.text)


_REGISTRY: Final[dict[str, Statement]] = {}


def all_statements() -> tuple[Statement, ...]:
    """Every statement of `gradient.graph`, by name. Imports all its modules."""
    for module in pkgutil.walk_packages(gradient.graph.__path__, "gradient.graph."):
        importlib.import_module(module.name)
    return tuple(_REGISTRY[name] for name in sorted(_REGISTRY))
