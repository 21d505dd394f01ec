"""Waiting for what should come at once: a hang fails, and a busy machine is no failure.

No test may be about these seconds. One that is about a limit of ours sets the limit, or holds the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from trio.testing import wait_all_tasks_blocked

# Many times longer than anything takes that is waited for.
PATIENCE: Final = 120.0  # seconds


async def until(condition: Callable[[], object]) -> None:
    """Wait for what sends no event: the end of a process, a file, a thread. In real seconds, whatever
    clock the test has."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await wait_all_tasks_blocked(0.005)
