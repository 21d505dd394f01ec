"""Keys, signatures and narinfo files."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.model import NarRecord
from gradient.nar.errors import InvalidKey, InvalidNarInfo
from gradient.nar.narinfo import NarInfo, nar_url
from gradient.nar.signing import PublicKey, SecretKey, fingerprint
from gradient.nix.hashes import Hash

PUBLIC = str(SecretKey.generate("cache-1").public_key())
HELLO = "/nix/store/1b9p07z77phvv2hf6gm9f28syp39f1ag-hello-2.12"
HASH = Hash.of(b"hello").nix32()
RECORD = NarRecord(
    store_path=HELLO,
    nar_hash=HASH,
    nar_size=226560,
    file_hash=Hash.of(b"file").nix32(),
    file_size=50264,
    references=("1b9p07z77phvv2hf6gm9f28syp39f1ag-hello-2.12", "hsk71z8admvgykn7vzjy11dfnar9f4r1-glibc-2.35"),
    deriver="sg3sw1zdddfkl3hk639asml56xsxw8pf-hello-2.12.drv",
)


def test_a_key_survives_its_text() -> None:
    key = SecretKey.generate("cache-1")
    assert SecretKey.parse(key.text() + "\n") == key
    assert PublicKey.parse(str(key.public_key())) == key.public_key()


def test_a_secret_key_does_not_show_itself() -> None:
    key = SecretKey.generate("cache-1")
    secret = key.text().partition(":")[2]
    for shown in (repr(key), str(key), f"{key}", repr([key])):
        assert "cache-1" in shown
        assert secret[:20] not in shown
        assert repr(key._seed) not in shown
    with pytest.raises(InvalidKey) as error:
        SecretKey.parse(key.text()[:-4])
    assert secret[:20] not in str(error.value)


def test_only_the_right_key_and_message_verify() -> None:
    key, other = SecretKey.generate("a-1"), SecretKey.generate("a-1")
    signature = key.sign("message")
    assert key.public_key().verify("message", signature)
    assert not key.public_key().verify("messages", signature)
    assert not other.public_key().verify("message", signature)
    assert not key.public_key().verify("message", signature.replace("a-1:", "b-1:"))
    for nonsense in ("", "a-1:", "a-1:AAAA", "a-1", signature[:-2]):
        assert not key.public_key().verify("message", nonsense)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\n"])
def test_a_key_needs_a_plain_name(name: str) -> None:
    with pytest.raises(InvalidKey, match="name"):
        SecretKey.generate(name)


@pytest.mark.parametrize("text", ["", "cache-1", "cache-1:", "cache-1:!!!!", "cache-1:AAAA", PUBLIC])
def test_other_text_is_no_secret_key(text: str) -> None:
    with pytest.raises(InvalidKey):
        SecretKey.parse(text)


def test_halves_of_two_keys_are_refused() -> None:
    one, two = SecretKey.generate("a"), SecretKey.generate("a")
    mixed = attrs.evolve(one, seed=two._seed)
    text = one.text()
    assert SecretKey.parse(mixed.text()) == mixed
    with pytest.raises(InvalidKey, match="halves"):
        SecretKey.parse(text[:40] + mixed.text()[40:])


def test_the_fingerprint_sorts_references() -> None:
    assert fingerprint(HELLO, HASH, 5, ["/nix/store/b", "/nix/store/a"]) == (
        f"1;{HELLO};{HASH};5;/nix/store/a,/nix/store/b"
    )
    assert fingerprint(HELLO, HASH, 5, []).endswith(";5;")


def test_a_narinfo_survives_its_text() -> None:
    info = NarInfo.of(RECORD, ("a-1:xx", "b-1:yy"))
    text = info.render()
    assert NarInfo.parse(text) == info
    assert text.startswith(f"StorePath: {HELLO}\nURL: {nar_url(RECORD.file_hash)}\nCompression: zstd\n")
    assert text.endswith("Sig: a-1:xx\nSig: b-1:yy\n")


def test_a_narinfo_without_references_and_deriver() -> None:
    info = NarInfo.of(attrs.evolve(RECORD, references=(), deriver=None))
    assert "References: \n" in info.render()
    assert NarInfo.parse(info.render()) == info
    assert NarInfo.parse(info.render().replace("References: ", "References:")) == info


def test_what_others_write_is_read() -> None:
    info = NarInfo.parse(
        f"StorePath: {HELLO}\nURL: nar/x.nar.bz2\nNarHash: {Hash.of(b'hello').sri()}\nNarSize: 8\n"
        "Deriver: unknown-deriver\nSystem: x86_64-linux\n"
    )
    assert (info.compression, info.deriver, info.nar_hash) == ("bzip2", None, HASH)


VALID = NarInfo.of(RECORD).render()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (HELLO, "/nix/store/../etc/passwd"),
        (HELLO, f"{HELLO}/bin"),
        ("NarSize: 226560\n", ""),
        ("NarSize: 226560", "NarSize: 0"),
        ("NarSize: 226560", "NarSize: -1"),
        ("NarSize: 226560", "NarSize: 1e9"),
        ("NarSize: 226560", "NarSize: 99999999999999999999"),
        ("NarSize: 226560", "NarSize: 1\nNarSize: 2"),
        ("NarHash: sha256:", "NarHash: sha257:"),
        ("URL: ", "Url: "),
        ("glibc", "../glibc"),
        ("Deriver: ", "Deriver: /nix/store/"),
        ("Compression: zstd", "nonsense"),
    ],
)
def test_a_damaged_narinfo_is_refused(old: str, new: str) -> None:
    assert old in VALID
    with pytest.raises(InvalidNarInfo):
        NarInfo.parse(VALID.replace(old, new))


@given(st.text())
def test_any_text_is_a_narinfo_or_an_error(text: str) -> None:
    with pytest.raises(InvalidNarInfo):
        NarInfo.parse(text)


def test_an_oversized_narinfo_is_not_looked_at() -> None:
    with pytest.raises(InvalidNarInfo, match="limit"):
        NarInfo.parse(VALID + "X: y\n" * 300_000)


def test_a_value_cannot_become_another_line() -> None:
    with pytest.raises(InvalidNarInfo, match="line break"):
        attrs.evolve(NarInfo.of(RECORD), ca="fixed:r:sha256:x\nSig: evil").render()
