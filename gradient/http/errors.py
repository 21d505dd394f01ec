"""What can go wrong with a request, under one base. A status of 400 or more is an answer, not an error.

Texts name scheme, host and port; never a path or query, which may carry a token.
"""

from __future__ import annotations


class HttpError(Exception):
    """Base: there is no usable answer."""


class BadUrl(HttpError):
    """Not an http:// or https:// URL."""


class ConnectFailed(HttpError):
    """No connection: unknown host, refused, no route, TLS. Nothing was sent."""


class ConnectionLost(HttpError):
    """The connection broke before the answer was complete; the request may have been carried out."""


class ProtocolFault(HttpError):
    """What came back is no answer: not HTTP, not the JSON it should be, too many redirects."""


class AnswerTooLarge(ProtocolFault):
    """The answer is larger than its limit; the rest was not read."""


class BadBody(HttpError):
    """The body handed to us is shorter or longer than was announced."""
