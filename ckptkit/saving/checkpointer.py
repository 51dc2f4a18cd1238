"""Checkpointer: the trainer's side of a save. It stages state into the arena and leaves the rest to the writer process.

`save` blocks for the copy alone (and for a save before it that still runs). Nothing here is collective: each rank has a
Checkpointer and a writer of its own, and writer 0 finds the others' files by listing. A save that fails is reported and
training goes on. The writer outlives a killed trainer for as long as it takes to finish the save it was told.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import ckptkit
from ckptkit.chunk import Box, Piece
from ckptkit.format.root import Root, check_attempt
from ckptkit.io.striping import check_striping
from ckptkit.layout import ParallelLayout
from ckptkit.plan import SavePlan, plan_save
from ckptkit.saving.save_order import SaveOrder, SaveOutcome
from ckptkit.saving.staging import Arena, prepare, stage
from ckptkit.tensor import TensorInfo
from threefold.errors import StorageError
from threefold.storage import open_storage

CLOSE_WITHIN_S = 10.0
READ_BYTES = 1 << 16
ROOT_ROOM_BYTES, ROOT_ROOM_BYTES_A_TENSOR = 1 << 20, 1 << 10  # arena that `prepare` keeps for a root
MAX_TOLD_BYTES = 2000  # of what a dead writer said


@dataclass(frozen=True, slots=True)
class CheckpointerOptions:
    """How to save.

    deadline_s bounds the wait for the other ranks' files; a writer that is not done after timeout_s is killed; after
    max_failed_saves failures in a row `save` raises; keep_last > 0 prunes older steps after each commit.
    Where the program `lfs` is there, files on Lustre get stripe_count stripes of stripe_size_bytes each (0: by their
    size and the number of ranks; -1 stripes: one on every target).
    """

    deadline_s: float = 600.0
    timeout_s: float = 3600.0
    max_failed_saves: int = 3
    keep_last: int = 0
    stripe_count: int = 0
    stripe_size_bytes: int = 0
    num_threads: int = 2

    def __post_init__(self) -> None:
        check_striping(self.stripe_count, self.stripe_size_bytes)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save ended. On rank 0 `ok` means committed, elsewhere that this rank's files are written."""

    step: int
    ok: bool
    error: str
    data_bytes: int
    write_s: float
    stall_s: float


@dataclass
class _Running:
    """The save that the writer works on."""

    step: int
    data_bytes: int
    stall_s: float
    started: float = field(default_factory=time.monotonic)


