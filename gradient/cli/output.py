"""Where a command writes: results on stdout, everything else on stderr, and the object of --json."""

from __future__ import annotations

import json
import sys
from typing import Any

import attrs

from gradient.cli.faults import Exit, Fault, one_line
from gradient.cli.started import seconds_since_start


@attrs.define(eq=False)
class Output:
    """The output of one command. With `json`, stdout gets objects only, and results for people go to stderr.

    What becomes known on the way is kept here, so that also a failure can say which evaluation and which
    cache it is about.
    """

    command: str
    json: bool
    evaluation: int | None = attrs.field(default=None, init=False)
    cache_url: str | None = attrs.field(default=None, init=False)
    public_key: str | None = attrs.field(default=None, init=False)

    def result(self, text: str) -> None:
        """What the user asked for."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def note(self, text: str) -> None:
        """What is good to know meanwhile."""
        print(text, file=sys.stderr, flush=True)

    def knows(self, cache_url: str, public_key: str) -> None:
        """The server has said what its cache is."""
        self.cache_url, self.public_key = cache_url, public_key

    def object(self, value: dict[str, Any]) -> None:
        """The object of --json, `seconds` added; nothing without --json."""
        if self.json:
            timed = {**value, "seconds": round(seconds_since_start(), 3)}
            print(json.dumps(timed, ensure_ascii=False), flush=True)

    def evaluated(
        self, status: str, entry_points: list[dict[str, Any]], errors: list[dict[str, str]]
    ) -> None:
        """The object of --json about an evaluation, or about a command that failed before it had one."""
        self.object(
            {
                "evaluation": self.evaluation,
                "status": status,
                "entry_points": entry_points,
                "errors": errors,
                "cache_url": self.cache_url,
                "public_key": self.public_key,
            }
        )

    def fail(self, fault: Fault) -> None:
        """Say why the command ends: one line, and the object of --json."""
        self.note(f"gradient {self.command}: {one_line(fault)}")
        status = "Aborted" if fault.exit is Exit.INTERRUPTED else "Failed"
        self.evaluated(status, [], [{"source": f"gradient {self.command}", "message": str(fault)}])
