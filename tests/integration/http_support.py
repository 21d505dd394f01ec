"""Servers for the client's tests: each connection runs a script over the raw stream.

Raw on purpose: half of what is tested is a server that misbehaves.
"""

from __future__ import annotations

import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import attrs
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@attrs.define
class Peer:
    """One connection as a script sees it; `number` counts connections from 0."""

    stream: trio.abc.Stream
    number: int
    _buffer: bytearray = attrs.field(factory=bytearray)

    async def head(self) -> str:
        """Request line and headers; "" when the client hung up."""
        while b"\r\n\r\n" not in self._buffer:
            if not await self.more():
                return ""
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer[:] = rest
        return head.decode()

    async def body(self, length: int) -> bytes:
        while len(self._buffer) < length:
            if not await self.more():
                break
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return body

    async def chunked_body(self) -> bytes:
        body = b""
        while True:
            while b"\r\n" not in self._buffer:
                await self.more()
            line, _, rest = bytes(self._buffer).partition(b"\r\n")
            self._buffer[:] = rest
            size = int(line, 16)
            piece = await self.body(size + 2)
            if size == 0:
                return body
            body += piece[:-2]

    async def more(self) -> bool:
        data = await self.stream.receive_some(2**16)
        self._buffer += data
        return bool(data)

    async def send(self, text: str | bytes) -> None:
        await self.stream.send_all(text.encode() if isinstance(text, str) else text)

    async def answer(self, status: int, body: str = "", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", *headers, "", body]
        await self.send("\r\n".join(lines))


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server on 127.0.0.1; its URL without a path."""
    count = 0

    async def serve(stream: trio.abc.Stream) -> None:
        nonlocal count
        peer = Peer(stream, count)
        count += 1
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await script(peer)

    listeners: list[trio.SocketListener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    served = [trio.SSLListener(one, tls, https_compatible=True) for one in listeners] if tls else listeners
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio.serve_listeners, serve, served))
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        nursery.cancel_scope.cancel()


def certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server context for 127.0.0.1 with a certificate of its own, and the file that certifies it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, both = folder / "cert.pem", folder / "both.pem"
    pem.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    both.write_bytes(
        pem.read_bytes()
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(both)
    return context, pem
