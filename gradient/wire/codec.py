"""Messages to frames and back. Pure; the only importer of msgspec.

A frame is the MessagePack array `[tag, map]`. Frames come from peers and are hostile until decoded:
the size is checked first, nothing is allocated for a length a frame merely claims (msgspec grows what
it reads), and every way a frame can be wrong ends in `RemoteProtocolError`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeAlias, cast

import attrs
import msgspec

from gradient.wire.errors import LocalProtocolError, RemoteProtocolError
from gradient.wire.messages import TAG_OF, TAGS

Message: TypeAlias = attrs.AttrsInstance

# An EvalResult of 5,000 derivations is about 3.5 MB: the largest message, with room to spare.
FRAME_LIMIT: Final = 8 * 2**20  # bytes
# A handshake message is a few hundred bytes; a stranger gets no more memory than this.
FRAME_LIMIT_BEFORE_AUTH: Final = 64 * 2**10  # bytes

_ENVELOPE: Final = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Any]]] = {
    tag: msgspec.msgpack.Decoder(cls) for tag, cls in TAGS.items()
}
_ENCODER: Final = msgspec.msgpack.Encoder()

# RecursionError: a map nested deeper than the interpreter's stack, in a field nobody reads.
_MALFORMED: Final = (msgspec.DecodeError, RecursionError)


def encode(message: Message) -> bytes:
    """The frame of `message`.

    Raises LocalProtocolError for a value that is no message or is larger than FRAME_LIMIT.
    """
    tag = TAG_OF.get(type(message))
    if tag is None:
        raise LocalProtocolError(f"{type(message).__name__} is not a message of the protocol")
    frame = _ENCODER.encode((tag, message))
    if len(frame) > FRAME_LIMIT:
        raise LocalProtocolError(
            f"{type(message).__name__} of {len(frame)} bytes is over the limit of {FRAME_LIMIT}: split it"
        )
    return frame


def decode(frame: bytes, allowed: AbstractSet[type], limit: int = FRAME_LIMIT) -> Message:
    """The message in `frame`, which the peer must be allowed to send (FROM_WORKER, FROM_SERVER).

    Raises RemoteProtocolError, and nothing else, whatever the bytes are. The text names the message
    and the field, never a value: a token must not reach a log this way.
    """
    if len(frame) > limit:
        raise RemoteProtocolError(f"frame of {len(frame)} bytes is over the limit of {limit}")
    try:
        tag, body = _ENVELOPE.decode(frame)
    except _MALFORMED as error:
        raise RemoteProtocolError(f"frame is not [tag, message]: {error}") from None
    cls = TAGS.get(tag)
    if cls is None:
        raise RemoteProtocolError(f"unknown message tag {tag}")
    if cls not in allowed:
        raise RemoteProtocolError(f"{cls.__name__} is not allowed here")
    try:
        return cast(Message, _DECODERS[tag].decode(body))
    except _MALFORMED as error:
        raise RemoteProtocolError(f"{cls.__name__}: {error}") from None
