"""Command: a program of the user that is run at each event that somebody should hear of."""

import json
import shlex
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

ENDS_WITHIN_S = 60.0  # a program that takes longer is ended


def is_heard(line: Mapping[str, Any]) -> bool:
    """Return whether a line is such an event: a save or copy that failed, a stall, a spike, the end."""
    kind = line.get("event")
    is_failed = line.get("ok") is False and not str(line.get("error", "")).startswith("skipped")
    return kind in ("stall", "spike", "end") or (kind in ("save", "copy") and is_failed)


class Command:
    """A sink that runs a program, with the event as JSON on its stdin; what fails is said once."""

    def __init__(self, command: str, say: Callable[[str], None], *, ends_within_s: float = ENDS_WITHIN_S) -> None:
        self._words, self._say, self._ends_within_s = shlex.split(command), say, ends_within_s

    def write(self, line: Mapping[str, Any]) -> None:
        """Run the program for an event that is heard of, and wait for its end."""
        if not is_heard(line):
            return
        text, name = json.dumps(line), f"{self._words[0]}, for the event {line['event']} of step {line['step']},"
        try:
            done = subprocess.run(
                self._words, input=text, text=True, errors="replace", capture_output=True, timeout=self._ends_within_s
            )
        except subprocess.TimeoutExpired:
            self._say(f"{name} was ended after {self._ends_within_s:g} s")
        except OSError as error:
            self._say(f"{name} did not start: {error.strerror}")
        else:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            if done.returncode:
                self._say(f"{name} ended with {done.returncode}{': ' if last else ''}{last[:300]}")

    def flush(self) -> None:
        """Do nothing: `write` waits."""

    def close(self) -> None:
        """Do nothing: no program runs."""
