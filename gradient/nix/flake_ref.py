"""Flake references as values: kind, location and checked attributes, and their URL. Layer: rank 0, pure.

`flake_url` reads them from text, `flake_lock` from lock files. Locations, refs and revs end up in the
arguments of git and Nix: what could be taken for an option there is refused here.

Source: NixOS/nix, src/nix/flake.md, "Flake references".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

import attrs

from gradient.model import CachedSource
from gradient.nix.errors import NixError, excerpt
from gradient.nix.hashes import Hash, InvalidHash


class BadFlakeRef(NixError):
    """This is no flake reference that we can follow."""


class FlakeKind(Enum):
    """How the source is found. The values are the `type` in lock files."""

    FOLDER = "folder"  # a bare path: the git repository around it, if there is one. Never in lock files
    PATH = "path"  # the tree at a path, as it is
    GIT = "git"
    GITHUB = "github"
    GITLAB = "gitlab"
    SOURCEHUT = "sourcehut"
    TARBALL = "tarball"
    FILE = "file"


FORGE_HOSTS: Final = {
    FlakeKind.GITHUB: "github.com",
    FlakeKind.GITLAB: "gitlab.com",
    FlakeKind.SOURCEHUT: "git.sr.ht",
}
ARCHIVE_SUFFIXES: Final = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2", ".tar.zst")

GIT_SCHEMES: Final = frozenset({"git", "http", "https", "ssh", "file"})
FILE_SCHEMES: Final = frozenset({"http", "https", "file"})


@attrs.frozen
class FlakeRef:
    """A flake reference without its fragment.

    `location` is a path (folder, path), the URL that git clones (git), `owner/repo` (forges), or the URL
    of the file (tarball, file); URLs are without query. `dir` is the folder of `flake.nix` below the
    source, "" for its top; `nar_hash` is SRI; `last_modified` is in seconds since the epoch. `extra` is
    the rest of the query: for the server of the URL, or for Nix.
    """

    kind: FlakeKind
    location: str
    dir: str = ""
    ref: str | None = None
    rev: str | None = None
    nar_hash: str | None = None
    last_modified: int | None = None
    rev_count: int | None = None
    submodules: bool = False
    shallow: bool = False
    host: str | None = None  # of a forge, when it is not the usual one
    extra: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return render_flake_ref(self)


# --- making one -----------------------------------------------------------------------------------


def make_flake_ref(kind: FlakeKind, location: str, attributes: Mapping[str, str]) -> FlakeRef:
    """The reference with the attributes of a query or a lock file; raises BadFlakeRef for a value, a
    location or a name that this kind cannot have."""
    fields: dict[str, Any] = {}
    extra: list[tuple[str, str]] = []
    for name, value in attributes.items():
        if name in _FIELDS and _allows(kind, name):
            field, read = _FIELDS[name]
            fields[field] = read(value, name)
        elif kind in _KEEPS_EXTRA:
            extra.append((name, value))
        else:
            raise BadFlakeRef(f"a {kind.value} flake reference has no attribute {excerpt(name)}")
    _check_location(kind, location)
    if kind in FORGE_HOSTS and "ref" in fields and "rev" in fields:
        raise BadFlakeRef(f"{excerpt(location)} has both a ref and a rev: give one of them")
    return FlakeRef(kind, location, extra=tuple(sorted(extra)), **fields)


def parse_query(query: str) -> dict[str, str]:
    """The attributes of a URL's query; raises BadFlakeRef when one has two values."""
    found: dict[str, str] = {}
    for item in filter(None, query.split("&")):
        name, value = (unquote(part) for part in item.partition("=")[::2])
        if found.setdefault(name, value) != value:
            raise BadFlakeRef(f"the query {excerpt(query)} gives {excerpt(name)} twice")
    return found


