"""Feed: the trainer's end of a sink. No call of the training thread waits for the sink, whatever that does.

Lines wait in memory for a thread, which writes them to the pipe of the sink's process. What finds no room is lost, and
counted. The end of a run waits for all its sinks together, for a bounded time; then their processes are killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from threefold.child_python import python_command, search_path
from trainer.observe.sinks.page import Page
from trainer.observe.sinks.sink import Opening

MOST_BYTES = 16 << 20  # of lines that wait
LISTENS_EVERY_S = 1.0
MODULE = "trainer.observe.sinks"


@dataclass(frozen=True, slots=True)
class Loss:
    """Lines of a sink: how many it was to get, and how many of them it has not."""

    sink: str
    lines: int
    lost: int


class Feed:
    """A sink in a process of its own; `write` and `close` are the training thread's, the rest is its thread's."""

    def __init__(
        self,
        name: str,
        opening: Opening,
        how: Mapping[str, str],
        say: Callable[[str], None],
        *,
        module: str = MODULE,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Start the process; `how` is what it is opened with, `say` takes what it has to say."""
        self.name, self._say, self._most_bytes = name, say, most_bytes
        self._waiting = deque[bytes]()
        self._changed, self._num_bytes, self._is_closed = threading.Condition(), 0, False
        self._num_lines, self._num_said, self._is_full, self._is_late = 0, 0, False, False
        self._page = Page.new()
        self._process = subprocess.Popen(
            [*python_command(module), name, str(self._page.fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._page.fd],
            start_new_session=True,  # torchrun and terminals end the trainer's process group
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path()), "MLFLOW_DISABLE_TELEMETRY": "true"},
            bufsize=0,
        )
        self._put(json.dumps({"opening": asdict(opening), "how": dict(how)}).encode() + b"\n")
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Return the process of the sink."""
        return self._process.pid

    def write(self, line: Mapping[str, Any]) -> None:
        """Take a line for the sink, or lose it."""
        self._num_lines += 1
        if self._put(json.dumps(line).encode() + b"\n") or self._is_full:
            return
        self._is_full = True
        if not self._num_said:  # else it said why
            self._say(f"warning: {self.name} takes no lines: from step {line.get('step')} on they are lost")

    def _put(self, data: bytes) -> bool:
        with self._changed:
            if self._num_bytes + len(data) > self._most_bytes:
                return False
            self._waiting.append(data)
            self._num_bytes += len(data)
            self._changed.notify()
        return True

    def _run(self) -> None:
        """Write what waits to the process, until it is closed and nothing waits, or the process has ended."""
        assert self._process.stdin is not None, "a pipe"
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while (data := self._next()) is not None:
                while data:
                    data = data[os.write(pipe.fileno(), data) :]
        self._most_bytes = 0  # nobody reads any more
        code = self._process.wait()
        self._listen()
        if code and not self._num_said and not self._is_late:
            self._say(f"warning: {self.name} takes no lines: its process ended with {code}")
            self._num_said = 1

    def _next(self) -> bytes | None:
        """Return what waits next, None at the end; what the process says meanwhile is passed on."""
        while True:
            with self._changed:
                if not self._waiting and not self._is_closed:
                    self._changed.wait(LISTENS_EVERY_S)
                if self._waiting:
                    data = self._waiting.popleft()
                    self._num_bytes -= len(data)
                    return data
                if self._is_closed:
                    return None
            self._listen()

    def _listen(self) -> None:
        number, text = self._page.text
        if number > self._num_said:
            self._num_said = number
            self._say(f"warning: {self.name}: {text}")

    def close(self) -> None:
        """Ask for the end, once all lines are written; `closed` waits for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def ended(self, within_s: float) -> Loss:
        """Wait for the end, at most so long; return what was lost. A process that is late is killed."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._is_late = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._thread.join(LISTENS_EVERY_S)
        taken, lost = self._page.counts
        return Loss(self.name, self._num_lines, self._num_lines - taken + lost)


def close_all(feeds: Iterable[Feed], within_s: float) -> Sequence[Loss]:
    """End sinks together, within a time that all of them share; return what each lost."""
    feeds = list(feeds)
    ends_s = time.monotonic() + within_s
    for feed in feeds:
        feed.close()
    return [feed.ended(max(ends_s - time.monotonic(), 0.0)) for feed in feeds]
