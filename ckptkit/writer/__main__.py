"""The writer process: `python -m ckptkit.writer`, started by a Checkpointer in a session of its own.

It maps the trainer's arena, takes SaveOrders as lines on its standard input and answers each with a SaveOutcome on its
standard output. When the trainer dies it finishes the save that it was handed (the first writer: with the commit), and
what it still has to copy to slower tiers, prunes nothing more, and ends. A fault in a save is an outcome, never the
writer's end. It never imports torch, and runs behind the trainer.
"""

import argparse
import contextlib
import ctypes
import mmap
import os
import platform
import select
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ckptkit.format.keys import Seat
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.handoff.protocol import NO_MORE, CopyOrder, SaveOrder, SaveOutcome, SkipOrder, TierCopy, message_of
from ckptkit.handoff.ring_signals import RingSignals, readable
from ckptkit.io.blocks import Bytes
from ckptkit.io.striping import Striper
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.record import StepRecord
from ckptkit.runs.retention import Retention
from ckptkit.writer.commit import KILLED
from ckptkit.writer.copier import TierCopier
from ckptkit.writer.maintenance import Maintenance
from ckptkit.writer.overflow import Room, save_where_room_is
from ckptkit.writer.retries import Retries
from ckptkit.writer.ring_reader import RingReader
from ckptkit.writer.step import PartSource, StepTarget, clear, discard, report_failed, write_step
from threefold.errors import EXIT_IO, UserError
from threefold.masking import masked
from threefold.storage import open_storage

ORPHAN_CHECK_S = 1.0
READ_BYTES = 1 << 16
MIN_GRACE_S, GRACE_FACTOR = 10.0, 3.0
NICE = 10  # a tenth of the weight of a usual process: behind a trainer that wants the same core, never starved
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # numbers of the system call, for which libc has no function
WHO_PROCESS, BEST_EFFORT, LOWEST = 1, 2, 7


def main(argv: list[str] | None = None) -> int:
    """Serve one trainer until its end."""
    parser = argparse.ArgumentParser(prog="python -m ckptkit.writer", description="Serves a Checkpointer.")
    parser.add_argument("--arena-fd", type=int, required=True, help="file descriptor of the arena's memory")
    parser.add_argument("--signal-fds", type=int, nargs=3, required=True, help="file descriptors of the signals")
    parser.add_argument("--trainer", type=int, required=True, help="process id of the trainer")
    arguments = parser.parse_args(argv)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints does not come between the answers
    step_back()
    server = _Server(arguments.arena_fd, RingSignals(arguments.signal_fds), arguments.trainer, answers)
    with ThreadPoolExecutor(1) as saving:  # beside the loop: a skipped save is reported while another is written
        for line in _lines(arguments.trainer):
            match message_of(line):
                case SkipOrder() as order:
                    server.skip(order)
                case CopyOrder() as order:
                    saving.submit(server.tier_copier.offer, order.tier_copies)
                case order:
                    saving.submit(server.save, order, server.take_failed_tries())
    server.let_go()
    server.tier_copier.finish()
    return 0