def _text(pattern: str, what: str) -> Callable[[str, str], str]:
    compiled = re.compile(pattern, re.ASCII)

    def read(value: str, name: str) -> str:
        if compiled.fullmatch(value) is None:
            raise BadFlakeRef(f"the {name} {excerpt(value)} of a flake reference is not {what}")
        return value

    return read


def _number(value: str, name: str) -> int:
    return int(_text(r"[0-9]{1,18}", "a whole number")(value, name))


def _flag(value: str, name: str) -> bool:
    return _text(r"[01]?", "0 or 1")(value, name) == "1"


def _nar_hash(value: str, name: str) -> str:
    try:
        return Hash.parse(value, "sha256").sri()
    except InvalidHash as error:
        raise BadFlakeRef(f"the {name} of a flake reference is no hash: {error}") from error


def _folder(value: str, name: str) -> str:
    parts = [part for part in value.split("/") if part not in ("", ".")]
    if value.startswith("/") or ".." in parts:
        raise BadFlakeRef(f"the {name} {excerpt(value)} of a flake reference leads out of its source")
    return "/".join(parts)


# What git allows in a ref, less what could be an option or a pathspec.
_REF: Final = r"(?!.*(?:\.\.|//|@\{|/\.|\.lock(?:/|\Z)))[0-9A-Za-z@][0-9A-Za-z_./@+#=-]*(?<![./])"
_HOST: Final = r"[0-9A-Za-z][0-9A-Za-z.-]*(?::[0-9]{1,5})?"

# Attribute -> field and reader.
_FIELDS: Final[dict[str, tuple[str, Callable[[str, str], Any]]]] = {
    "dir": ("dir", _folder),
    "ref": ("ref", _text(_REF, "a branch or tag")),
    "rev": ("rev", _text(r"[0-9a-f]{40}|[0-9a-f]{64}", "a full commit hash")),
    "narHash": ("nar_hash", _nar_hash),
    "lastModified": ("last_modified", _number),
    "revCount": ("rev_count", _number),
    "submodules": ("submodules", _flag),
    "shallow": ("shallow", _flag),
    "host": ("host", _text(_HOST, "a host name")),
}
_KEEPS_EXTRA: Final = frozenset({FlakeKind.GIT, FlakeKind.TARBALL, FlakeKind.FILE})


def _allows(kind: FlakeKind, name: str) -> bool:
    match name:
        case "ref":
            return kind is FlakeKind.GIT or kind in FORGE_HOSTS
        case "submodules" | "shallow":
            return kind is FlakeKind.GIT
        case "host":
            return kind in FORGE_HOSTS
        case _:
            return True


def _check_location(kind: FlakeKind, location: str) -> None:
    if any(ord(character) < ord(" ") or character == "\x7f" for character in location):
        raise BadFlakeRef(f"{excerpt(location)} has control characters")
    if kind in FORGE_HOSTS:
        _text(r"[~\w][\w.-]*(?:/\w[\w.-]*)+", "OWNER/REPOSITORY")(location, "location")
    elif kind is FlakeKind.GIT:
        _check_url(location, GIT_SCHEMES)
    elif kind in _KEEPS_EXTRA:
        _check_url(location, FILE_SCHEMES)


def _check_url(url: str, schemes: frozenset[str]) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError as error:
        raise BadFlakeRef(f"{excerpt(url)} is no URL: {error}") from error
    if parts.scheme not in schemes:
        raise BadFlakeRef(f"{excerpt(url)} cannot be fetched: only {', '.join(sorted(schemes))} can")
    if parts.scheme == "file":
        if host or not parts.path.startswith("/"):
            raise BadFlakeRef(f"{excerpt(url)} names no file: write file:///ABSOLUTE/PATH")
    elif not host or host.startswith("-") or parts.netloc.startswith("-"):
        raise BadFlakeRef(f"{excerpt(url)} names no host")


# --- writing it -----------------------------------------------------------------------------------


