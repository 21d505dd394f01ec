"""Hashes in every spelling of Nix."""

from __future__ import annotations

import base64
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.nix.base32 import encode
from gradient.nix.hashes import DIGEST_SIZES, Algorithm, Hash, InvalidHash

ALGORITHMS = typing.get_args(Algorithm)
EMPTY = Hash.of(b"")

hashes = st.sampled_from(ALGORITHMS).flatmap(
    lambda algo: st.builds(
        Hash, st.just(algo), st.binary(min_size=DIGEST_SIZES[algo], max_size=DIGEST_SIZES[algo])
    )
)


def test_spellings_of_the_empty_hash() -> None:
    assert EMPTY.sri() == "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
    assert EMPTY.nix32() == "sha256:0mdqa9w1p6cmli6976v4wi0sw9r4p5prkj7lzfd1877wk11c9c73"
    assert EMPTY.base16() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@given(hashes)
def test_every_spelling_is_read(value: Hash) -> None:
    bases = [value.base16(), encode(value.digest), base64.b64encode(value.digest).decode()]
    for digits in bases:
        assert Hash.parse(f"{value.algo}:{digits}") == value
        assert Hash.parse(digits, value.algo) == value
    assert Hash.parse(value.sri()) == Hash.parse(value.sri(), value.algo) == value
    assert Hash.parse(value.nix32()) == value


def test_upper_case_hexadecimal_is_read() -> None:
    assert Hash.parse(f"sha256:{EMPTY.base16().upper()}") == EMPTY


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no hash algorithm"),
        (EMPTY.base16(), "names no hash algorithm"),
        (f"blake9:{EMPTY.base16()}", "names no hash algorithm"),
        ("sha256:", "0 characters fit none"),
        ("sha256:" + "0" * 51, "51 characters fit none"),
        ("sha256-" + EMPTY.base16(), "64 characters fit none"),  # SRI is base 64 only
        ("sha256:" + "g" * 64, "no sha256 hash"),
        ("sha256:" + "0 " * 32, "no sha256 hash"),
        ("sha256:" + "e" * 52, "nix32"),
        ("sha256:" + "!" * 44, "no sha256 hash"),
        ("sha256:" + "é" * 44, "no sha256 hash"),
        ("sha256-" + "A" * 44, "32 bytes, not 33"),
    ],
)
def test_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidHash, match=complaint):
        Hash.parse(text)


def test_the_algorithm_must_agree() -> None:
    with pytest.raises(InvalidHash, match="a sha256 hash where sha512 is needed"):
        Hash.parse(EMPTY.sri(), "sha512")


def test_a_digest_has_its_size() -> None:
    with pytest.raises(InvalidHash, match="32 bytes, not 20"):
        Hash("sha256", bytes(20))
    with pytest.raises(InvalidHash, match="no hash algorithm"):
        Hash("crc32", bytes(4))  # type: ignore[arg-type]
