"""The errors of NARs and their storage. Layer: nar. Each says in words what is wrong with which thing."""

from __future__ import annotations


class NarError(Exception):
    """Base of every error of this package."""


class UnsupportedTree(NarError):
    """The tree cannot be a NAR: a socket, a forbidden name, too deep, or it changed while it was read."""


class InvalidNar(NarError):
    """The bytes are not the NAR they claim to be, or not one at all."""


class InvalidKey(NarError):
    """The text is no signing key, or a signature is not in the form `name:base64`."""


class InvalidNarInfo(NarError):
    """The text is no narinfo."""


class InvalidGrant(NarError):
    """The token is forged, expired, or for something else."""


class BadUpload(NarError):
    """What was uploaded is not what it claims to be; nothing of it was kept."""


class NoSuchObject(NarError):
    """The store has no object of this key."""


class StoreUnavailable(NarError):
    """The object store failed or could not be reached: the state of the object is unknown."""
