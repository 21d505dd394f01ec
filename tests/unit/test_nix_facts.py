"""Derivation facts from plain and from structured attributes, and from nonsense."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.model import DiscoveredDerivation, OutputPath
from gradient.nix.derivation import Derivation, Output
from gradient.nix.facts import MAX_FEATURES, discover

OUT = "/nix/store/0c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-one"
SOURCE = "/nix/store/3c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-source"
INPUT = "/nix/store/1c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-two.drv"
DRV = "/nix/store/2c0zfmc6sfg6jjbv4v4zzkjmkqfgqa5n-one.drv"


def derivation(env: dict[str, str], *outputs: Output, system: str = "x86_64-linux") -> Derivation:
    known = outputs or (Output("out", OUT),)
    return Derivation("one", known, {INPUT: ("out",)}, (SOURCE,), system, "/bin/sh", (), env)


def plain(**env: str) -> DiscoveredDerivation:
    return discover(derivation(env), DRV)


def structured(**attributes: Any) -> DiscoveredDerivation:
    return discover(derivation({"__json": json.dumps(attributes)}), DRV)


def test_without_attributes() -> None:
    assert plain() == DiscoveredDerivation(
        drv_path=DRV,
        outputs=(OutputPath("out", OUT),),
        dependencies=(INPUT,),
        input_sources=(SOURCE,),
        architecture="x86_64-linux",
    )


def test_variables() -> None:
    found = plain(
        requiredSystemFeatures="kvm  big-parallel\nkvm",
        timeout="600",
        maxSilent=" 60 ",
        preferLocalBuild="1",
        allowSubstitutes="",
        pname="hello",
    )
    assert found.required_features == ("big-parallel", "kvm")
    assert (found.timeout_secs, found.max_silent_secs) == (600, 60)
    assert (found.prefer_local_build, found.allow_substitutes) == (True, False)
    assert found.pname == "hello"


def test_structured_attributes() -> None:
    found = structured(
        requiredSystemFeatures=["kvm", "benchmark"],
        timeout=600,
        maxSilent="60",
        preferLocalBuild=True,
        allowSubstitutes=False,
        pname="hello",
    )
    assert found.required_features == ("benchmark", "kvm")
    assert (found.timeout_secs, found.max_silent_secs) == (600, 60)
    assert (found.prefer_local_build, found.allow_substitutes) == (True, False)
    assert found.pname == "hello"


def test_structured_attributes_hide_the_variables() -> None:
    found = discover(derivation({"__json": "{}", "preferLocalBuild": "1", "pname": "x"}), DRV)
    assert (found.prefer_local_build, found.pname) == (False, None)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "1" * 5_000, '{"a":1e999}'])
def test_broken_json_is_as_good_as_none(text: str) -> None:
    found = discover(derivation({"__json": text, "pname": "kept"}), DRV)
    assert found.pname in {"kept", None}


@pytest.mark.parametrize(
    "value", [0, -1, 1.5, True, None, [], {}, "soon", "", "-1", "1_0", "٣", 2**31, 10**400, "9" * 50]
)
def test_a_limit_that_is_none(value: Any) -> None:
    assert structured(timeout=value).timeout_secs is None
    assert plain(timeout=str(value)).timeout_secs is None


@pytest.mark.parametrize("value", [0, 1, "1", "true", None, []])
def test_structured_booleans_are_json_booleans(value: Any) -> None:
    found = structured(preferLocalBuild=value, allowSubstitutes=value)
    assert (found.prefer_local_build, found.allow_substitutes) == (False, True)


def test_features_of_another_shape() -> None:
    assert structured(requiredSystemFeatures=["kvm", 1, None, ["x"]]).required_features == ("kvm",)
    assert structured(requiredSystemFeatures={"kvm": True}).required_features == ()
    assert structured(requiredSystemFeatures="kvm nixos-test").required_features == ("kvm", "nixos-test")
    many = " ".join(f"feature{index:04}" for index in range(1000))
    assert len(plain(requiredSystemFeatures=many).required_features) == MAX_FEATURES


def test_texts_that_a_database_refuses() -> None:
    assert plain(pname="a\0b\udcffc").pname == "a?b?c"
    assert structured(pname="\ud800").pname == "?"
    assert plain(requiredSystemFeatures="k\0vm").required_features == ("k?vm",)
    assert discover(derivation({}, system="x\0"), DRV).architecture == "x?"
    assert len(plain(pname="x" * 10_000).pname or "") == 256


def test_fixed_output() -> None:
    fixed = discover(derivation({}, Output("out", OUT, "sha256", "ab" * 32)), DRV)
    assert (fixed.is_fixed_output, fixed.required_features) == (True, ())


def test_floating_outputs_have_no_path_and_need_the_feature() -> None:
    outputs = Output("dev", "", "r:sha256"), Output("out", "", "r:sha256")
    found = discover(derivation({"requiredSystemFeatures": "kvm"}, *outputs), DRV)
    assert found.outputs == (OutputPath("dev", ""), OutputPath("out", ""))
    assert (found.is_fixed_output, found.required_features) == (False, ("ca-derivations", "kvm"))


names = st.sampled_from(
    [
        "requiredSystemFeatures",
        "timeout",
        "maxSilent",
        "preferLocalBuild",
        "allowSubstitutes",
        "pname",
        "__json",
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(names, values), st.dictionaries(names, st.text()))
def test_nothing_crashes(attributes: dict[str, Any], env: dict[str, str]) -> None:
    for found in (structured(**attributes), plain(**env)):
        assert isinstance(found.prefer_local_build, bool)
        assert isinstance(found.timeout_secs, int | None)
        repr(found).encode()
