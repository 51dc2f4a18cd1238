"""The writer process: `python -m ckptkit.saving.writer`, started by a Checkpointer in a session of its own.

It maps the trainer's arena, takes SaveOrders as lines on its standard input and answers each with a SaveOutcome on its
standard output. When the trainer dies it finishes the save that it was told (writer 0: with the commit) and ends. A
fault in a save is an outcome, never the writer's end. It never imports torch.
"""

import argparse
import contextlib
import mmap
import os
import select
import sys
import time
import traceback
from collections.abc import Iterator

import numpy as np

from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.loading.reader import read_root
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.retention import expired, prune
from ckptkit.saving.save_order import SaveOrder, SaveOutcome
from ckptkit.saving.staging import StagedFile
from ckptkit.saving.step_writer import PartSource, StepTarget, write_step
from ckptkit.saving.upkeep import Upkeep
from ckptkit.torch_tensors import Bytes
from threefold.errors import UserError
from threefold.storage import open_storage

ORPHAN_CHECK_S = 1.0
READ_BYTES = 1 << 16
MIN_GRACE_S, GRACE_FACTOR = 10.0, 3.0


def main(argv: list[str] | None = None) -> int:
    """Serve one trainer until its end."""
    parser = argparse.ArgumentParser(prog="python -m ckptkit.saving.writer", description="Serves a Checkpointer.")
    parser.add_argument("--arena-fd", type=int, required=True, help="file descriptor of the arena's memory")
    parser.add_argument("--trainer", type=int, required=True, help="process id of the trainer")
    arguments = parser.parse_args(argv)
    arena = np.empty(0, np.uint8)
    upkeep: Upkeep | None = None
    for line in _lines(arguments.trainer):
        order = SaveOrder.from_line(line)
        if order.arena_bytes != len(arena):
            memory = mmap.mmap(arguments.arena_fd, order.arena_bytes, prot=mmap.PROT_READ)
            arena = np.frombuffer(memory, np.uint8)
        upkeep = upkeep or Upkeep(order.url, order.writer, order.stripe_count, order.stripe_size_bytes)
        outcome = _attempt(order, arena, arguments.trainer, upkeep)
        with contextlib.suppress(BrokenPipeError):  # the trainer died meanwhile
            os.write(sys.stdout.fileno(), outcome.to_line())
    return 0


def run_save(order: SaveOrder, arena: Bytes, trainer: int, upkeep: Upkeep) -> None:
    """Write what an order says; writer 0 commits, and prunes once it read the new root back."""
    storage = open_storage(order.url)
    target = StepTarget(
        storage, order.step, order.attempt, order.writer, order.num_writers, order.num_threads, upkeep.striper
    )
    parts = [_source(file, arena) for file in order.files]
    draft = None
    if order.writer == 0:
        draft = Root.from_bytes(order.root.of(arena).tobytes(), f"the order to save step {order.step}")
    root = write_step(target, parts, draft, _Patience(order.deadline_s, trainer).in_all_s)
    if root is not None and order.keep_last:
        read_root(storage, order.step)  # nothing older goes before the new one was seen whole
        prune(storage, expired(committed_steps(storage), order.keep_last))


def _source(file: StagedFile, arena: Bytes) -> PartSource:
    draft = PartIndex.from_bytes(file.index.of(arena).tobytes(), "a staged index")
    data = file.data.of(arena)
    return PartSource(draft, [np.array([(data.ctypes.data, len(data))], np.uint64)])


def _lines(trainer: int) -> Iterator[bytes]:
    """The lines of standard input until its end, or until the trainer is gone.

    Both are asked for: a child of the trainer may hold the other end of the pipe open after the trainer's death.
    """
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], ORPHAN_CHECK_S)
        if ready:
            data = os.read(0, READ_BYTES)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            yield from lines
        elif os.getppid() != trainer:
            return


def _attempt(order: SaveOrder, arena: Bytes, trainer: int, upkeep: Upkeep) -> SaveOutcome:
    started = time.monotonic()
    error = ""
    try:
        run_save(order, arena, trainer, upkeep)
    except (UserError, OSError) as failure:
        error = str(failure)
    except Exception as failure:  # a fault of ours, told like any other: the trainer goes on
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    data_bytes = sum(file.data.size for file in order.files)
    return SaveOutcome(order.step, error, data_bytes, time.monotonic() - started, upkeep.take_warning())


class _Patience:
    """How long to wait for the other writers: the deadline, cut short once this writer's trainer is dead.

    Then the job was probably killed: writers that were told to save are as far as this one, the others never begin.
    """

    def __init__(self, deadline_s: float, trainer: int) -> None:
        self._deadline_s, self._trainer = deadline_s, trainer
        self._started: float | None = None

    def in_all_s(self, write_s: float) -> float:
        """Seconds to wait in all from the first time this is asked, as things stand."""
        now = time.monotonic()
        if self._started is None:
            self._started = now
        if os.getppid() != self._trainer:
            grace_s = MIN_GRACE_S + GRACE_FACTOR * write_s
            self._deadline_s, self._trainer = min(self._deadline_s, now - self._started + grace_s), os.getppid()
        return self._deadline_s


if __name__ == "__main__":
    sys.exit(main())
