"""Reading JSON from strangers: size, shape and types, each fault in one line. Layer: web."""

from __future__ import annotations

import json
from typing import Any, Final

from quart import request

from gradient.web.errors import BadRequest

# The longest request has a few wildcards and a comment.
MAX_JSON: Final = 256 * 1024  # bytes


class Fields:
    """The fields of a JSON object: each is taken once, then `end` refuses what is left over.

    Every method raises BadRequest.
    """

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, dict):
            raise BadRequest(f"{where or 'the request'} must be a JSON object")
        self._fields: dict[str, Any] = dict(value)
        self._where = f"{where}." if where else ""

    def text(self, name: str) -> str | None:
        """A string; None when it is absent or null."""
        value: str | None = self._of(name, str, "a string")
        return value

    def required_text(self, name: str) -> str:
        """A string that has to be there."""
        if (value := self.text(name)) is None:
            raise BadRequest(f"`{self._where}{name}` is missing")
        return value

    def number(self, name: str) -> int | None:
        """A whole number that fits 63 bits."""
        value: int | None = self._of(name, int, "a whole number")
        if value is not None and not 0 <= value < 2**63:
            raise BadRequest(f"`{self._where}{name}` is out of range")
        return value

    def flag(self, name: str) -> bool:
        """A boolean, false when absent."""
        return bool(self._of(name, bool, "true or false"))

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty when absent."""
        values = self._of(name, list, "a list of strings") or []
        if not all(isinstance(value, str) and _is_text(value) for value in values):
            raise BadRequest(f"`{self._where}{name}` must be a list of strings")
        return tuple(values)

    def object(self, name: str) -> Fields | None:
        """An object; None when it is absent or null."""
        value = self._fields.pop(name, None)
        return None if value is None else Fields(value, f"{self._where}{name}")

    def end(self) -> None:
        """Nothing else may be there: a misspelt field must not be passed over."""
        if self._fields:
            names = ", ".join(f"`{self._where}{name}`" for name in sorted(self._fields))
            raise BadRequest(f"unknown fields: {names}"[:500])

    def _of(self, name: str, kind: type, what: str) -> Any:
        value = self._fields.pop(name, None)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if value is not None and (wrong or (isinstance(value, str) and not _is_text(value))):
            raise BadRequest(f"`{self._where}{name}` must be {what}")
        return value


def _is_text(value: str) -> bool:
    """Whether it can be stored and sent: JSON can spell a NUL, and half of a surrogate pair."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


async def read_fields() -> Fields:
    """The JSON object in the body of the current request; raises BadRequest, BodyTooLarge."""
    body: Any = request.body
    return _fields(await body.read(MAX_JSON))


async def read_optional_fields() -> Fields:
    """As `read_fields`; a request without a body has no fields."""
    body: Any = request.body
    return _fields(await body.read(MAX_JSON) or b"{}")


def _fields(data: bytes) -> Fields:
    try:
        return Fields(json.loads(data))
    except (ValueError, RecursionError):
        raise BadRequest("the request is not JSON") from None
