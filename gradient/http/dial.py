"""A byte stream to a host: TCP, and TLS when asked. The one place that opens client connections."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable

import trio

from gradient.http.errors import ConnectFailed
from gradient.http.url import Origin


async def dial(origin: Origin, tls: Callable[[], ssl.SSLContext]) -> trio.abc.Stream:
    """A stream to `origin`, encrypted with `tls()` if it is https; raises ConnectFailed."""
    try:
        return await open_stream(origin.host, origin.port, tls() if origin.tls else None)
    except ConnectFailed as error:
        raise ConnectFailed(f"{origin} {error}") from error


async def open_stream(host: str, port: int, tls: ssl.SSLContext | None) -> trio.abc.Stream:
    """Connect (trio sets TCP_NODELAY); with `tls` the handshake is done and the certificate checked.

    Raises ConnectFailed, in words that follow a name: "cannot be reached: ...".
    Cancelled: nothing is left open.
    """
    try:
        tcp = await trio.open_tcp_stream(host, port)
    except (OSError, UnicodeError) as error:
        raise ConnectFailed(f"cannot be reached: {_why(error)}") from error
    if tls is None:
        return tcp
    # https_compatible: the peers of this world close without a TLS goodbye.
    stream = trio.SSLStream(tcp, tls, server_hostname=host, https_compatible=True)
    done = False
    try:
        await stream.do_handshake()
        done = True
    except trio.BrokenResourceError as error:
        raise ConnectFailed(f"does not speak TLS as it should: {error.__cause__ or error}") from error
    finally:
        if not done:
            await trio.aclose_forcefully(stream)
    return stream


def _why(error: BaseException) -> str:
    """The first reason below trio's summary of all addresses it tried: "Connection refused"."""
    if isinstance(error.__cause__, BaseExceptionGroup):
        return _why(error.__cause__.exceptions[0])
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error)
