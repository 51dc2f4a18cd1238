"""StartTimes: what a start of a run takes by part, from the begin of its process to the end of its first step.

After a fault this is most of what passes until the next step, so a run's metrics have it.
"""

import os
import time
from pathlib import Path

STARTED_AT = 19  # of the fields of /proc/self/stat behind the name: clock ticks since the host began


class StartTimes:
    """The parts of one start in their order; owned by the training thread."""

    def __init__(self) -> None:
        """Begin with what the process has taken until here: Python, its modules and the configuration."""
        self._seconds = {"imports_s": process_age_s()}
        self._ended_s = time.monotonic()

    def end(self, part: str) -> None:
        """Note that a part ends here, where the next begins."""
        now_s = time.monotonic()
        self._seconds[f"{part}_s"] = now_s - self._ended_s
        self._ended_s = now_s

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part that has ended."""
        return {part: round(seconds, 3) for part, seconds in self._seconds.items()}


def process_age_s() -> float:
    """Return how long ago this process began, to a hundredth of a second."""
    return now_s() - began_s("self")


def now_s() -> float:
    """Return the seconds since the host began, as the kernel counts the begin of a process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def began_s(pid: int | str) -> float:
    """Return when a process began on that clock, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[STARTED_AT]) / os.sysconf("SC_CLK_TCK")
