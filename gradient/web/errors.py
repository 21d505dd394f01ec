"""The errors of this package; each is an HTTP answer. Layer: web."""

from __future__ import annotations

from typing import ClassVar, Final

from gradient.graph.pg_errors import DATABASE_ERRORS
from gradient.graph.writer import WriterStopped
from gradient.nar.errors import StoreUnavailable

# What keeps a request from being answered now, and is no fault of it: try again.
UNAVAILABLE: Final[tuple[type[Exception], ...]] = (*DATABASE_ERRORS, WriterStopped, StoreUnavailable)


class WebError(Exception):
    """Base: answered with `status` and the message as its one line."""

    status: ClassVar[int] = 500


class BadRequest(WebError):
    """The request is not in order; the message says what is not."""

    status = 400


class Unauthorized(WebError):
    """The token is missing or wrong."""

    status = 401


class NotFound(WebError):
    """There is no such thing."""

    status = 404


class Conflict(WebError):
    """It cannot be done as things stand; the message says why."""

    status = 409


class BodyStalled(WebError):
    """The client stopped sending in the middle of its request."""

    status = 408


class BodyTooLarge(WebError):
    """The request is larger than anything this path takes."""

    status = 413


class NotRecorded(WebError):
    """The server could not record it now; trying again later may work."""

    status = 503


class PortInUse(Exception):
    """Somebody else listens there; the message names the address."""
