"""NAR writer and reader against each other, and against the rules, for any tree and any byte split."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.nar.errors import InvalidNar, UnsupportedTree
from gradient.nar.format import (
    CLOSE,
    CONTENTS,
    DIRECTORY,
    ENTRY,
    ENTRY_NODE,
    EXECUTABLE,
    MAGIC,
    MAX_DEPTH,
    NODE,
    REGULAR,
    SYMLINK,
    TARGET,
    U64,
    regular_nar_size,
    string,
)
from gradient.nar.hashing import hash_nar
from gradient.nar.listing import list_tree
from gradient.nar.reader import (
    DirectoryBegins,
    DirectoryEnds,
    Event,
    FileBegins,
    FileData,
    NarEnds,
    NarParser,
    SymlinkFound,
    parse,
)
from gradient.nar.restore import restore
from gradient.nar.tree import Directory, Node, Regular, Symlink, regular_file
from gradient.nar.writer import dump_path, dump_tree
from tests.unit.open_files import open_below

# A tree as plain Python values, to compare: bytes and bool, a target, or a dict of names.
Plain = tuple[bytes, bool] | bytes | dict[bytes, "Plain"]

names = st.binary(min_size=1, max_size=12).filter(
    lambda name: name not in (b".", b"..") and not set(name) & {0, ord("/")}
)
files = st.tuples(st.binary(max_size=40), st.booleans())
targets = st.binary(min_size=1, max_size=20).filter(lambda target: 0 not in target)
trees = st.recursive(files | targets, lambda child: st.dictionaries(names, child, max_size=4), max_leaves=12)


def node(plain: Plain) -> Node:
    if isinstance(plain, bytes):
        return Symlink(plain)
    if isinstance(plain, tuple):
        return regular_file(plain[0], executable=plain[1])
    return Directory((name, node(child)) for name, child in sorted(plain.items()))


def plain_tree(events: Iterator[Event]) -> Plain:
    """The tree that events describe."""
    top: dict[bytes, Plain] = {}
    stack = [top]
    last = b""
    for event in events:
        match event:
            case DirectoryBegins(name=name):
                child: dict[bytes, Plain] = {}
                stack[-1][name] = child
                stack.append(child)
            case DirectoryEnds():
                stack.pop()
            case SymlinkFound(name=name, target=target):
                stack[-1][name] = target
            case FileBegins(name=name, executable=executable):
                last = name
                stack[-1][name] = (b"", executable)
            case FileData(data=data):
                so_far = stack[-1][last]
                assert isinstance(so_far, tuple)
                stack[-1][last] = (so_far[0] + data, so_far[1])
    return top[b""]


def nar(plain: Plain) -> bytes:
    return b"".join(dump_tree(node(plain)))


def regular(data: bytes) -> bytes:
    return NODE + REGULAR + CONTENTS + string(data) + CLOSE


def entry(name: bytes, child: bytes) -> bytes:
    return ENTRY + string(name) + ENTRY_NODE + child + CLOSE


def directory(*entries: bytes) -> bytes:
    return NODE + DIRECTORY + b"".join(entries) + CLOSE


@given(trees)
def test_what_is_written_is_read_back(tree: Plain) -> None:
    data = nar(tree)
    assert plain_tree(parse([data], len(data))) == tree


@given(trees, st.integers(1, 40))
def test_any_split_of_the_bytes_gives_the_same_tree(tree: Plain, step: int) -> None:
    data = nar(tree)
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    assert plain_tree(parse(pieces, len(data))) == tree


@given(trees)
def test_disk_and_back(tmp_path_factory: pytest.TempPathFactory, tree: Plain) -> None:
    path = tmp_path_factory.mktemp("restore") / "tree"
    data = nar(tree)
    restore(path, [data])
    assert b"".join(dump_path(path)) == data


@given(trees, st.data())
def test_no_byte_may_change_unless_it_is_content(tree: Plain, data: st.DataObject) -> None:
    """A flipped bit is refused, or shows as another tree: no two byte strings mean the same tree."""
    good = nar(tree)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + bytes([good[at] ^ (1 << data.draw(st.integers(0, 7)))]) + good[at + 1 :]
    try:
        read = plain_tree(parse([bad], len(bad)))
    except InvalidNar:
        return
    assert read != tree
    assert nar(read) == bad


@given(trees, st.data())
def test_a_prefix_is_never_a_nar(tree: Plain, data: st.DataObject) -> None:
    good = nar(tree)
    with pytest.raises(InvalidNar, match="breaks off"):
        list(parse([good[: data.draw(st.integers(0, len(good) - 1))]]))


def test_chunks_are_large_and_large_content_is_not_copied() -> None:
    block = bytes(2**20)
    tree = Directory(
        [(b"a%05d" % number, regular_file(b"x" * 1000)) for number in range(3000)]
        + [(b"b", Regular(2 * len(block), False, (block, block)))]
    )
    chunks = list(dump_tree(tree))
    assert sum(chunk is block for chunk in chunks) == 2
    *full, before_blocks, last = [len(chunk) for chunk in chunks if chunk is not block]
    assert min(full) >= 2**18
    assert max(full) < 2**18 + 2**16
    assert before_blocks
    assert last


HOSTILE = {
    "no magic": b"nix-archive-2" + bytes(100),
    "unknown kind": MAGIC + NODE + string(b"devices") + CLOSE,
    "no contents": MAGIC + NODE + REGULAR + CLOSE,
    "executable twice": MAGIC + NODE + REGULAR + EXECUTABLE + EXECUTABLE + CONTENTS + string(b"") + CLOSE,
    "executable with a value": MAGIC
    + NODE
    + REGULAR
    + string(b"executable")
    + string(b"yes")
    + CONTENTS
    + string(b"")
    + CLOSE,
    "executable after contents": MAGIC + NODE + REGULAR + CONTENTS + string(b"") + EXECUTABLE + CLOSE,
    "two contents": MAGIC + NODE + REGULAR + CONTENTS + string(b"a") + CONTENTS + string(b"b") + CLOSE,
    "padding": MAGIC + NODE + REGULAR + CONTENTS + U64.pack(1) + b"a\0\0\0\0\0\1\0" + CLOSE,
    "padding of a name": MAGIC
    + directory(ENTRY + U64.pack(1) + b"a\0\0\0\0\0\0\1" + ENTRY_NODE + regular(b"") + CLOSE),
    "huge file": MAGIC + NODE + REGULAR + CONTENTS + U64.pack(2**64 - 1) + b"a",
    "huge name": MAGIC + NODE + DIRECTORY + ENTRY + U64.pack(2**40),
    "huge word": MAGIC + U64.pack(2**60),
    "huge target": MAGIC + NODE + SYMLINK + TARGET + U64.pack(4096),
    "empty target": MAGIC + NODE + SYMLINK + TARGET + string(b"") + CLOSE,
    "NUL in a target": MAGIC + NODE + SYMLINK + TARGET + string(b"a\0b") + CLOSE,
    "two roots": MAGIC + regular(b"") + regular(b""),
    "zeros after the end": MAGIC + regular(b"") + bytes(8),
    "not an entry": MAGIC + directory(string(b"entries") + string(b"(")),
    "entry without node": MAGIC + directory(ENTRY + string(b"a") + CLOSE),
    "unsorted": MAGIC + directory(entry(b"b", regular(b"")), entry(b"a", regular(b""))),
    "twice the same name": MAGIC + directory(entry(b"a", regular(b"")), entry(b"a", regular(b""))),
    "symlink then directory of its name": MAGIC
    + directory(
        entry(b"a", NODE + SYMLINK + TARGET + string(b"/etc") + CLOSE),
        entry(b"a", directory(entry(b"passwd", regular(b"")))),
    ),
    **{
        f"name {name!r}": MAGIC + directory(entry(name, regular(b"")))
        for name in (b"", b".", b"..", b"a/b", b"/", b"../x", b"a\0b", b"n" * 256)
    },
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("step", [1, 2**20])
def test_hostile_bytes_are_refused_and_write_nothing_outside(tmp_path: Path, data: bytes, step: int) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    chunks = [data[at : at + step] for at in range(0, len(data), step)]
    with pytest.raises(InvalidNar):
        restore(inside / "tree", chunks, 2**30)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert {path.name for path in inside.iterdir()} <= {"tree"}


def nested(levels: int) -> Plain:
    tree: Plain = (b"", False)
    for _ in range(levels):
        tree = {b"d": tree}
    return tree


def test_depth_has_the_same_limit_in_both_directions() -> None:
    deepest = nested(MAX_DEPTH - 1)
    assert plain_tree(parse([nar(deepest)])) == deepest
    with pytest.raises(UnsupportedTree, match="deeper"):
        nar(nested(MAX_DEPTH))
    inner = regular(b"")
    for _ in range(MAX_DEPTH):
        inner = directory(entry(b"d", inner))
    with pytest.raises(InvalidNar, match="deeper"):
        list(parse([MAGIC + inner]))


@pytest.mark.parametrize(
    "tree",
    [
        Directory([(b"b", Symlink(b"x")), (b"a", Symlink(b"x"))]),
        Directory([(b"a", Symlink(b"x")), (b"a", Symlink(b"x"))]),
        Directory([(b"..", Symlink(b"x"))]),
        Directory([(b"a/b", Symlink(b"x"))]),
        Symlink(b""),
        Regular(3, False, [b"ab"]),
        Regular(1, False, [b"ab"]),
        Regular(2**20, False, [bytes(2**20), b"x"]),
    ],
)
def test_the_writer_refuses_what_the_reader_would(tree: Node) -> None:
    with pytest.raises(UnsupportedTree):
        list(dump_tree(tree))


def test_the_declared_size_is_exact() -> None:
    data = nar((b"hello", False))
    with pytest.raises(InvalidNar, match="declared"):
        list(parse([data], len(data) - 1))
    with pytest.raises(InvalidNar, match="declared"):
        list(parse([data], len(data) + 1))


def test_a_file_larger_than_what_is_declared_is_refused_at_its_header() -> None:
    header = MAGIC + NODE + REGULAR + CONTENTS + U64.pack(1000)
    with pytest.raises(InvalidNar, match="a file of 1000 bytes"):
        NarParser(500).feed(header)


def test_an_unframed_nar_ends_by_itself() -> None:
    data = nar({b"a": (b"hello", False)})
    parser = NarParser(unframed=True)
    assert parser.feed(data[:100])
    assert not parser.ended
    assert parser.feed(data[100:] + b"next reply")[-1] == NarEnds(len(data))
    assert parser.ended
    assert parser.rest == b"next reply"


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("executable", [False, True])
def test_the_size_of_a_single_file_is_known_beforehand(size: int, executable: bool) -> None:
    assert regular_nar_size(size, executable=executable) == len(nar((bytes(size), executable)))


def test_hashing_counts_what_is_written() -> None:
    tree: Plain = {b"a": (b"hello", True)}
    assert hash_nar(node(tree)).size == len(nar(tree))


def test_the_listing_points_at_the_contents() -> None:
    data = nar({b"bin": {b"tool": (b"#!/bin/sh", True)}, b"link": b"bin/tool", b"none": {}})
    listing = list_tree([data])
    assert listing["version"] == 1
    entries = listing["root"]["entries"]
    tool = entries["bin"]["entries"]["tool"]
    assert data[tool["narOffset"] :].startswith(b"#!/bin/sh")
    assert (tool["size"], tool["executable"]) == (9, True)
    assert entries["link"] == {"type": "symlink", "target": "bin/tool"}
    assert entries["none"] == {"type": "directory", "entries": {}}


# --- trees on disk --------------------------------------------------------------------------------


def test_restore_needs_a_fresh_path(tmp_path: Path) -> None:
    data = nar({b"a": (b"", False)})
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "tree").symlink_to(target)
    with pytest.raises(FileExistsError):
        restore(tmp_path / "tree", [data])
    assert list(target.iterdir()) == []


def test_sockets_and_fifos_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UnsupportedTree, match="fifo"):
        list(dump_path(tmp_path))
    (tmp_path / "fifo").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tmp_path / "sock"))
        with pytest.raises(UnsupportedTree, match="sock"):
            list(dump_path(tmp_path))


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("size", [100, 2**21])
def test_a_file_that_changes_its_size_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, change: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    real_fstat = os.fstat

    def fstat_then_change(descriptor: int) -> os.stat_result:
        status = real_fstat(descriptor)
        os.truncate(path, size + change)
        return status

    monkeypatch.setattr(os, "fstat", fstat_then_change)
    with pytest.raises(UnsupportedTree, match="changed its size"):
        list(dump_path(path))


def test_descriptors_are_closed_when_the_dump_is_abandoned(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "large").write_bytes(bytes(2**21))
    chunks = dump_path(tmp_path)
    next(chunks)
    next(chunks)
    assert open_below(tmp_path) != []
    del chunks
    assert open_below(tmp_path) == []
