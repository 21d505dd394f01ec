"""What the integration tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.accept_support import Home, home
from tests.integration.web_support import Web, running_web


@pytest.fixture
async def web(database_url: str, tmp_path: Path) -> AsyncIterator[Web]:
    """The web side of a server on real parts, empty but for what a first start makes."""
    async with running_web(database_url, tmp_path / "store") as web:
        yield web


@pytest.fixture
def place(nix: str) -> Iterator[Home]:
    """An installation of this test's own, with nothing running."""
    with home(nix) as place:
        yield place


@pytest.fixture(scope="module")
def service(nix: str) -> Iterator[Home]:
    """A server and a worker that run, for the tests of one module."""
    with home(nix) as service:
        service.serve()
        service.work()
        yield service
