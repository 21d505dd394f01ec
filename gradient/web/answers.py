"""Answers in their usual forms. Layer: web."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Final

import attrs
from quart import Response

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
HTML: Final = "text/html; charset=utf-8"
NDJSON: Final = "application/x-ndjson"


def json_text(value: Any) -> str:
    """Compact JSON; times in ISO 8601, attrs values as objects."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=_plain)


def json_answer(value: Any, status: int = 200) -> Response:
    """A JSON body."""
    return Response(json_text(value), status, content_type=JSON)


def text_answer(text: str | bytes, status: int = 200, content_type: str = TEXT) -> Response:
    """A body of text, or of bytes that are called so."""
    return Response(text, status, content_type=content_type)


def _plain(value: object) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if attrs.has(type(value)):
        return attrs.asdict(value)  # type: ignore[arg-type]
    raise TypeError(f"{type(value).__name__} has no form in JSON")
