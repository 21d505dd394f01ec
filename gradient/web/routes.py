"""A path and the function that answers it. Layer: web."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import attrs
from quart import Response

# An id in a rule: what the database could hold, so that a longer number is no such path.
ID: Final = f"int(max={2**63 - 1})"
# Called with the site and the parts of the path by name.
Handler: TypeAlias = Callable[..., Awaitable[Response]]


@attrs.frozen
class Route:
    """`method` GET answers HEAD too; `rule` is Werkzeug's."""

    method: str
    rule: str
    handler: Handler

    @property
    def name(self) -> str:
        """Unique among the routes."""
        return f"{self.handler.__module__.rpartition('.')[2]}-{self.handler.__name__}"
