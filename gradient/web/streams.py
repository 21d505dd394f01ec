"""Answers whose body is made while it is sent. Layer: web.

A stream is a class with `__anext__` rather than an asynchronous generator: nothing of it runs, or is
cleaned up, anywhere but in the task that sends it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import ExitStack
from types import TracebackType

from quart.wrappers.response import ResponseBody


class Stream(ResponseBody):
    """A body in pieces. `open` may enter what is to end with the stream into `self.held`."""

    async def __aenter__(self) -> Stream:
        self.held = ExitStack()
        self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.held.close()

    def open(self) -> None:
        """Called before the first piece."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes:
        """The next piece, never empty."""