class _Server:
    """Does one save after the other out of the trainer's arena.

    Of the writer process: its main thread takes orders and skips, one thread saves, and those of tiers answer too.
    """

    def __init__(self, arena_fd: int, signals: RingSignals, trainer: int, answers: int) -> None:
        self._arena_fd, self._signals, self._trainer, self._answers = arena_fd, signals, trainer, answers
        self._arena = np.empty(0, np.uint8)
        self._answering = threading.Lock()
        self._maintenance: Maintenance | None = None
        self._failed_tries: list[Seat] = []  # of the leader, since its last commit
        self.tier_copier = TierCopier(self._answer, self._has_trainer, self._on_copied)
        self._retention, self._needed = Retention(), tuple[int, ...]()
        self._has_saved = False

    def take_failed_tries(self) -> list[Seat]:
        """Return the tries that failed before an order came."""
        found, self._failed_tries = self._failed_tries, []
        return found

    def save(self, order: SaveOrder, failed_tries: Sequence[Seat]) -> None:
        """Do what an order says, and answer it; a commit clears what failed tries left, also of other writers."""
        started = time.monotonic()
        error = warning = overflowed_to = ""
        seat, tries = order.seat, [*failed_tries, *order.abandoned]
        blocks: RingReader | None = None
        retries = Retries(order.retry_s, lambda: blocks.check() if blocks else None, self._sleep)
        try:
            if order.arena_bytes != len(self._arena):
                memory = mmap.mmap(self._arena_fd, order.arena_bytes, prot=mmap.PROT_READ)
                self._arena = np.frombuffer(memory, np.uint8)
            blocks = RingReader(order, self._arena, self._signals, self._trainer)
            self._maintenance = maintenance = self._maintenance or Maintenance(
                seat.url, leads=seat.leads, stripe_count=order.stripe_count, stripe_size_bytes=order.stripe_size_bytes
            )
            for tried in tries:  # where there was no word yet
                report_failed(open_storage(tried.url), tried, KILLED)
            self._retention, self._needed = order.retention, order.needed
            room = Room(order, maintenance, self._needed_steps, self._has_trainer, not self._has_saved)
            saved_at, why = run_save(order, self._arena, blocks, retries, room, self._trainer)
            self._has_saved = True
            if seat.leads:
                for tried in tries:  # all know how they ended, as they have saved again since
                    clear(open_storage(tried.url), tried)
                self._prune(order, maintenance, saved_at)
            warning = maintenance.take_warning()
            if saved_at != seat:
                overflowed_to = saved_at.url
                warning = "; ".join(filter(None, [f"in {masked(saved_at.url)}, as {seat.url} {why}", warning]))
            self._copy(order, saved_at)
        except UserError as failure:
            error = str(failure)
        except OSError as failure:  # of the arena or its signals: the storage's failures are StorageErrors
            error = f"cannot write step {seat.step} to {seat.url}: {failure}"
        except Exception as failure:  # a fault of ours, reported like any other: the trainer goes on
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"
        if error and seat.leads:
            self._failed_tries += [*tries, seat]
        data_bytes = sum(file.size_bytes for file in order.files)
        write_s = time.monotonic() - started
        self._answer(
            SaveOutcome(seat.step, error, data_bytes, write_s, retries.num_attempts, warning,
                        overflowed_to=overflowed_to)
        )  # fmt: skip

    def _prune(self, order: SaveOrder, maintenance: Maintenance, saved_at: Seat) -> None:
        """Delete what the step that was committed makes superfluous, in the first tier."""
        if saved_at != order.seat:
            self._failed_tries.append(order.seat)
            maintenance.elsewhere = [
                StepRecord(saved_at.step, saved_at=time.time(), attempt=saved_at.attempt, metadata=order.metadata)
            ]
        if not self._has_trainer():
            return
        if saved_at == order.seat:
            maintenance.prune(saved_at.step, order.retention, self._needed_steps())
        else:
            maintenance.make_room(order.retention, self._needed_steps())

    def _copy(self, order: SaveOrder, saved_at: Seat) -> None:
        """Have a saved step copied to where it is due, from where it is; of the overflow its leader sees that it is.

        A replica is of what the node's own disk holds.
        """
        for ordered in order.tier_copies:
            if ordered.of_node and saved_at.num_writers > ordered.source.num_writers:
                error = f"it is in {masked(saved_at.url)}, not in {ordered.source.url}"
                self._answer(SaveOutcome(saved_at.step, error, ordered.data_bytes, 0.0, url=ordered.target.url))
                continue
            tier_copy = ordered if saved_at == order.seat else replace(ordered, source=saved_at)
            if ordered.target.url != saved_at.url or saved_at.leads:
                self.tier_copier.offer([tier_copy])
            else:
                self._answer(SaveOutcome(saved_at.step, "", tier_copy.data_bytes, 0.0, url=saved_at.url))

    def _on_copied(self, tier_copy: TierCopy) -> None:
        """Delete from the first tier what stayed there only to be copied."""
        if self._maintenance is not None:
            self._maintenance.make_room(self._retention, self._needed_steps())

    def _needed_steps(self) -> set[int]:
        """Return the steps of the first tier that no pruning takes."""
        return {*self.tier_copier.steps, *self._needed}

    def let_go(self) -> None:
        """Free the trainer's memory: what is left to copy is in the first tier."""
        self._arena = np.empty(0, np.uint8)
        os.close(self._arena_fd)

    def skip(self, order: SkipOrder) -> None:
        """Report to the other writers that this one has no part in a save."""
        report_failed(open_storage(order.seat.url), order.seat, order.reason)
        if order.seat.leads:
            self._failed_tries.append(order.seat)

    def _has_trainer(self) -> bool:
        """Whether there is one still: else the next one may be reading an older step, and nothing is pruned."""
        return os.getppid() == self._trainer

    def _sleep(self, seconds: float) -> None:
        """Wait, unless the trainer has given the save up."""
        readable([self._signals.stop], seconds)

    def _answer(self, outcome: SaveOutcome) -> None:
        """Answer the trainer; if that fails, end, so that it at least hears that nobody will."""
        with self._answering:
            try:
                os.write(self._answers, outcome.to_line())
            except BrokenPipeError:  # the trainer died meanwhile
                pass
            except OSError:
                os._exit(EXIT_IO)


