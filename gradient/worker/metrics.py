"""What the heartbeat says of the machine: how busy it is and how much memory is free. Layer: worker, IO.

Reading `/proc` takes microseconds and cannot wait for a disk. Where there is none, nothing is said.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from gradient.wire.messages import WorkerMetrics


@attrs.define
class Metrics:
    """Measures between one call and the next. `proc` is the folder of the kernel's files."""

    proc: Path = Path("/proc")
    # Busy and total ticks of all cores at the last call.
    _ticks: tuple[int, int] | None = None

    def take(self) -> WorkerMetrics:
        """The metrics since the last call; the first one knows no processor use."""
        before, self._ticks = self._ticks, self._read_ticks()
        return WorkerMetrics(cpu_usage_pct=_usage(before, self._ticks), ram_free_mb=self._read_free())

    def _read_ticks(self) -> tuple[int, int] | None:
        try:
            words = (self.proc / "stat").read_text().partition("\n")[0].split()[1:9]
            user, nice, system, idle, iowait, *others = map(int, words)
        except (OSError, ValueError):
            return None
        busy = user + nice + system + sum(others)
        return busy, busy + idle + iowait

    def _read_free(self) -> int | None:
        try:
            for line in (self.proc / "meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) // 1024
        except (OSError, ValueError, IndexError):
            pass
        return None


def _usage(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    if before is None or now is None or now[1] <= before[1]:
        return None
    return round(100 * (now[0] - before[0]) / (now[1] - before[1]), 1)
