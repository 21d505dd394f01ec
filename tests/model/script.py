"""An example as lines: for people to read, and for `scripts/bench soak --steps` to run again.

A step is the name of a rule and its values as JSON; what it came to stands behind it, in lines that begin
with `#`. Numbers choose from what there is, so a step that cannot be made when it is its turn is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Final, Protocol, TypeAlias

from hypothesis.stateful import initialize, rule
from hypothesis.strategies import SearchStrategy

from tests.model.universe import Universe

# The step that every script begins with.
BEGIN: Final = "begin"
Step: TypeAlias = tuple[str, dict[str, Any]]
Method: TypeAlias = Callable[..., None]


class Scripted(Protocol):
    """What has steps: it runs them, and knows what to do when one fails."""

    def _make(self, line: str, step: Callable[[], None]) -> None: ...


def step(**arguments: SearchStrategy[Any]) -> Callable[[Method], Method]:
    """A rule of the state machine that goes into its script."""
    return lambda method: rule(**arguments)(_scripted(method))


def first_step(**arguments: SearchStrategy[Any]) -> Callable[[Method], Method]:
    """The rule that comes before all others, in the script too."""
    return lambda method: initialize(**arguments)(_scripted(method))


def _scripted(method: Method) -> Method:
    @wraps(method)
    def scripted(self: Scripted, **values: Any) -> None:
        self._make(line_of(method.__name__, values), lambda: method(self, **values))

    return scripted


def line_of(name: str, values: Mapping[str, Any]) -> str:
    """A step as a line."""
    return f"{name} {json.dumps(values, default=Universe.as_json)}"


def steps_in(lines: Iterable[str]) -> list[Step]:
    """The steps of the last script in a text. Raises ValueError for a line that is no step."""
    found: list[Step] = []
    for line in filter(None, map(str.strip, lines)):
        if line.startswith("#"):
            continue
        name, _, values = line.partition(" ")
        if name == BEGIN:
            found.clear()
        found.append((name, json.loads(values)))
    for name, given in found[:1]:
        if name != BEGIN:
            raise ValueError(f"a script begins with {BEGIN!r}, not with {name!r}")
        given["universe"] = Universe.of_json(given["universe"])
    return found