def render_flake_ref(flake: FlakeRef) -> str:
    """The reference as one canonical text: the same for every spelling, and Nix reads it alike."""
    query = _query(flake)
    match flake.kind:
        case FlakeKind.FOLDER:
            base = flake.location
        case FlakeKind.PATH:
            base = f"path:{quote(flake.location, safe='/')}"
        case FlakeKind.GIT:
            base = flake.location if flake.location.startswith("git:") else f"git+{flake.location}"
        case FlakeKind.TARBALL:
            is_plain = urlsplit(flake.location).path.endswith(ARCHIVE_SUFFIXES)
            base = flake.location if is_plain else f"tarball+{flake.location}"
        case FlakeKind.FILE:
            base = f"file+{flake.location}"
        case _:
            base = _forge_base(flake)
            query = [(name, value) for name, value in query if name not in ("ref", "rev")]
    return f"{base}?{'&'.join(_pair(*pair) for pair in query)}" if query else base


def _forge_base(flake: FlakeRef) -> str:
    owner, _, repository = flake.location.rpartition("/")
    version = flake.rev or flake.ref
    parts = [quote(owner, safe="~"), repository, *([quote(version, safe="/")] if version else [])]
    return f"{flake.kind.value}:{'/'.join(parts)}"


def _query(flake: FlakeRef) -> list[tuple[str, str]]:
    pairs = list(flake.extra)
    for name, (field, _) in _FIELDS.items():
        match getattr(flake, field):
            case None | False | "":
                pass
            case True:
                pairs.append((name, "1"))
            case value:
                pairs.append((name, str(value)))
    return sorted(pairs)


def _pair(name: str, value: str) -> str:
    return f"{quote(name, safe='')}={quote(value, safe='' if name == 'narHash' else '/')}"


# --- using it -------------------------------------------------------------------------------------


@attrs.frozen
class GitSource:
    """What to clone: `clone_url` is what git takes; `ref` and `rev` are never options of git."""

    clone_url: str
    ref: str | None
    rev: str | None
    dir: str
    submodules: bool
    shallow: bool


# Attributes that make a checkout differ from the tree of its commit, or ask for more checks.
_MORE_THAN_A_CLONE: Final = frozenset({"lfs", "verifyCommit", "publicKey", "publicKeys", "keytype"})
# Attributes for Nix, not for the server.
_FOR_NIX: Final = frozenset({"allRefs", "exportIgnore", "name"})


def git_source(flake: FlakeRef) -> GitSource | None:
    """The repository of a git or forge reference, None for another kind.

    Raises BadFlakeRef for an attribute that a clone does not honour, such as `lfs`.
    """
    if flake.kind in FORGE_HOSTS:
        suffix = "" if flake.kind is FlakeKind.SOURCEHUT else ".git"
        url = f"https://{flake.host or FORGE_HOSTS[flake.kind]}/{flake.location}{suffix}"
    elif flake.kind is FlakeKind.GIT:
        url = _clone_url(flake)
    else:
        return None
    return GitSource(url, flake.ref, flake.rev, flake.dir, flake.submodules, flake.shallow)


def _clone_url(flake: FlakeRef) -> str:
    for name, _ in flake.extra:
        if name in _MORE_THAN_A_CLONE:
            raise BadFlakeRef(f"{excerpt(str(flake))}: the attribute {name} is not supported")
    for_server = [pair for pair in flake.extra if pair[0] not in _FOR_NIX]
    return f"{flake.location}?{urlencode(for_server)}" if for_server else flake.location


def evaluation_url(source: CachedSource) -> str:
    """The flake URL that evaluates a source in the store with the attributes it was fetched with."""
    return render_flake_ref(
        FlakeRef(
            kind=FlakeKind.PATH,
            location=source.store_path,
            dir=source.dir,
            rev=source.rev,
            nar_hash=source.nar_hash,
            last_modified=source.last_modified,
            rev_count=source.rev_count,
        )
    )
