"""Flake references: reading, the canonical text, cloning, evaluating, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.model import CachedSource
from gradient.nix.flake_ref import BadFlakeRef, FlakeKind, FlakeRef, GitSource, evaluation_url, git_source
from gradient.nix.flake_url import MAX_LENGTH, IndirectFlakeRef, parse_flake, parse_flake_ref

REV = "0123456789abcdef0123456789abcdef01234567"
SRI = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
ESCAPED_SRI = "sha256-47DEQpj8HBSa%2B%2FTImW%2B5JCeuQeRkm5NMpJWZG3hSuFU%3D"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", FlakeRef(FlakeKind.FOLDER, ".")),
        (".", FlakeRef(FlakeKind.FOLDER, ".")),
        ("./a b", FlakeRef(FlakeKind.FOLDER, "./a b")),
        ("../x?dir=sub", FlakeRef(FlakeKind.FOLDER, "../x", dir="sub")),
        ("/abs/%41", FlakeRef(FlakeKind.FOLDER, "/abs/%41")),  # a path is taken as it is
        ("a.b/c", FlakeRef(FlakeKind.FOLDER, "a.b/c")),
        ("path:.", FlakeRef(FlakeKind.PATH, ".")),
        ("path:/a%20b", FlakeRef(FlakeKind.PATH, "/a b")),
        ("git+https://h/r.git", FlakeRef(FlakeKind.GIT, "https://h/r.git")),
        (
            f"git+ssh://git@h:22/r?ref=refs/heads/x&rev={REV}&dir=./a//b/&submodules=1&shallow=0&revCount=7",
            FlakeRef(
                FlakeKind.GIT,
                "ssh://git@h:22/r",
                dir="a/b",
                ref="refs/heads/x",
                rev=REV,
                submodules=True,
                rev_count=7,
            ),
        ),
        ("git+file:///srv/r", FlakeRef(FlakeKind.GIT, "file:///srv/r")),
        ("git://h/r?key=v", FlakeRef(FlakeKind.GIT, "git://h/r", extra=(("key", "v"),))),
        ("github:o/r", FlakeRef(FlakeKind.GITHUB, "o/r")),
        ("github:o/r/v1.0", FlakeRef(FlakeKind.GITHUB, "o/r", ref="v1.0")),
        ("github:o/r/a/b", FlakeRef(FlakeKind.GITHUB, "o/r", ref="a/b")),
        (f"github:o/r/{REV}?host=git.corp", FlakeRef(FlakeKind.GITHUB, "o/r", rev=REV, host="git.corp")),
        ("gitlab:group%2Fsub/r?ref=main", FlakeRef(FlakeKind.GITLAB, "group/sub/r", ref="main")),
        ("sourcehut:~u/r", FlakeRef(FlakeKind.SOURCEHUT, "~u/r")),
        (
            "https://h/x.tar.gz?token=a%26b",
            FlakeRef(FlakeKind.TARBALL, "https://h/x.tar.gz", extra=(("token", "a&b"),)),
        ),
        ("https://h/archive/main", FlakeRef(FlakeKind.TARBALL, "https://h/archive/main")),
        ("tarball+file:///x", FlakeRef(FlakeKind.TARBALL, "file:///x")),
        ("file+https://h/x", FlakeRef(FlakeKind.FILE, "https://h/x")),
        (
            f"path:/x?narHash={SRI}&lastModified=5",
            FlakeRef(FlakeKind.PATH, "/x", nar_hash=SRI, last_modified=5),
        ),
    ],
)
def test_reading_and_the_canonical_text(text: str, expected: FlakeRef) -> None:
    assert parse_flake_ref(text) == expected
    assert parse_flake_ref(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (f"git+https://h/r?rev={REV}&dir=a/b&ref=main", f"git+https://h/r?dir=a/b&ref=main&rev={REV}"),
        ("github:o/r?ref=main&dir=x", "github:o/r/main?dir=x"),
        ("gitlab:g%2Fs/r", "gitlab:g%2Fs/r"),
        ("tarball+https://h/x.tar.gz", "https://h/x.tar.gz"),
        ("https://h/x", "tarball+https://h/x"),
        ("path:a%20b?narHash=" + ESCAPED_SRI, "path:a%20b?narHash=" + ESCAPED_SRI),
        ("git+https://h/r?a=%3Fb%23", "git+https://h/r?a=%3Fb%23"),
    ],
)
def test_one_canonical_text(text: str, canonical: str) -> None:
    assert str(parse_flake_ref(text)) == canonical


@pytest.mark.parametrize(
    ("text", "reference", "fragment"),
    [
        (".#hello", ".", "hello"),
        ("#hello", ".", "hello"),
        ("github:o/r", "github:o/r", ""),
        ("./x#packages.%22a.b%22", "./x", 'packages."a.b"'),
        ("./x?dir=y#a#b", "./x?dir=y", "a#b"),
    ],
)
def test_the_fragment(text: str, reference: str, fragment: str) -> None:
    flake, found = parse_flake(text)
    assert (str(flake), found) == (reference, fragment)


@pytest.mark.parametrize(
    "text", ["nixpkgs", "nixpkgs/nixos-24.05", "flake:nixpkgs", "examples/hello", "nixpkgs?dir=lib"]
)
def test_there_is_no_registry(text: str) -> None:
    with pytest.raises(IndirectFlakeRef, match=r"none is used here: write \./"):
        parse_flake_ref(text)


def test_a_registry_name_may_have_meant_a_folder() -> None:
    with pytest.raises(IndirectFlakeRef) as caught:
        parse_flake("examples/hello#x")
    assert caught.value.path == "./examples/hello"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("git@github.com:o/r.git", r"write git\+ssh://git@github.com/o/r.git"),
        ("https://github.com/o/r", r"write git\+https://github.com/o/r"),
        ("https://h/r.git", r"write git\+https"),
        ("hg+https://h/r", "cannot be fetched by 'hg"),
        ("git+ext::sh -c x", "cannot be fetched: only"),
        ("git+https:///r", "no host"),
        ("git+https://-oProxyCommand=x/r", "no host"),
        ("git+ssh://-oProxyCommand=x@h/r", "no host"),
        ("git+https://[::1/r", "no URL"),
        ("git+https://h:99999/r", "no URL"),
        ("git+file://host/r", "file:///ABSOLUTE"),
        ("git+file:r", "file:///ABSOLUTE"),
        ("path://host/x", "host part"),
        ("path:/x?ref=main", "no attribute 'ref'"),
        ("path:/x?submodules=1", "no attribute 'submodules'"),
        ("./x?foo=1", "no attribute 'foo'"),
        ("github:o", "OWNER/REPOSITORY"),
        ("github:o/", "OWNER/REPOSITORY"),
        ("github:o/..", "OWNER/REPOSITORY"),
        ("github:-o/r", "OWNER/REPOSITORY"),
        ("github:o/r%0a", "control characters"),
        (f"github:o/r/{REV}?ref=main", "both a ref and a rev"),
        (f"github:o/r/{REV}?rev={REV}", "twice"),
        ("github:o/r?host=-x", "host name"),
        ("git+https://h/r?ref=a&ref=b", "twice"),
        ("git+https://h/r?ref=--upload-pack=x", "not a branch or tag"),
        ("git+https://h/r?ref=a..b", "not a branch or tag"),
        ("git+https://h/r?ref=a%0ab", "not a branch or tag"),
        ("git+https://h/r?rev=abc123", "full commit hash"),
        ("git+https://h/r?dir=../x", "leads out"),
        ("git+https://h/r?dir=/x", "leads out"),
        ("git+https://h/r?submodules=yes", "0 or 1"),
        ("path:/x?lastModified=-1", "whole number"),
        ("path:/x?lastModified=" + "9" * 30, "whole number"),
        ("path:/x?narHash=md5-x", "no hash"),
        ("./a\nb", "control characters"),
        ("./a\0", "control characters"),
        ("./" + "x" * MAX_LENGTH, "longer than"),
    ],
)
def test_refused_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(BadFlakeRef, match=complaint) as caught:
        parse_flake_ref(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@given(st.text(max_size=60), st.sampled_from(["", "git+https://h/", "github:", "path:", "./", "https://"]))
def test_any_text_is_read_or_refused_and_rendering_is_stable(text: str, start: str) -> None:
    with contextlib.suppress(BadFlakeRef):
        flake = parse_flake_ref(start + text)
        if flake.kind is not FlakeKind.FOLDER:  # the text of a bare path may look like anything
            assert parse_flake_ref(str(flake)) == flake


def test_a_clone() -> None:
    flake = parse_flake_ref(f"git+https://h/r?ref=main&rev={REV}&dir=d&submodules=1&shallow=1&allRefs=1&k=v")
    assert git_source(flake) == GitSource("https://h/r?k=v", "main", REV, "d", submodules=True, shallow=True)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("git+file:///srv/r", "file:///srv/r"),
        ("github:o/r", "https://github.com/o/r.git"),
        ("github:o/r?host=git.corp", "https://git.corp/o/r.git"),
        ("gitlab:g%2Fs/r", "https://gitlab.com/g/s/r.git"),
        ("sourcehut:~u/r", "https://git.sr.ht/~u/r"),
    ],
)
def test_what_git_clones(text: str, url: str) -> None:
    source = git_source(parse_flake_ref(text))
    assert source is not None
    assert source.clone_url == url


def test_what_git_does_not_clone() -> None:
    assert git_source(parse_flake_ref("path:/x")) is None
    assert git_source(parse_flake_ref("https://h/x.tar.gz")) is None
    with pytest.raises(BadFlakeRef, match="lfs is not supported"):
        git_source(parse_flake_ref("git+https://h/r?lfs=1"))


def test_the_url_that_evaluates_a_source() -> None:
    path = "/nix/store/qw11052q9dgdk42hh9flakabnrjkc3pq-source"
    assert evaluation_url(CachedSource(path)) == f"path:{path}"
    source = CachedSource(path, nar_hash=SRI, rev=REV, last_modified=1700000000, rev_count=3, dir="a/b")
    assert evaluation_url(source) == (
        f"path:{path}?dir=a/b&lastModified=1700000000&narHash={ESCAPED_SRI}&rev={REV}&revCount=3"
    )
