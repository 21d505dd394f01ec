"""Store paths: the grammar, and the paths that Nix computed for the same content."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.nix.base32 import ALPHABET
from gradient.nix.hashes import Hash
from gradient.nix.store_path import (
    MAX_NAME_LENGTH,
    PATH_PATTERN,
    InvalidStorePath,
    StorePath,
    check_name,
    make_fixed_output_path,
    make_source_path,
    make_text_path,
    output_name,
)

HASH_PART = "dpb8fxsnid9j9zxgblrahfa3c2qjji5k"
HELLO = Hash.of(b"hello\n")
# NAR hash of a regular file with the content "hello\n", as `nix hash path` prints it.
HELLO_NAR = Hash.parse("sha256-HDfQGvQL4ugGkd48w99EN3ppmvuxfGjwgJZLL9Bx/BM=")

names = st.from_regex(r"[0-9a-zA-Z+_?=][0-9a-zA-Z+._?=-]{0,40}", fullmatch=True)


@given(st.text(alphabet=ALPHABET, min_size=32, max_size=32), names)
def test_round_trip(hash_part: str, name: str) -> None:
    path = StorePath(hash_part, name)
    assert StorePath.parse(path.path()) == StorePath.from_base(path.base_name) == path
    assert str(path) == f"/nix/store/{path.base_name}"
    assert re.fullmatch(PATH_PATTERN, path.path())


@pytest.mark.parametrize("name", ["a", ".foo", "...", "..a-b", "a.b-c_d+e?f=g", "-x", "x" * MAX_NAME_LENGTH])
def test_legal_names(name: str) -> None:
    assert check_name(name) == name
    assert StorePath.from_base(f"{HASH_PART}-{name}").name == name
    assert re.search(PATH_PATTERN, f'"/nix/store/{HASH_PART}-{name}"')


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "empty"),
        (".", "part '.' or '..'"),
        ("..", "part '.' or '..'"),
        (".-x", "part '.' or '..'"),
        ("..-x", "part '.' or '..'"),
        ("x" * (MAX_NAME_LENGTH + 1), "longer than 211"),
        ("a/b", "only letters"),
        ("a b", "only letters"),
        ("a\0", "only letters"),
        ("a\n", "only letters"),
        ("ä", "only letters"),
    ],
)
def test_illegal_names(name: str, complaint: str) -> None:
    with pytest.raises(InvalidStorePath, match=complaint):
        check_name(name)
    with pytest.raises(InvalidStorePath):
        StorePath.from_base(f"{HASH_PART}-{name}")
    assert re.fullmatch(PATH_PATTERN, f"/nix/store/{HASH_PART}-{name}") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/nix/store",
        "/nix/store/",
        f"{HASH_PART}-hello",
        f"/nix/store/{HASH_PART}",
        f"/nix/store/{HASH_PART}hello",
        f"/nix/store/{HASH_PART}-hello/bin",
        f"/nix/store//{HASH_PART}-hello",
        f"/nix/store/../{HASH_PART}-hello",
        f"/gnu/store/{HASH_PART}-hello",
        f"/nix/store/{HASH_PART[:-1]}e-hello",
        f"/nix/store/{HASH_PART.upper()}-hello",
        f" /nix/store/{HASH_PART}-hello",
    ],
)
def test_no_store_paths(text: str) -> None:
    with pytest.raises(InvalidStorePath):
        StorePath.parse(text)


def test_paths_that_nix_computed() -> None:
    # builtins.toFile "greeting" "hello\n"
    text = make_text_path("greeting", HELLO)
    assert text.path() == "/nix/store/ybf7by4xvcgjhwilsg87rqz9di79bify-greeting"
    # builtins.toFile "reference" "${greeting}"
    reference = make_text_path("reference", Hash.of(text.path().encode()), [text])
    assert reference.path() == "/nix/store/radaapwp4bf55xwhvnhms10xfqblqq12-reference"
    # nix-store --add hello.txt
    assert (
        make_source_path(HELLO_NAR, "hello.txt").path()
        == "/nix/store/i9pmrzmpshapij2kin22pff6fc2adavx-hello.txt"
    )
    # nix-store --add-fixed sha256 hello.txt, then sha1, then sha1 --recursive
    assert (
        make_fixed_output_path("hello.txt", HELLO, recursive=False).path()
        == "/nix/store/gy454w1cxaq731grqwylhzf4pp9r5izh-hello.txt"
    )
    sha1 = Hash.of(b"hello\n", "sha1")
    assert (
        make_fixed_output_path("hello.txt", sha1, recursive=False).path()
        == "/nix/store/svdva85yi507g9vncgsaxvnd1r808h4w-hello.txt"
    )
    nar_sha1 = Hash.parse("sha1:0deb52c2735eb38d360f976b7b3823c4ad05cce7")
    assert (
        make_fixed_output_path("hello.txt", nar_sha1, recursive=True).path()
        == "/nix/store/hzq8n5jpi3g2d0xhlvqd8q1gx5c9s6i3-hello.txt"
    )


def test_a_recursive_sha256_output_is_a_source() -> None:
    assert make_fixed_output_path("x", HELLO_NAR, recursive=True) == make_source_path(HELLO_NAR, "x")


def test_references_make_another_path_in_any_order() -> None:
    first, second = StorePath(HASH_PART, "first"), StorePath(HASH_PART, "second")
    plain = make_source_path(HELLO_NAR, "x")
    both = make_source_path(HELLO_NAR, "x", [first, second])
    assert both == make_source_path(HELLO_NAR, "x", [second, first])
    assert len({plain, both, make_source_path(HELLO_NAR, "x", self_reference=True)}) == 3


def test_output_names() -> None:
    assert output_name("hello-1.0", "out") == "hello-1.0"
    assert output_name("hello-1.0", "dev") == "hello-1.0-dev"


def test_a_made_path_is_valid() -> None:
    with pytest.raises(InvalidStorePath):
        make_source_path(HELLO_NAR, "no/slashes")
    with pytest.raises(InvalidStorePath, match="sha256"):
        make_text_path("x", Hash.of(b"", "sha1"))
