"""Lock files: their graph, where each input comes from, and what a hostile one does."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.model import CachedSource
from gradient.nix import flake_lock as module
from gradient.nix.flake_lock import BadFlakeLock, FlakeLock, parse_flake_lock
from gradient.nix.flake_wrapper import wrap_flake

REV = "0123456789abcdef0123456789abcdef01234567"
SRI = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
SOURCE = "/nix/store/qw11052q9dgdk42hh9flakabnrjkc3pq-source"

GITHUB = {"type": "github", "owner": "o", "repo": "r", "rev": REV, "narHash": SRI, "lastModified": 5}
NODES: dict[str, Any] = {
    "root": {"inputs": {"lib": "lib", "app": "app", "same": ["app", "lib"], "loop": ["loop"], "self": []}},
    "lib": {"locked": GITHUB, "original": {"type": "github", "owner": "o", "repo": "r"}},
    "app": {
        "inputs": {"lib": ["lib"], "data": "data", "sub": "sub"},
        "locked": {
            "type": "git",
            "url": "https://git.example.org/app?key=v",
            "ref": "main",
            "rev": REV,
            "revCount": 3,
            "submodules": True,
            "dir": "flake",
            "narHash": SRI,
        },
    },
    "data": {"flake": False, "locked": {"type": "tarball", "url": "https://h/x.tar.gz", "narHash": SRI}},
    "sub": {"locked": {"type": "path", "path": "./sub"}, "parent": ["app"]},
}


def lock(nodes: Any = NODES, *, version: Any = 7, root: Any = "root") -> FlakeLock:
    return parse_flake_lock(json.dumps({"nodes": nodes, "root": root, "version": version}).encode())


def with_locked(**attributes: Any) -> module.LockedInput:
    found = lock({"root": {"inputs": {"x": "x"}}, "x": {"locked": attributes}}).nodes["x"].locked
    assert found is not None
    return found


@pytest.mark.parametrize("version", [5, 6, 7])
def test_the_graph(version: int) -> None:
    found = lock(version=version)
    assert found.root_inputs == ("app", "lib", "loop", "same", "self")
    assert found.resolve() == "root"
    assert found.resolve("app") == "app"
    assert found.resolve("app", "lib") == found.resolve("same") == found.resolve("lib") == "lib"
    assert found.resolve("app", "data") == "data"
    assert found.resolve("self", "app", "data") == "data"
    assert not found.nodes["data"].is_flake


@pytest.mark.parametrize(
    ("path", "complaint"), [(["loop"], "in a circle"), (["app", "no"], "app/no: 'no' is missing")]
)
def test_inputs_that_lead_nowhere(path: list[str], complaint: str) -> None:
    with pytest.raises(BadFlakeLock, match=complaint):
        lock().resolve(*path)


def test_where_inputs_come_from() -> None:
    inputs = lock().locked_inputs
    escaped = "sha256-47DEQpj8HBSa%2B%2FTImW%2B5JCeuQeRkm5NMpJWZG3hSuFU%3D"
    assert {key: found.url for key, found in inputs.items()} == {
        "lib": f"github:o/r/{REV}?lastModified=5&narHash={escaped}",
        "app": f"git+https://git.example.org/app?dir=flake&key=v&narHash={escaped}&ref=main&rev={REV}"
        "&revCount=3&submodules=1",
        "data": f"https://h/x.tar.gz?narHash={escaped}",
    }
    assert {key: found.domain for key, found in inputs.items()} == {
        "lib": "github.com",
        "app": "example.org",
        "data": "h",
    }
    assert inputs["lib"].attributes == GITHUB
    asked = {key: found.asked_urls[0] for key, found in inputs.items()}
    assert (asked["app"], asked["data"]) == ("https://git.example.org/app?key=v", "https://h/x.tar.gz")


def test_the_predicted_store_path() -> None:
    """Of a source without any file: `nix-store --add` of an empty folder named `source`."""
    found = with_locked(type="path", path="/x", narHash="sha256-pQpattmS9VmO3ZIQUFn66az8GSmB4IvYhTTCFn6SUmo=")
    assert found.store_path is not None
    assert found.store_path.path() == "/nix/store/0ccnxa25whszw7mgbgyzdm4nqc0zwnm8-source"


def test_relative_inputs_are_not_fetched() -> None:
    sub = lock().nodes["sub"].locked
    assert sub is not None
    assert sub.is_relative
    assert (sub.nar_hash, sub.store_path, sub.domain) == (None, None, "")


@pytest.mark.parametrize(
    ("attributes", "domain"),
    [
        ({"type": "github", "owner": "o", "repo": "r", "host": "api.Git.Corp.example:8443"}, "corp.example"),
        ({"type": "sourcehut", "owner": "~u", "repo": "r"}, "sr.ht"),
        ({"type": "gitlab", "owner": "g/s", "repo": "r"}, "gitlab.com"),
        ({"type": "git", "url": "ssh://git@git.example.org:22/r"}, "example.org"),
        ({"type": "tarball", "url": "https://192.0.2.7/x.tar.gz"}, "192.0.2.7"),
        ({"type": "file", "url": "https://[2001:DB8::1]/x"}, "2001:db8::1"),
        ({"type": "git", "url": "file:///srv/r"}, ""),
        ({"type": "path", "path": "//[x:y"}, ""),
    ],
)
def test_domains(attributes: dict[str, Any], domain: str) -> None:
    assert with_locked(**attributes).domain == domain


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ({"type": "hg", "url": "https://h/r"}, "type 'hg' are not supported"),
        ({"type": "indirect", "id": "nixpkgs"}, "type 'indirect' are not supported"),
        ({"type": "folder"}, "not supported"),
        ({}, "not supported"),
        ({"type": "github", "owner": "o"}, "without owner and repo"),
        ({"type": "git", "url": "ext::sh"}, "cannot be fetched"),
        ({"type": "git", "url": "https://h/r", "ref": "--x"}, "not a branch"),
    ],
)
def test_a_source_for_nix_alone(attributes: dict[str, Any], problem: str) -> None:
    found = with_locked(**attributes, narHash=SRI)
    assert (found.reference, found.url, found.domain) == (None, None, "")
    assert found.problem is not None
    assert problem in found.problem
    assert found.store_path is not None  # a narHash tells it all the same


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "the file is not an object"),
        (b"{}", "version 'None'"),
        (b'{"version":true,"nodes":{},"root":"root"}', "version 'True'"),
        (b'{"version":4}', "version '4', and only 5 to 7"),
        (b'{"version":8}', "version '8'"),
        (b'{"version":7}', "its nodes is not an object"),
        (b'{"version":7,"nodes":{}}', "no root node"),
        (b'{"version":7,"nodes":{},"root":[]}', "no root node"),
        (b'{"version":7,"nodes":{"r":[]},"root":"r"}', "node 'r' is not an object"),
        (b'{"version":7,"nodes":{"r":{"inputs":[]}},"root":"r"}', "inputs of 'r'"),
        (b'{"version":7,"nodes":{"r":{"inputs":{"a":1}}},"root":"r"}', "neither a node nor"),
        (b'{"version":7,"nodes":{"r":{"inputs":{"a":[1]}}},"root":"r"}', "neither a node nor"),
        (b'{"version":7,"nodes":{"r":{"inputs":{"a":"b"}}},"root":"r"}', "'r/a' names a missing node"),
        (b'{"version":7,"nodes":{"r":{"locked":1}},"root":"r"}', "source of 'r' is not an object"),
        (b'{"version":7,"nodes":{"r":{"locked":{"type":[]}}},"root":"r"}', "not plain"),
        (b'{"version":7,"nodes":{"r":{"locked":{"narHash":"x"}}},"root":"r"}', "narHash of 'r' is malformed"),
    ],
)
def test_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(BadFlakeLock, match=complaint) as caught:
        parse_flake_lock(data)
    assert str(caught.value).startswith("flake.lock")


def test_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SIZE", 10)
    with pytest.raises(BadFlakeLock, match="more than the 10"):
        lock()


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from(["root", "app", "lib"]), st.sampled_from(["inputs", "locked", "flake", "parent"]), junk
)
def test_a_hostile_node_is_read_or_refused(key: str, member: str, value: Any) -> None:
    with contextlib.suppress(BadFlakeLock):
        found = lock({**NODES, key: {**NODES[key], member: value}})
        for node in found.locked_inputs.values():
            assert isinstance(node.domain, str)
        for name in found.root_inputs:
            found.resolve(name)


def test_a_wrapped_flake_has_its_own_inputs_one_level_down() -> None:
    source = CachedSource(SOURCE, nar_hash=SRI, rev=REV, last_modified=5, rev_count=3, dir='a"${b}')
    data = json.dumps({"nodes": NODES, "root": "root", "version": 7}).encode()
    wrapper = wrap_flake(source, data)
    wrapped, inner = parse_flake_lock(wrapper.flake_lock.encode()), parse_flake_lock(data)
    assert wrapped.root_inputs == ("source",)
    assert wrapped.resolve("source") == "root"
    for path in (["app", "lib"], ["same"], ["self", "app", "data"], ["lib"]):
        assert wrapped.resolve("source", *path) == inner.resolve(*path)
    assert json.loads(wrapper.flake_lock)["nodes"]["sub"]["parent"] == ["source", "app"]
    assert 'dir = "a\\"\\${b}";' in wrapper.flake_nix


def test_a_flake_without_a_lock_file_is_wrapped_too() -> None:
    wrapped = parse_flake_lock(wrap_flake(CachedSource(SOURCE, dir="sub"), None).flake_lock.encode())
    assert wrapped.nodes[wrapped.resolve("source")].inputs == {}
    with pytest.raises(BadFlakeLock):
        wrap_flake(CachedSource(SOURCE, dir="sub"), b"{}")
