"""NARs, listings, keys, signatures and narinfo files against a real Nix."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gradient.model import NarRecord
from gradient.nar.errors import UnsupportedTree
from gradient.nar.format import MAX_DEPTH
from gradient.nar.hashing import HashingSink
from gradient.nar.listing import list_tree
from gradient.nar.narinfo import NarInfo
from gradient.nar.pack import pack_small
from gradient.nar.restore import restore
from gradient.nar.signing import PublicKey, SecretKey
from gradient.nar.tree import Directory, Node, Symlink, regular_file
from gradient.nar.unpack import decompress
from gradient.nar.writer import dump_path, dump_tree
from tests.noise import noise

pytestmark = pytest.mark.nix

# Names whose order differs between bytes, code points and locales, and some that are no UTF-8.
ODD_NAMES = [
    "ä".encode(),
    "\U0001f600".encode(),
    "\ufb01".encode(),
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"new\nline",
    b"-rf",
    b" ",
    b"~",
    b"...",
    b"A",
    b"a",
    b"a.b",
    b"a-b",
    b"a" * 255,
]
REFERENCE = "00000000000000000000000000000001-reference"
HELLO = "/nix/store/00000000000000000000000000000002-hello"


class Nix:
    """The commands of one Nix installation, offline."""

    def __init__(self, nix: str) -> None:
        self._nix = Path(nix)

    def store(self, *arguments: str | Path, data: bytes = b"") -> bytes:
        return self._run(self._nix.with_name("nix-store"), *arguments, data=data)

    def __call__(self, *arguments: str | Path) -> bytes:
        features = ["--extra-experimental-features", "nix-command"]
        return self._run(self._nix, *features, "--option", "substitute", "false", *arguments)

    def _run(self, *command: str | Path, data: bytes = b"") -> bytes:
        # Its own state: what Nix caches of a binary cache must not outlive the test's.
        done = subprocess.run(command, input=data, capture_output=True, check=False)
        if done.returncode:
            raise AssertionError(f"{command} failed:\n{done.stderr.decode(errors='replace')}")
        return done.stdout


@pytest.fixture
def real(nix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nix:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache-home"))
    return Nix(nix)


def ours(path: Path) -> bytes:
    return b"".join(dump_path(path))


def make(folder: Path) -> None:
    """A tree with a bit of everything."""
    for size in (0, 1, 7, 8, 9, 63, 4096, 2**18 - 1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20):
        (folder / f"size-{size}").write_bytes(noise(size))
    for mode in (0o400, 0o644, 0o755, 0o700, 0o655, 0o711, 0o611):
        path = folder / f"mode-{mode:o}"
        path.write_bytes(b"x")
        path.chmod(mode)
    odd = os.fsencode(folder / "odd")
    os.mkdir(odd)
    for name in ODD_NAMES:
        Path(os.fsdecode(odd + b"/" + name)).write_bytes(name)
    os.symlink(b"\xff\n", odd + b"/link-bytes")
    os.symlink(b"t" * 4095, odd + b"/link-long")
    (folder / "empty" / "empty").mkdir(parents=True)
    (folder / "many").mkdir()
    for number in range(500):
        (folder / "many" / str(number)).write_bytes(b"%d" % number * number)
    (folder / "dangling").symlink_to("nowhere/at/all")
    (folder / "to-folder").symlink_to("many")
    deep = folder
    for number in range(40):
        deep /= f"d{number}"
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"deep")


def test_every_kind_of_tree_has_the_bytes_of_nix(real: Nix, tmp_path: Path) -> None:
    make(tmp_path)
    assert ours(tmp_path) == real.store("--dump", tmp_path)


def test_roots_of_every_kind(real: Nix, tmp_path: Path) -> None:
    make(tmp_path)
    for name in ("size-0", "size-9", "mode-755", "dangling", "to-folder", "empty"):
        assert ours(tmp_path / name) == real.store("--dump", tmp_path / name)


def test_what_we_write_nix_restores_and_back(real: Nix, tmp_path: Path) -> None:
    make(tmp_path)
    data = ours(tmp_path)
    restore(tmp_path / "ours", [data])
    real.store("--restore", tmp_path / "theirs", data=data)
    assert real.store("--dump", tmp_path / "ours") == data
    assert ours(tmp_path / "theirs") == data


def test_the_deepest_tree_we_write_nix_accepts(real: Nix, tmp_path: Path) -> None:
    tree: Node = regular_file(b"")
    for _ in range(MAX_DEPTH - 1):
        tree = Directory([(b"d", tree)])
    real.store("--restore", tmp_path / "deep", data=b"".join(dump_tree(tree)))
    with pytest.raises(UnsupportedTree, match="deeper"):
        list(dump_tree(Directory([(b"d", tree)])))


def test_the_listing_is_that_of_nix(real: Nix, tmp_path: Path) -> None:
    tree = Directory(
        [
            (b"bin", Directory([(b"tool", regular_file(b"#!/bin/sh", executable=True))])),
            (b"data", regular_file(b"hello")),
            (b"link", Symlink(b"bin/tool")),
        ]
    )
    nar = tmp_path / "x.nar"
    nar.write_bytes(b"".join(dump_tree(tree)))
    theirs = json.loads(real("nar", "ls", "--json", "--recursive", nar, "/"))
    assert list_tree([nar.read_bytes()])["root"] == theirs


# --- keys and signatures --------------------------------------------------------------------------


@pytest.fixture
def key(real: Nix, tmp_path: Path) -> SecretKey:
    """A key that Nix made."""
    real.store("--generate-binary-cache-key", "test-1", tmp_path / "secret", tmp_path / "public")
    key = SecretKey.parse((tmp_path / "secret").read_text())
    assert key.text() == (tmp_path / "secret").read_text().strip()
    assert key.public_key() == PublicKey.parse((tmp_path / "public").read_text().strip())
    return key


def test_a_cache_of_ours_is_one_to_nix(real: Nix, key: SecretKey, tmp_path: Path) -> None:
    """A real client, which trusts one key only, fetches from files that we wrote, references included."""
    cache, fetched = tmp_path / "cache", tmp_path / "fetched"
    publish(cache, key, f"/nix/store/{REFERENCE}", ())
    info = publish(cache, key, HELLO, (REFERENCE, HELLO.rpartition("/")[2]))
    trusted = ["--option", "require-sigs", "true", "--option", "trusted-public-keys"]
    copy = ["copy", "--from", f"file://{cache}", "--to", fetched, HELLO]

    other = SecretKey.generate("test-1").public_key()
    with pytest.raises(AssertionError, match="signature"):
        real(*copy, *trusted, str(other))
    real(*copy, *trusted, str(key.public_key()))

    real("store", "verify", "--recursive", "--store", fetched, *trusted, str(key.public_key()), HELLO)
    assert (fetched / HELLO.lstrip("/") / "hello").read_bytes() == HELLO.encode()
    shown = json.loads(real("path-info", "--json", "--recursive", "--store", fetched, HELLO))
    infos = list(shown.values()) if isinstance(shown, dict) else shown
    assert len(infos) == 2
    assert info.signatures[0] in {signature for found in infos for signature in found["signatures"]}


def publish(cache: Path, key: SecretKey, store_path: str, references: tuple[str, ...]) -> NarInfo:
    """Put one small path into a cache of plain files."""
    (cache / "nar").mkdir(parents=True, exist_ok=True)
    (cache / "nix-cache-info").write_text("StoreDir: /nix/store\n")
    data, result = pack_small(Directory([(b"hello", regular_file(store_path.encode()))]))
    record = NarRecord(
        store_path, result.nar_hash, result.nar_size, result.file_hash, result.file_size, references
    )
    info = NarInfo.of(record, (key.sign(NarInfo.of(record).fingerprint()),))
    (cache / info.url).write_bytes(data)
    (cache / f"{store_path.removeprefix('/nix/store/')[:32]}.narinfo").write_text(info.render())
    return info


def test_our_signature_is_the_one_of_nix(real: Nix, key: SecretKey, tmp_path: Path) -> None:
    """Ed25519 is deterministic: the same key and fingerprint give the same bytes."""
    cache, fetched = tmp_path / "cache", tmp_path / "fetched"
    info = publish(cache, SecretKey.generate("other"), HELLO, ())
    real("copy", "--no-check-sigs", "--from", f"file://{cache}", "--to", fetched, HELLO)
    real("store", "sign", "--store", fetched, "--key-file", tmp_path / "secret", HELLO)
    shown = json.loads(real("path-info", "--json", "--store", fetched, HELLO))
    (found,) = shown.values() if isinstance(shown, dict) else shown
    assert key.sign(info.fingerprint()) in found["signatures"]


def test_what_nix_writes_we_read(real: Nix, key: SecretKey, tmp_path: Path) -> None:
    """A narinfo and NAR of `nix copy --to file://`, in each compression that we read."""
    cache, fetched = tmp_path / "cache", tmp_path / "fetched"
    publish(cache, key, HELLO, ())
    real("copy", "--no-check-sigs", "--from", f"file://{cache}", "--to", fetched, HELLO)
    for compression in ("zstd", "xz", "none"):
        theirs = tmp_path / compression
        url = f"file://{theirs}?compression={compression}&secret-key={tmp_path / 'secret'}"
        real("copy", "--no-check-sigs", "--from", fetched, "--to", url, HELLO)
        (narinfo,) = theirs.glob("*.narinfo")
        info = NarInfo.parse(narinfo.read_text())
        assert info.compression == compression
        assert any(key.public_key().verify(info.fingerprint(), signature) for signature in info.signatures)
        sink = HashingSink()
        for chunk in decompress([(theirs / info.url).read_bytes()], info.nar_size):
            sink.update(chunk)
        assert (sink.hash().nix32(), sink.size) == (info.nar_hash, info.nar_size)
