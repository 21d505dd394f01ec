"""What the integration tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.web_support import Web, running_web


@pytest.fixture
async def web(database_url: str, tmp_path: Path) -> AsyncIterator[Web]:
    """The web side of a server on real parts, empty but for what a first start makes."""
    async with running_web(database_url, tmp_path / "store") as web:
        yield web