class Checkpointer:
    """Saves one rank's state in the background to a run's URL; use it in a `with`, or close it.

    `attempt` is a name that all ranks of one start of the job share and no other start uses.
    """

    def __init__(
        self, url: str, *, rank: int = 0, world_size: int = 1, attempt: str,
        options: CheckpointerOptions = CheckpointerOptions(),
    ) -> None:  # fmt: skip
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        storage = open_storage(url)
        self.url = storage.url
        if rank == 0 and not storage.supports_if_absent:
            print(f"warning: {url} cannot commit exclusively: let no second job save there", file=sys.stderr)
        self._rank, self._world_size, self._attempt, self._options = rank, world_size, check_attempt(attempt), options
        self._num_saves = 0
        self._num_failed, self._last_error = 0, ""
        self._arena = Arena()
        self._writer = _WriterProcess(self._arena.fd)
        self._running: _Running | None = None
        self._reports: list[SaveReport] = []
        self._planned: tuple[object, SavePlan] | None = None

    def prepare(self, pieces: Sequence[Piece], tensors: Sequence[TensorInfo]) -> None:
        """Plan, and touch the memory that saves of such pieces take, so that the first stalls no longer than others.

        Call it once before training, or leave it out.
        """
        self._await_running()
        plan = self._plan(pieces, tensors)
        prepare(self._arena, pieces, plan, ROOT_ROOM_BYTES + ROOT_ROOM_BYTES_A_TENSOR * len(tensors))

    def save(
        self, step: int, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo], layout: ParallelLayout,
        num_layers: int, metadata: Mapping[str, Any],
    ) -> float:  # fmt: skip
        """Save this rank's pieces as part of a step; returns after they are copied, with the seconds that took.

        `tensors` is the whole checkpoint's table, the same on all ranks. Raises UserError where pieces do not fit it,
        StorageError after max_failed_saves failures in a row; a failure of this save is told by `poll` or `wait`.
        """
        started = time.monotonic()
        self._num_saves += 1
        # Every save has a folder of its own, so that a repeated step never meets the files of a failed try.
        attempt = f"{self._attempt}-{self._num_saves:04d}"
        self._await_running()
        if self._num_failed >= self._options.max_failed_saves:
            raise StorageError(f"{self._num_failed} saves in a row failed, the last: {self._last_error}")
        plan = self._plan(pieces, tensors)
        table = {info.name: info for info in tensors}
        draft = b"" if self._rank else Root(step, attempt, layout, num_layers, table, (), metadata).to_bytes()
        try:
            files, root = stage(self._arena, pieces, tensors, plan, draft)
        except OSError as error:
            self._running = _Running(step, 0, time.monotonic() - started)
            self._finish(f"rank {self._rank}: no memory to stage step {step}: {error.strerror}")
            return self._reports[-1].stall_s
        order = SaveOrder(
            url=self.url, step=step, attempt=attempt, writer=self._rank, num_writers=self._world_size,
            files=tuple(files), root=root, arena_bytes=self._arena.size, deadline_s=self._options.deadline_s,
            keep_last=self._options.keep_last, stripe_count=self._options.stripe_count,
            stripe_size_bytes=self._options.stripe_size_bytes, num_threads=self._options.num_threads,
        )  # fmt: skip
        if not self._writer.is_alive:
            self._writer.close()
            self._writer = _WriterProcess(self._arena.fd)
        stall_s = time.monotonic() - started
        self._running = _Running(step, sum(file.data.size for file in files), stall_s)
        self._writer.send(order)
        return stall_s

    def poll(self) -> list[SaveReport]:
        """Reports of the saves that ended since the last call; does not block."""
        self._collect(0.0)
        reports, self._reports = self._reports, []
        return reports

    def wait(self) -> list[SaveReport]:
        """Block until no save runs; gives all reports not told yet."""
        self._await_running()
        return self.poll()

    def close(self) -> list[SaveReport]:
        """Wait for the running save, end the writer, free the arena; gives all reports not told yet."""
        reports = self.wait()
        self._writer.close()
        self._arena.close()
        return reports

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    @property
    def writer_pid(self) -> int:
        """Process id of the writer."""
        return self._writer.pid

    def _plan(self, pieces: Sequence[Piece], tensors: Sequence[TensorInfo]) -> SavePlan:
        """The plan, made anew only when the structure of the state changed."""
        chunks: list[tuple[str, Box, int, int]] = [(p.name, p.box, p.start, p.stop) for p in pieces]
        structure = (chunks, list(tensors))
        if self._planned is None or self._planned[0] != structure:
            self._planned = (structure, plan_save(pieces, tensors))
        return self._planned[1]

    def _await_running(self) -> None:
        while self._running is not None:
            left_s = self._running.started + self._options.timeout_s - time.monotonic()
            if left_s <= 0:
                self._writer.kill()
                self._finish(f"the writer was not done after {self._options.timeout_s:g} s and was killed")
                return
            self._collect(left_s)

    def _collect(self, timeout_s: float) -> None:
        """Take what the writer says within a time; its death ends the running save."""
        if self._running is None:
            return
        try:
            outcome = self._writer.receive(timeout_s)
        except EOFError as death:
            self._finish(f"rank {self._rank}: {death} while it saved step {self._running.step}")
            return
        if outcome is not None:
            if outcome.warning:
                print(f"warning: {outcome.warning}", file=sys.stderr, flush=True)
            self._finish(outcome.error, outcome.write_s)

    def _finish(self, error: str, write_s: float | None = None) -> None:
        running = self._running
        assert running is not None, "a save runs"
        self._running = None
        self._num_failed = self._num_failed + 1 if error else 0
        self._last_error = error
        seconds = time.monotonic() - running.started if write_s is None else write_s
        self._reports.append(SaveReport(running.step, not error, error, running.data_bytes, seconds, running.stall_s))


class _WriterProcess:
    """A running `python -m ckptkit.saving.writer` and the two pipes to it."""

    def __init__(self, arena_fd: int) -> None:
        # Not the trainer's stderr: whoever reads that to its end would wait for a writer that outlives the trainer.
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        package = str(Path(ckptkit.__file__).parent.parent)
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptkit.saving.writer", f"--arena-fd={arena_fd}", f"--trainer={os.getpid()}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            pass_fds=[arena_fd],
            start_new_session=True,  # torchrun and terminals kill the trainer's process group
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._input, self._output = self._process.stdin, self._process.stdout
        self._pending = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, order: SaveOrder) -> None:
        """Tell the writer what to save; where it just died, `receive` tells that."""
        try:
            self._input.write(order.to_line())
            self._input.flush()
        except BrokenPipeError:
            self._process.wait()

    def receive(self, timeout_s: float) -> SaveOutcome | None:
        """The next outcome, None if there is none within the time; EOFError says how the writer died."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._output], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                return None
            data = os.read(self._output.fileno(), READ_BYTES)
            if not data:
                raise EOFError(self._obituary())
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        return SaveOutcome.from_line(line)

    def kill(self) -> None:
        """End it at once; a save it was told remains uncommitted."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let it end by itself, and wait for that."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._output.close()
        self._said.close()

    def _obituary(self) -> str:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-MAX_TOLD_BYTES:]
        return f"the writer process {how}" + (f" ({said})" if said else "")
