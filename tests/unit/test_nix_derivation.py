"""`.drv` files: reading, writing, the round trip, and what is refused. Real files: integration tests."""

from __future__ import annotations

import contextlib

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.nix import derivation as module
from gradient.nix.derivation import Derivation, InvalidDerivation, Output, parse_derivation, write_derivation
from gradient.nix.hashes import Hash
from gradient.nix.store_path import make_output_path

P1 = "/nix/store/0c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-one"
P2 = "/nix/store/1c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-two.drv"
P3 = "/nix/store/2c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-three.drv"

SMALL = (
    b'Derive([("dev","/nix/store/0c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-one","",""),("out","","r:sha256","")],'
    b'[("/nix/store/1c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-two.drv",["dev","out"]),'
    b'("/nix/store/2c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-three.drv",[])],'
    b'["/nix/store/0c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-one"],"x86_64-linux","/bin/sh",["-c","echo \\"hi\\""],'
    b'[("a","line\\nnext\\ttab\\rreturn\\\\n"),("b","\xc3\xa4 \xff"),("empty","")])'
)

texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
output_names = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
paths = st.sampled_from([P1, P2, P3])
derivations = st.builds(
    Derivation,
    name=st.just("name-1.0"),
    outputs=st.lists(
        st.builds(Output, output_names, st.one_of(st.just(""), paths), texts, texts),
        unique_by=lambda output: output.name,
        max_size=3,
    ).map(lambda outputs: tuple(sorted(outputs, key=lambda output: output.name))),
    input_drvs=st.dictionaries(paths, st.sets(output_names).map(lambda names: tuple(sorted(names)))),
    input_srcs=st.sets(paths).map(lambda found: tuple(sorted(found))),
    system=texts,
    builder=texts,
    args=st.lists(texts, max_size=3).map(tuple),
    env=st.dictionaries(texts, texts, max_size=4),
)


def test_every_part_is_read() -> None:
    assert parse_derivation(SMALL, "small.drv") == Derivation(
        name="small",
        outputs=(Output("dev", P1), Output("out", "", "r:sha256")),
        input_drvs={P2: ("dev", "out"), P3: ()},
        input_srcs=(P1,),
        system="x86_64-linux",
        builder="/bin/sh",
        args=("-c", 'echo "hi"'),
        env={"a": "line\nnext\ttab\rreturn\\n", "b": "ä \udcff", "empty": ""},
    )


def test_written_as_read() -> None:
    assert write_derivation(parse_derivation(SMALL, "small")) == SMALL


def test_everything_may_be_empty() -> None:
    data = b'Derive([],[],[],"","",[],[])'
    assert write_derivation(parse_derivation(data, "x")) == data


@given(derivations)
def test_round_trip(derivation: Derivation) -> None:
    assert parse_derivation(write_derivation(derivation), derivation.name) == derivation


@given(st.binary(max_size=12), st.binary(max_size=12))
def test_any_bytes_survive(key: bytes, value: bytes) -> None:
    names = [data.decode("utf-8", "surrogateescape") for data in (key, value)]
    derivation = attrs.evolve(parse_derivation(SMALL, "x"), env={names[0]: names[1]})
    assert parse_derivation(write_derivation(derivation), "x") == derivation


def test_sets_are_written_sorted_by_bytes() -> None:
    derivation = attrs.evolve(
        parse_derivation(SMALL, "x"),
        outputs=(Output("out", P1), Output("dev", P1)),
        input_srcs=(P2, P1),
        env={"\U0001f600": "", "\udcff": "", "a": ""},
    )
    read = parse_derivation(write_derivation(derivation), "x")
    assert [output.name for output in read.outputs] == ["dev", "out"]
    assert read.input_srcs == (P1, P2)
    assert list(read.env) == ["a", "\U0001f600", "\udcff"]


def test_a_truncated_file_is_refused() -> None:
    for cut in range(len(SMALL)):
        with pytest.raises(InvalidDerivation):
            parse_derivation(SMALL[:cut], "small")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (b"", b"", "dynamic derivations"),
        (b"])", b"])\n", "not of the form"),
        (b"])", b'])"', "not of the form"),
        (b"])", b'])"x', "not of the form"),
        (b"Derive(", b"Derive (", "not of the form"),
        (b'"","")', b'"",)', "not of the form"),
        (b'"","")', b'"")', "not of the form"),
        (b'("a",', b'("a"', "not of the form"),
        (b'("a",', b'("a";', "not of the form"),
        (b'[("dev"', b'\\n[("dev"', "not of the form"),
        (b"\\ttab", b"\\xtab", "escape"),
        (b"empty", b"a", "variable"),
        (
            b"2c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-three",
            b"1c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-two",
            "input derivation",
        ),
        (b"-one", b"-o/ne", "no store path"),
        (b"2c0zf", b"2e0zf", "no store path"),
        (b'"dev","out"', b'"dev","o ut"', "no name of an output"),
        (b'("out"', b'("o/ut"', "no name of an output"),
    ],
)
def test_refused(old: bytes, new: bytes, complaint: str) -> None:
    data = SMALL.replace(old, new, 1) if old else b'DrvWithVersion("xp-dyn-drv",[])'
    if old == b"])":
        data = SMALL.removesuffix(old) + new
    assert data != SMALL
    with pytest.raises(InvalidDerivation, match=complaint) as caught:
        parse_derivation(data, "small")
    assert str(caught.value).startswith("small is no derivation")


@given(st.binary(max_size=60))
def test_hostile_bytes_are_refused_or_read(data: bytes) -> None:
    for hostile in (data, SMALL[: len(data) * 5] + data, data + SMALL):
        with contextlib.suppress(InvalidDerivation):
            parse_derivation(hostile, "x")


def test_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SIZE", len(SMALL) - 1)
    with pytest.raises(InvalidDerivation, match="bytes, more than"):
        parse_derivation(SMALL, "small")


def test_a_bad_name_is_refused() -> None:
    with pytest.raises(InvalidDerivation, match="only letters"):
        parse_derivation(SMALL, "no/name.drv")


def test_fixed_and_floating_outputs() -> None:
    def with_outputs(*outputs: Output) -> Derivation:
        return attrs.evolve(parse_derivation(SMALL, "x"), outputs=outputs)

    fixed = with_outputs(Output("out", P1, "sha256", "ab" * 32))
    floating = with_outputs(Output("out", "", "r:sha256", ""))
    impure = with_outputs(Output("out", "", "r:sha256", "impure"))
    addressed = with_outputs(Output("out", P1))
    assert [d.is_fixed_output for d in (fixed, floating, impure, addressed)] == [True, False, False, False]
    assert [d.has_known_outputs for d in (fixed, floating, impure, addressed)] == [True, False, False, True]


def test_an_output_path_that_nix_computed() -> None:
    """The `hello` example has no inputs: its hash modulo is that of its text without output paths."""
    unknown = Derivation(
        name="hello",
        outputs=(Output("out", ""),),
        input_drvs={},
        input_srcs=(),
        system="x86_64-linux",
        builder="/bin/sh",
        args=("-c", "echo 'building hello'; echo 'Hello, world!' > $out"),
        env={"builder": "/bin/sh", "name": "hello", "out": "", "system": "x86_64-linux"},
    )
    path = make_output_path("hello", "out", Hash.of(write_derivation(unknown)))
    assert path.path() == "/nix/store/dpb8fxsnid9j9zxgblrahfa3c2qjji5k-hello"
