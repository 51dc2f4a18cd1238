"""WriterProcess: the trainer's end of its writer, `python -m ckptkit.writer`, and the two pipes between them.

No call waits for ever, whatever state the writer is in.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from typing import IO

from ckptkit.handoff.protocol import NO_MORE, SaveOutcome, message_of
from ckptkit.handoff.ring_signals import Signal, readable
from ckptkit.saving.staging import Arena
from threefold.child_python import python_command, search_path

EXIT_WITHIN_S = 10.0  # once it closed its end
READ_BYTES = 1 << 16
MAX_SAID_BYTES = 2000  # of what a dead writer said


class WriterProcess:
    """A running `python -m ckptkit.writer` and the two pipes to it.

    Of the trainer's process: the thread that copies alone listens while it runs, else the Checkpointer's caller.
    """

    close_within_s = 10.0
    die_within_s = 10.0  # after a kill; a process that waits for a dead file system may never end

    def __init__(self, arena: Arena) -> None:
        # Not the trainer's stderr: whoever reads that to its end would wait for a writer that outlives the trainer.
        # Nor a temporary file: that folder may be full.
        self._said: IO[bytes] = os.fdopen(os.memfd_create("ckptkit-writer-said", os.MFD_CLOEXEC), "w+b")
        self._process = subprocess.Popen(
            [
                *python_command("ckptkit.writer"), f"--arena-fd={arena.fd}", f"--trainer={os.getpid()}",
                "--signal-fds", *map(str, arena.signals.fds),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            pass_fds=[arena.fd, *arena.signals.fds],
            start_new_session=True,  # torchrun and terminals kill the trainer's process group
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path())},
            bufsize=0,
        )  # fmt: skip
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        self._was_killed = False
        self._pending = b""
        self._copied: list[SaveOutcome] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._was_killed and self._process.poll() is None

    def send(self, line: bytes, timeout_s: float) -> None:
        """Send the writer a line; if it does not take it within the time it is killed, which `receive` raises."""
        deadline, left = time.monotonic() + timeout_s, memoryview(line)
        poll = select.poll()
        poll.register(self._input, select.POLLOUT)
        try:
            while left:
                if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                    self.kill()
                    return
                with contextlib.suppress(BlockingIOError):  # there is room, but not for PIPE_BUF bytes at once
                    left = left[os.write(self._input.fileno(), left) :]
        except BrokenPipeError:
            with contextlib.suppress(subprocess.TimeoutExpired):  # how it ends by itself is worth knowing
                self._process.wait(EXIT_WITHIN_S)
            self.kill()

    def receive(
        self, timeout_s: float, *, unless: Signal | None = None, until_copied: bool = False
    ) -> SaveOutcome | None:
        """Return the next outcome of a save, None if there is none within the time; EOFError says how the writer died.

        A signal that is given ends the wait too. Outcomes of copies to other tiers that come meanwhile are kept for
        `take_copied`; with `until_copied` the first of them ends the wait.
        """
        deadline = time.monotonic() + timeout_s
        awaited: list[IO[bytes] | Signal] = [self._output, *filter(None, [unless])]
        while True:
            while b"\n" in self._pending:
                line, self._pending = self._pending.split(b"\n", 1)
                outcome: SaveOutcome = message_of(line)
                if not outcome.url:
                    return outcome
                self._copied.append(outcome)
            if until_copied and self._copied:
                return None
            ready = readable(awaited, max(deadline - time.monotonic(), 0.0))
            if self._output not in ready:
                if self._was_killed:
                    raise EOFError(self._obituary())
                return None
            data = os.read(self._output.fileno(), READ_BYTES)
            if not data:
                raise EOFError(self._obituary())
            self._pending += data

    def take_copied(self) -> list[SaveOutcome]:
        """Return the outcomes of copies that were received since the last call."""
        return [self._copied.pop(0) for _ in range(len(self._copied))]  # a thread that stages may add to them

    def end_orders(self) -> None:
        """Let the writer know that no order follows; it copies what it has to, and ends."""
        if not self._input.closed:
            self.send(NO_MORE, self.close_within_s)
            self._input.close()

    def kill(self) -> None:
        """End it at once; a save that it was ordered remains uncommitted."""
        self._process.kill()
        self._was_killed = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.die_within_s)

    def close(self) -> None:
        """Let it end by itself, and wait for that; not for one that was killed."""
        self.end_orders()
        if not self._was_killed:
            try:
                self._process.wait(self.close_within_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._output.close()
        self._said.close()

    def _obituary(self) -> str:
        if not self._was_killed:  # else that was waited for
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_WITHIN_S)
        code = self._process.poll()
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        elif self._was_killed:
            how = "was killed and does not end"
        else:
            how = "closed its pipe, does not end, and was killed"
            self.kill()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-MAX_SAID_BYTES:]
        return f"the writer process {how}" + (f" ({said})" if said else "")
