"""Ed25519 signatures of store paths, in Nix's text forms. Layer: nar, pure.

Keys and signatures are `name:base64`; the name tells a client which of its trusted keys to try. A
secret key's 64 bytes are the seed and the public key, as `nix-store --generate-binary-cache-key` writes.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Final, Self

import attrs
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gradient.nar.errors import InvalidKey

_SEED_SIZE: Final = 32  # bytes, as a public key's
_SIGNATURE_SIZE: Final = 64  # bytes
# Blanks and colons would end the name where it is read.
_NAME: Final = re.compile(r"[^\s:]{1,255}")


@attrs.frozen
class PublicKey:
    """What a client trusts (`trusted-public-keys`)."""

    name: str
    data: bytes

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `name:base64`; raises InvalidKey."""
        return cls(*_parse(text, _SEED_SIZE, "public key"))

    def verify(self, message: str, signature: str) -> bool:
        """Whether `signature` (`name:base64`) is this key's for `message`; false for anything else."""
        try:
            name, data = _parse(signature, _SIGNATURE_SIZE, "signature")
            Ed25519PublicKey.from_public_bytes(self.data).verify(data, message.encode())
        except (InvalidKey, InvalidSignature):
            return False
        return name == self.name

    def __str__(self) -> str:
        return _text(self.name, self.data)


@attrs.frozen
class SecretKey:
    """What signs. Shows itself only through `text()`."""

    name: str
    _seed: bytes = attrs.field(repr=False)
    # The same, expanded: which takes as long as a signature.
    _private: Ed25519PrivateKey = attrs.field(init=False, repr=False, eq=False)

    @_private.default
    def _expanded(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self._seed)

    @classmethod
    def generate(cls, name: str) -> Self:
        """A new key; raises InvalidKey for a name with blanks or a colon."""
        _check_name(name, "secret key")
        return cls(name, Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `name:base64`; raises InvalidKey, also when the public half is another key's."""
        name, data = _parse(text.strip(), 2 * _SEED_SIZE, "secret key")
        key = cls(name, data[:_SEED_SIZE])
        if key.public_key().data != data[_SEED_SIZE:]:
            raise InvalidKey(f"the two halves of the secret key {name!r} do not belong together")
        return key

    def public_key(self) -> PublicKey:
        """The key that verifies what this one signs."""
        public = self._private.public_key()
        return PublicKey(self.name, public.public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, message: str) -> str:
        """The signature of `message` (a fingerprint) as `name:base64`."""
        return _text(self.name, self._private.sign(message.encode()))

    def text(self) -> str:
        """The key itself, for a file of mode 0600."""
        return _text(self.name, self._seed + self.public_key().data)


def fingerprint(store_path: str, nar_hash: str, nar_size: int, references: Iterable[str]) -> str:
    """What a signature covers. `nar_hash` is `sha256:<nix32>`; paths are full."""
    return f"1;{store_path};{nar_hash};{nar_size};{','.join(sorted(references))}"


def _parse(text: str, size: int, what: str) -> tuple[str, bytes]:
    name, _, encoded = text.partition(":")
    _check_name(name, what)
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if len(data) != size:
        # Never the text itself: it may be a secret.
        raise InvalidKey(f"the {what} {name!r} is not in the form name:base64 with {size} bytes")
    return name, data


def _check_name(name: str, what: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise InvalidKey(f"a {what} needs a name without blanks and colons")


def _text(name: str, data: bytes) -> str:
    return f"{name}:{base64.b64encode(data).decode()}"
