"""The wildcard language, its matcher on a flake of plain values, and attribute paths."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.nix.attr_path import (
    AttrPath,
    BadAttrPath,
    candidate_paths,
    nix_string,
    parse_attr_path,
    render_attr_path,
    unique_attr_paths,
)
from gradient.nix.wildcard import (
    HASH,
    MAX_LENGTH,
    ROOTS,
    STAR,
    BadWildcard,
    default_wildcards,
    parse_wildcards,
    plain_path,
)
from gradient.nix.wildcard_match import Cursor, NodeKind

LINUX, ARM = "x86_64-linux", "aarch64-linux"

# A flake: "drv" is a derivation, a dict a set, one with "_type" a typed set, anything else another value.
FLAKE: dict[str, Any] = {
    "packages": {
        LINUX: {"hello": "drv", "a.b": "drv", "set": {"deep": "drv", "set": {"deeper": "drv"}}, "text": 1},
        ARM: {"hello": "drv"},
    },
    "checks": {LINUX: {"hello": "drv"}},
    "formatter": {LINUX: "drv"},
    "hydraJobs": {"job": "drv"},
    "lib": {"f": 1, "drv": "drv"},
    "nixosConfigurations": {
        "host": {"_type": "configuration", "config": {"top": "drv"}, "direct": "drv"},
        "plain": {"config": {"top": "drv"}},
    },
}


def kind_of(value: Any) -> NodeKind:
    if value == "drv":
        return NodeKind.DERIVATION
    if isinstance(value, dict):
        return NodeKind.TYPED if "_type" in value else NodeKind.SET
    return NodeKind.OTHER


def walk(cursor: Cursor, value: Any, visited: list[str]) -> Iterator[tuple[AttrPath, frozenset[str]]]:
    visited.append(render_attr_path(cursor.path))
    decision = cursor.decide(kind_of(value))
    if decision.take:
        yield cursor.path, decision.taken_by
    if decision.descend and isinstance(value, dict):
        names = value.keys() if decision.names is None else value.keys() & decision.names
        for name in sorted(names - {"_type"}):
            if inner := decision.enter(name):
                yield from walk(inner, value[name], visited)


def select(*texts: str, visited: list[str] | None = None) -> list[str]:
    cursor = Cursor.root(parse_wildcards(texts))
    paths = [path for path, _ in walk(cursor, FLAKE, [] if visited is None else visited)]
    assert paths == unique_attr_paths(paths)
    return [render_attr_path(path) for path in paths]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("packages.x86_64-linux.hello", ["packages.x86_64-linux.hello"]),
        ('packages.x86_64-linux."a.b"', ['packages.x86_64-linux."a.b"']),
        ("packages.x86_64-linux.none", []),
        ("packages.x86_64-linux", []),
        ("packages.x86_64-linux.text", []),
        (
            "packages.x86_64-linux.*",
            ['packages.x86_64-linux."a.b"', "packages.x86_64-linux.hello", "packages.x86_64-linux.set.deep"],
        ),
        ("packages.x86_64-linux.#", ['packages.x86_64-linux."a.b"', "packages.x86_64-linux.hello"]),
        ("packages.*.hello", ["packages.aarch64-linux.hello", "packages.x86_64-linux.hello"]),
        ("packages.#.#", [
            "packages.aarch64-linux.hello", 'packages.x86_64-linux."a.b"', "packages.x86_64-linux.hello",
        ]),
        ("packages.x86_64-linux.#.deep", ["packages.x86_64-linux.set.deep"]),
        ("packages.*.*", [
            "packages.aarch64-linux.hello", 'packages.x86_64-linux."a.b"', "packages.x86_64-linux.hello",
        ]),
        ("nixosConfigurations.#.config.top", [
            "nixosConfigurations.host.config.top", "nixosConfigurations.plain.config.top",
        ]),
        ("nixosConfigurations.*.config.top", ["nixosConfigurations.plain.config.top"]),
        ("nixosConfigurations.host.config.top", ["nixosConfigurations.host.config.top"]),
        ("nixosConfigurations.*", []),
        ("formatter.*", ["formatter.x86_64-linux"]),
        ("lib.*", ["lib.drv"]),
        ("*.x86_64-linux", ["formatter.x86_64-linux"]),
        (
            "*",
            [
                "checks.x86_64-linux.hello",
                "formatter.x86_64-linux",
                "hydraJobs.job",
                "packages.aarch64-linux.hello",
                'packages.x86_64-linux."a.b"',
                "packages.x86_64-linux.hello",
            ],
        ),
        (
            "packages.x86_64-linux.*,!packages.x86_64-linux.hello",
            ['packages.x86_64-linux."a.b"', "packages.x86_64-linux.set.deep"],
        ),
        (
            'packages.x86_64-linux.*, !packages.x86_64-linux.set, !packages.x86_64-linux."a.b"',
            ["packages.x86_64-linux.hello"],
        ),
        (
            "packages.x86_64-linux.set.#,packages.x86_64-linux.#,!packages.x86_64-linux.set",
            ['packages.x86_64-linux."a.b"', "packages.x86_64-linux.hello", "packages.x86_64-linux.set.deep"],
        ),
        ("!lib.drv,lib.*", []),
        ("lib.drv,lib.*,lib.drv", ["lib.drv"]),
    ],
)  # fmt: skip
def test_selection(text: str, expected: list[str]) -> None:
    assert select(text) == expected
    assert select(*text.split(",") if " " not in text else [text]) == expected


def test_nothing_else_is_looked_at() -> None:
    visited: list[str] = []
    select("packages.x86_64-linux.hello,checks.*", visited=visited)
    assert visited == [
        "",
        "checks",
        "checks.x86_64-linux",
        "checks.x86_64-linux.hello",
        "packages",
        "packages.x86_64-linux",
        "packages.x86_64-linux.hello",
    ]


def test_an_excluded_attribute_is_never_looked_at() -> None:
    visited: list[str] = []
    select("packages.x86_64-linux.*,!packages.x86_64-linux.set,!packages.x86_64-linux.hello", visited=visited)
    assert [path for path in visited if path.endswith((".set", ".hello"))] == []


def test_who_took_it_and_who_found_nothing() -> None:
    wildcards = parse_wildcards(["lib.*", "lib.drv", "lib.f", "*"])
    taken = dict(walk(Cursor.root(wildcards), FLAKE, []))
    assert taken["lib", "drv"] == {"lib.*", "lib.drv"}
    assert wildcards.unmatched(text for texts in taken.values() for text in texts) == ["lib.f"]


def test_parsing_is_sorted_and_unique() -> None:
    first = parse_wildcards(["b.*.*, a.b,*.#", "!c.d"])
    assert [pattern.segments for pattern in first.patterns] == [(STAR, HASH), ("a", "b"), ("b", STAR)]
    assert first.exclusions == {("c", "d")}
    assert [pattern.path for pattern in first.patterns] == [None, ("a", "b"), None]
    assert first.patterns == parse_wildcards(["a.b", "b.*.*", "*.#", "a.b"]).patterns
    assert {pattern.segments for pattern in parse_wildcards(["*"]).patterns} == {
        (root, STAR) for root in ROOTS
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty item"),
        ("a,", "empty item"),
        (",a", "empty item"),
        ("a,,b", "empty item"),
        ("a, ,b", "empty item"),
        (" a", "blanks at an edge"),
        ("a ", "blanks at an edge"),
        ("a ,b", "blanks at an edge"),
        ("a\n", "blanks at an edge"),
        ("a b", "cannot follow"),
        ("a. b", "not allowed outside quotes"),
        ("#", "only #"),
        ("!", "only !"),
        ("a,!", "only !"),
        (".a", "name is missing"),
        ("a.", "name is missing"),
        ("a..b", "name is missing"),
        ("a.!b", "not allowed outside quotes"),
        ("!!a", "not allowed outside quotes"),
        ("a!b", "cannot follow"),
        ("a*", "whole name"),
        ("*a", "whole name"),
        ("a.#b", "cannot follow"),
        ('"a"b', "cannot follow"),
        ('a"b"', "cannot follow"),
        ('a."b', "quote that is not closed"),
        ('a."b\\"', "quote that is not closed"),
        ('a."*"', "in quotes"),
        ('a."#"', "in quotes"),
        ('"!"', "in quotes"),
        ("a,!b.*", "exclusions are exact"),
        ("a,!#", "exclusions are exact"),
        ("!a", "at least one wildcard that is no exclusion"),
        ("a" * (MAX_LENGTH + 1), "longer than"),
    ],
)
def test_refused(text: str, complaint: str) -> None:
    with pytest.raises(BadWildcard, match=complaint) as caught:
        parse_wildcards([text])
    assert "\n" not in str(caught.value)


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(BadWildcard, match="nothing to evaluate"):
        parse_wildcards([])


@given(st.text(alphabet='ab.*#!," \\\n', max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(BadWildcard):
        for pattern in parse_wildcards([text]).patterns:
            assert pattern.segments
            assert all(
                not (a is b is STAR) for a, b in zip(pattern.segments, pattern.segments[1:], strict=False)
            )


def test_defaults() -> None:
    assert default_wildcards([LINUX, ARM]) == (
        "packages.x86_64-linux.*",
        "checks.x86_64-linux.*",
        "packages.aarch64-linux.*",
        "checks.aarch64-linux.*",
    )
    assert select(*default_wildcards([ARM])) == ["packages.aarch64-linux.hello"]


@given(st.lists(st.text(max_size=6), min_size=1, max_size=4))
def test_attribute_paths_round_trip(names: list[str]) -> None:
    assert parse_attr_path(render_attr_path(names)) == tuple(names)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("a", "b-c", "d'"), "a.b-c.d'"),
        (("3proxy",), '"3proxy"'),
        (("a.b", ""), '"a.b".""'),
        (("if", "or"), '"if"."or"'),
        (('"', "\\", "${x}", "$x", "*"), '"\\""."\\\\"."\\${x}"."$x"."*"'),
        (("é",), '"é"'),
    ],
)
def test_quoting(path: AttrPath, text: str) -> None:
    assert render_attr_path(path) == text


def test_nix_strings_hold_anything() -> None:
    assert nix_string("a\r\nb$${c}") == '"a\\r\nb$\\${c}"'


@pytest.mark.parametrize("text", ["", "a.*", "#", "a..b", "a,b", '"a'])
def test_no_attribute_path(text: str) -> None:
    with pytest.raises(BadAttrPath):
        parse_attr_path(text)
    assert plain_path(text) is None


def test_where_nix_build_looks() -> None:
    assert plain_path('hello."x.y"') == ("hello", "x.y")
    assert candidate_paths(("hello",), [LINUX]) == (
        ("packages", LINUX, "hello"),
        ("legacyPackages", LINUX, "hello"),
        ("hello",),
    )
    assert candidate_paths((), [LINUX]) == (("packages", LINUX, "default"), ("defaultPackage", LINUX))
    assert [path[:2] for path in candidate_paths(("a", "b"), [LINUX, ARM])] == [
        ("packages", LINUX),
        ("legacyPackages", LINUX),
        ("packages", ARM),
        ("legacyPackages", ARM),
        ("a", "b"),
    ]
