"""The narinfo file: what a binary cache says of one store path. Layer: nar, pure.

Source: NixOS/nix, src/libstore/nar-info.cc.
"""

from __future__ import annotations

from typing import Final, Self

import attrs

from gradient.model import NarRecord
from gradient.nar.errors import InvalidNarInfo
from gradient.nar.signing import fingerprint
from gradient.nix.errors import NixError
from gradient.nix.hashes import Hash
from gradient.nix.store_path import STORE_DIR, StorePath

CONTENT_TYPE: Final = "text/x-nix-narinfo"
# About 10,000 references; the largest of nixpkgs has a few hundred.
MAX_SIZE: Final = 2**20  # bytes
# What old caches write for a deriver nobody knows.
_UNKNOWN_DERIVER: Final = "unknown-deriver"
_REPEATABLE: Final = "Sig"


@attrs.frozen
class NarInfo:
    """One narinfo. Hashes are `sha256:<nix32>`, sizes in bytes, `references` and `deriver` base names.

    `url` is relative to the cache, or absolute."""

    store_path: str
    url: str
    compression: str
    nar_hash: str
    nar_size: int
    file_hash: str | None = None
    file_size: int | None = None
    references: tuple[str, ...] = ()
    deriver: str | None = None
    signatures: tuple[str, ...] = ()
    ca: str | None = None

    @classmethod
    def of(cls, record: NarRecord, signatures: tuple[str, ...] = ()) -> Self:
        """The narinfo of a NAR in our cache."""
        return cls(
            store_path=record.store_path,
            url=nar_url(record.file_hash),
            compression="zstd",
            nar_hash=record.nar_hash,
            nar_size=record.nar_size,
            file_hash=record.file_hash,
            file_size=record.file_size,
            references=record.references,
            deriver=record.deriver,
            signatures=signatures,
            ca=record.ca,
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a narinfo; unknown fields are passed over, as Nix does. Raises InvalidNarInfo."""
        fields, signatures = _fields(text)
        try:
            return cls(
                store_path=StorePath.parse(_required(fields, "StorePath")).path(),
                url=_required(fields, "URL"),
                compression=fields.get("Compression") or "bzip2",
                nar_hash=Hash.parse(_required(fields, "NarHash")).nix32(),
                nar_size=_size(fields, "NarSize"),
                file_hash=Hash.parse(fields["FileHash"]).nix32() if "FileHash" in fields else None,
                file_size=_size(fields, "FileSize") if "FileSize" in fields else None,
                references=tuple(_base_name(name) for name in fields.get("References", "").split()),
                deriver=_deriver(fields.get("Deriver", "")),
                signatures=signatures,
                ca=fields.get("CA") or None,
            )
        except NixError as error:
            raise InvalidNarInfo(f"this is no valid narinfo: {error}") from error

    def render(self) -> str:
        """The text. Raises InvalidNarInfo for a value with a line break, which would be a line of its own."""
        lines = [
            ("StorePath", self.store_path),
            ("URL", self.url),
            ("Compression", self.compression),
            ("FileHash", self.file_hash),
            ("FileSize", self.file_size),
            ("NarHash", self.nar_hash),
            ("NarSize", self.nar_size),
            ("References", " ".join(self.references)),
            ("Deriver", self.deriver),
            *(("Sig", signature) for signature in self.signatures),
            ("CA", self.ca),
        ]
        return "".join(_line(key, str(value)) for key, value in lines if value is not None)

    def fingerprint(self) -> str:
        """What the signatures cover."""
        references = (f"{STORE_DIR}/{name}" for name in self.references)
        return fingerprint(self.store_path, self.nar_hash, self.nar_size, references)


def nar_url(file_hash: str) -> str:
    """Where our cache serves the NAR whose compressed form has this hash (`sha256:<nix32>`)."""
    return f"nar/{file_hash.removeprefix('sha256:')}.nar.zst"


def _fields(text: str) -> tuple[dict[str, str], tuple[str, ...]]:
    if len(text) > MAX_SIZE:
        raise InvalidNarInfo(f"a narinfo of {len(text)} characters; {MAX_SIZE} is the limit")
    fields: dict[str, str] = {}
    signatures = []
    for line in text.splitlines():
        key, colon, value = line.partition(": ")
        if not colon and not line.endswith(":"):
            raise InvalidNarInfo(f"a line of the narinfo is not in the form 'Key: value': {line[:80]!r}")
        if key == _REPEATABLE:
            signatures.append(value)
        elif key in fields:
            raise InvalidNarInfo(f"the narinfo has {key!r} twice")
        else:
            fields[key.removesuffix(":")] = value
    return fields, tuple(signatures)


def _required(fields: dict[str, str], key: str) -> str:
    if not fields.get(key):
        raise InvalidNarInfo(f"the narinfo has no {key}")
    return fields[key]


def _size(fields: dict[str, str], key: str) -> int:
    text = _required(fields, key)
    if not (text.isascii() and text.isdigit() and len(text) <= 19) or int(text) == 0:
        raise InvalidNarInfo(f"the {key} of the narinfo is no size: {text[:40]!r}")
    return int(text)


def _deriver(text: str) -> str | None:
    return None if text in ("", _UNKNOWN_DERIVER) else _base_name(text)


def _base_name(text: str) -> str:
    return StorePath.from_base(text).base_name


def _line(key: str, value: str) -> str:
    if "\n" in value or "\r" in value:
        raise InvalidNarInfo(f"the {key} of a narinfo cannot have a line break: {value[:80]!r}")
    return f"{key}: {value}\n"