def step_back() -> None:
    """Lower this process' priority for processor and disk, as far as the system lets it; later threads inherit it."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    number = IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, WHO_PROCESS, 0, BEST_EFFORT << 13 | LOWEST)


def run_save(
    order: SaveOrder, arena: Bytes, blocks: RingReader, retries: Retries, room: Room, trainer: int
) -> tuple[Seat, str]:
    """Write what an order says, where there is room, and the first writer commits; return where and why there."""
    parts = [
        PartSource(PartIndex.from_bytes(file.index.of(arena).tobytes(), "a staged index"), blocks.of_file(number),
                   is_reused=order.ring.is_window)
        for number, file in enumerate(order.files)
    ]  # fmt: skip
    draft = _draft(order, arena) if order.seat.leads else None
    patience = _Patience(order.deadline_s, trainer)

    def patience_s(write_s: float) -> float:
        blocks.check()
        return patience.in_all_s(write_s)

    def write(seat: Seat) -> None:
        is_first = seat == order.seat
        striper = room.maintenance.striper if is_first else Striper()
        target = StepTarget(open_storage(seat.url), seat, order.num_threads, striper)
        whole = draft if draft is None or is_first else replace(draft, share=None)
        write_step(target, parts, whole if seat.leads else None, patience_s, retries, order.code)

    try:
        return save_where_room_is(room, write, lambda: patience_s(0.0), retries)
    except BaseException:
        for each in order.abandoned:  # last of all: what the killed writer had sent has arrived by now
            discard(open_storage(order.seat.url), each, KILLED)
        raise


def _draft(order: SaveOrder, arena: Bytes) -> Root:
    """Return the root as far as it is known before anything is written."""
    return replace(
        _tensors_of(order.draft.of(arena).tobytes()), step=order.seat.step, attempt=order.seat.attempt,
        layout=ParallelLayout(**order.layout), num_layers=order.num_layers, metadata=order.metadata,
        share=order.share,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _tensors_of(draft: bytes) -> Root:
    """Return a root's draft, read once for all saves of one template."""
    return Root.from_bytes(draft, "an order to save")


def _lines(trainer: int) -> Iterator[bytes]:
    """Yield the orders on standard input until there are no more, or until the trainer is gone.

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
            for line in lines:
                if line == NO_MORE.strip():
                    return
                yield line
        elif os.getppid() != trainer:
            return


class _Patience:
    """How long to wait for the other writers: the deadline, cut short once this writer's trainer is dead.

    Then the job was probably killed: writers that were ordered to save are as far as this one, the others never begin.
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
