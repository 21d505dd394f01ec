"""Reading `FLAKE[#ATTR]`, as `nix build` reads it. Layer: rank 0, pure.

Which folder a bare path means (the git repository around it) is for the caller to find out: nothing
here looks at the file system. There is no flake registry, so a bare name is refused.

Source: NixOS/nix, src/nix/flake.md, "URL-like syntax".
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

from gradient.nix.errors import excerpt
from gradient.nix.flake_ref import (
    ARCHIVE_SUFFIXES,
    FORGE_HOSTS,
    BadFlakeRef,
    FlakeKind,
    FlakeRef,
    make_flake_ref,
    parse_query,
)

MAX_LENGTH: Final = 8192  # characters; servers refuse longer URLs

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*):(.*)")
_INDIRECT: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(?:/[A-Za-z0-9@][A-Za-z0-9_./@+-]*)?")
_SCP_LIKE: Final = re.compile(r"([^/@:]+@[^/@:]+):(.*)")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_FORGES: Final = {kind.value: kind for kind in FORGE_HOSTS}
_REPOSITORY_HOSTS: Final = frozenset({"github.com", "gitlab.com", "codeberg.org"})


class IndirectFlakeRef(BadFlakeRef):
    """A name for a flake registry. `path` is the folder that may have been meant."""

    def __init__(self, text: str) -> None:
        self.path = f"./{text}"
        super().__init__(
            f"{excerpt(text)} is a name for a flake registry, and none is used here: "
            f"write {self.path} for a folder, or a URL such as github:OWNER/REPOSITORY"
        )


def parse_flake(text: str) -> tuple[FlakeRef, str]:
    """The reference and the fragment, "" without one, of `FLAKE[#ATTR]`; raises BadFlakeRef."""
    reference, _, fragment = text.partition("#")
    return parse_flake_ref(reference), unquote(fragment)


def parse_flake_ref(text: str) -> FlakeRef:
    """Read a reference without fragment; "" is the current folder. Raises BadFlakeRef, and its subclass
    IndirectFlakeRef for a bare name."""
    if len(text) > MAX_LENGTH:
        raise BadFlakeRef(f"{excerpt(text)} is longer than {MAX_LENGTH} characters")
    if "#" in text:
        raise BadFlakeRef(f"{excerpt(text)} has a fragment (#…) where only a flake is wanted")
    base, _, query = text.partition("?")
    if _INDIRECT.fullmatch(base):
        raise IndirectFlakeRef(base)
    attributes = parse_query(query)
    if scheme := _SCHEME.fullmatch(base):
        return _parse_url(scheme[1], scheme[2], attributes)
    if scp := _SCP_LIKE.fullmatch(base):
        raise BadFlakeRef(f"{excerpt(text)} is no flake reference: write git+ssh://{scp[1]}/{scp[2]}")
    return make_flake_ref(FlakeKind.FOLDER, base or ".", attributes)


def _parse_url(scheme: str, rest: str, attributes: dict[str, str]) -> FlakeRef:
    application, _, transport = scheme.rpartition("+")
    url = f"{transport}:{rest}"
    match application or transport:
        case "path":
            return _parse_path(rest, attributes)
        case "git":
            return make_flake_ref(FlakeKind.GIT, url, attributes)
        case "github" | "gitlab" | "sourcehut" as forge:
            return _parse_forge(_FORGES[forge], rest, attributes)
        case "flake":
            raise IndirectFlakeRef(rest)
        case "tarball":
            return make_flake_ref(FlakeKind.TARBALL, url, attributes)
        case "file" if application:
            return make_flake_ref(FlakeKind.FILE, url, attributes)
        case "http" | "https" | "file":
            _refuse_repository(url)
            return make_flake_ref(FlakeKind.TARBALL, url, attributes)
        case _:
            raise BadFlakeRef(
                f"flakes cannot be fetched by {excerpt(scheme)}: use a path, git+https, git+ssh, git+file, "
                "github, gitlab, sourcehut, or the URL of an archive"
            )


def _parse_path(rest: str, attributes: dict[str, str]) -> FlakeRef:
    if rest.startswith("//"):
        raise BadFlakeRef(f"{excerpt('path:' + rest)} has a host part: write path:/ABSOLUTE/PATH")
    return make_flake_ref(FlakeKind.PATH, unquote(rest) or ".", attributes)


def _parse_forge(kind: FlakeKind, rest: str, attributes: dict[str, str]) -> FlakeRef:
    owner, *more = (unquote(part) for part in rest.split("/"))
    if not more:
        raise BadFlakeRef(f"{excerpt(rest)} is incomplete: write {kind.value}:OWNER/REPOSITORY")
    repository, *version = more
    if version:
        name = "rev" if _COMMIT.fullmatch(version[0]) and len(version) == 1 else "ref"
        if name in attributes:
            raise BadFlakeRef(f"{kind.value}:{rest} gives its {name} twice")
        attributes = {**attributes, name: "/".join(version)}
    return make_flake_ref(kind, f"{owner}/{repository}", attributes)


def _refuse_repository(url: str) -> None:
    """A web address of a repository is not an archive: Nix would fetch the page and fail on it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return  # refused where locations are checked
    is_page = parts.hostname in _REPOSITORY_HOSTS and parts.path.strip("/").count("/") == 1
    if parts.path.endswith(".git") or (is_page and not parts.path.endswith(ARCHIVE_SUFFIXES)):
        raise BadFlakeRef(f"{excerpt(url)} is a repository, not an archive: write git+{url}")
