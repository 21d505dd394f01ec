"""SIGTERM and SIGINT as a wish to stop: the first drains, the second stops at once.

What the process then exits with is its command's business: `Stop.signal` says which one came first.
"""

from __future__ import annotations

from signal import SIGINT, SIGTERM, Signals
from typing import Final

import attrs
import structlog
import trio

STOP_SIGNALS: Final = (SIGTERM, SIGINT)

log = structlog.get_logger()


@attrs.define(eq=False)
class Stop:
    """A wish to stop. Made once a process and shared by whoever may ask for it.

    `gently` is set by the first request and `at_once` by the second; `signal` is the signal of the
    first request, None when the program itself asked.
    """

    gently: trio.Event = attrs.field(factory=trio.Event, init=False)
    at_once: trio.Event = attrs.field(factory=trio.Event, init=False)
    signal: Signals | None = attrs.field(default=None, init=False)

    def request(self, by: Signals | None = None) -> None:
        """Ask for a drain; asked again, for a stop at once."""
        if self.gently.is_set():
            self.at_once.set()
        else:
            self.signal = by
            self.gently.set()


async def listen(stop: Stop, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Turn signals into requests until cancelled; started once signals are caught.

    Only in the main thread (`signal.signal` has that rule). Equal signals that arrive before the
    first is seen count as one: that is how the operating system delivers them, too.
    """
    with trio.open_signal_receiver(*STOP_SIGNALS) as arrived:
        task_status.started()
        async for number in arrived:
            name = Signals(number)
            log.info("signal", signal=name.name, stops="at once" if stop.gently.is_set() else "after a drain")
            stop.request(name)
