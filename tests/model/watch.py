"""What fails in a run of the state machine: told at once, and it ends the run."""

from __future__ import annotations

from collections.abc import Callable

import attrs


class EnoughError(KeyboardInterrupt):
    """There are to be no more examples. Hypothesis lets an interrupt through, and nothing else."""


@attrs.frozen
class Failure:
    """An example that failed, and its script (`script`)."""

    error: Exception
    script: tuple[str, ...]

    @property
    def kind(self) -> tuple[type[Exception], str]:
        """What went wrong, without the names of what it went wrong with."""
        return type(self.error), str(self.error).partition(" ")[0]


def _nobody(failure: Failure) -> None:
    """It is raised in the end."""


@attrs.define
class Watch:
    """One run: `tell` hears of its first failure as soon as there is one."""

    tell: Callable[[Failure], None] = _nobody
    failure: Failure | None = None
    _over: bool = False

    def next_example(self) -> None:
        """An example begins. Raises EnoughError when there was a failure, or somebody has stopped the run."""
        if self._over:
            raise EnoughError

    def saw(self, failure: Failure) -> None:
        """An example has failed."""
        if self.failure is None:
            self.failure = failure
            self.tell(failure)
            self.stop()

    def stop(self) -> None:
        """No more examples."""
        self._over = True
