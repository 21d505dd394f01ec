"""nix32 against Nix's own vectors, as round trips, and against what it must refuse."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.nix import base32

# Printed by `nix hash to-base32` for the hash of each text.
VECTORS = [
    ("md5", b"", "3y8bwfr609h3lh9ch0izcqq7fl"),
    ("sha1", b"abc", "kpcd173cq987hw957sx6m0868wv3x6d9"),
    ("sha256", b"", "0mdqa9w1p6cmli6976v4wi0sw9r4p5prkj7lzfd1877wk11c9c73"),
    ("sha256", b"abc", "1b8m03r63zqhnjf7l5wnldhh7c134ap5vpj0850ymkq1iyzicy5s"),
    (
        "sha512",
        b"abc",
        "2gs8k559z4rlahfx0y688s49m2vvszylcikrfinm30ly9rak69236nkam5ydvly1ai7xac99vxfc4ii84hawjbk876blyk1jfhkbbyx",
    ),
]


@pytest.mark.parametrize(("algo", "text", "encoded"), VECTORS)
def test_vectors_of_nix(algo: str, text: bytes, encoded: str) -> None:
    digest = hashlib.new(algo, text).digest()
    assert base32.encode(digest) == encoded
    assert base32.decode(encoded) == digest


@given(st.binary(max_size=70))
def test_round_trip(data: bytes) -> None:
    encoded = base32.encode(data)
    assert len(encoded) == base32.encoded_length(len(data))
    assert base32.decode(encoded) == data


@given(st.text(alphabet=base32.ALPHABET, max_size=70))
def test_every_text_has_one_meaning_or_none(text: str) -> None:
    try:
        data = base32.decode(text)
    except base32.InvalidNix32:
        return
    assert base32.encode(data) == text


@pytest.mark.parametrize(
    "text",
    [
        "e" * 32,  # not in the alphabet
        "A" * 32,
        "0" * 31 + "\n",
        "0" * 31 + "٣",  # a digit elsewhere
        " " + "0" * 31,
        "_" + "0" * 31,
        "0" * 33,  # no number of bytes has 33 digits
        "z" + "0" * 51,  # 260 bits are more than 32 bytes hold
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(base32.InvalidNix32):
        base32.decode(text)
