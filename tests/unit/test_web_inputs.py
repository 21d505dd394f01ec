"""JSON from strangers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradient.web.errors import BadRequest
from gradient.web.inputs import Fields


def test_fields_of_every_kind() -> None:
    fields = Fields({"a": "text", "n": 3, "f": True, "l": ["x", "y"], "o": {"inner": "z"}, "none": None})
    assert fields.text("a") == "text"
    assert fields.number("n") == 3
    assert fields.flag("f") is True
    assert fields.texts("l") == ("x", "y")
    inner = fields.object("o")
    assert inner is not None
    assert inner.required_text("inner") == "z"
    assert fields.text("none") is None
    assert fields.object("absent") is None
    assert (fields.flag("absent"), fields.texts("absent"), fields.number("absent")) == (False, (), None)
    fields.end()


@pytest.mark.parametrize(
    ("value", "take", "words"),
    [
        ({"a": 1}, lambda f: f.text("a"), "`a` must be a string"),
        ({"a": "nul\0"}, lambda f: f.text("a"), "`a` must be a string"),
        ({"a": "half \ud83d"}, lambda f: f.text("a"), "`a` must be a string"),
        ({"a": ["\udc00"]}, lambda f: f.texts("a"), "`a` must be a list of strings"),
        ({}, lambda f: f.required_text("a"), "`a` is missing"),
        ({"a": None}, lambda f: f.required_text("a"), "`a` is missing"),
        ({"a": True}, lambda f: f.number("a"), "`a` must be a whole number"),
        ({"a": 1.5}, lambda f: f.number("a"), "`a` must be a whole number"),
        ({"a": -1}, lambda f: f.number("a"), "`a` is out of range"),
        ({"a": 2**63}, lambda f: f.number("a"), "`a` is out of range"),
        ({"a": 1}, lambda f: f.flag("a"), "`a` must be true or false"),
        ({"a": "x"}, lambda f: f.texts("a"), "`a` must be a list of strings"),
        ({"a": [1]}, lambda f: f.texts("a"), "`a` must be a list of strings"),
        ({"a": []}, lambda f: f.object("a"), "a must be a JSON object"),
        ({"a": {"b": 1}}, lambda f: f.object("a").text("b"), "`a.b` must be a string"),
        ({"a": 1, "c": 2}, lambda f: f.end(), "unknown fields: `a`, `c`"),
    ],
)
def test_a_fault_is_named(value: Any, take: Callable[[Any], object], words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        take(Fields(value))
    assert str(caught.value) == words


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_only_an_object_has_fields(value: Any) -> None:
    with pytest.raises(BadRequest, match="the request must be a JSON object"):
        Fields(value)
