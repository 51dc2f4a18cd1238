"""Checkpointer: the trainer's side of a save. It stages state into the arena and leaves the rest to the writer process.

`save` blocks for the copy alone (and, by default, for a save before it that still runs); with `overlap` the copy runs
beside the caller's next work until `join`. Nothing here is collective: each rank has a Checkpointer and a writer of its
own, and the first writer finds the others' files by listing. A save that fails is reported and training goes on. The
writer outlives a killed trainer for as long as it takes to finish the save it was handed, and its copies.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckptkit.format.address import open_run
from ckptkit.format.keys import Seat, check_attempt
from ckptkit.format.root import Root, Share, plain_json
from ckptkit.handoff.protocol import CopyOrder, SaveOrder, SkipOrder
from ckptkit.handoff.report import SaveCounts, SaveReport
from ckptkit.io.torch_tensors import check_memory, is_on_host
from ckptkit.model.layout import ParallelLayout, check_rank
from ckptkit.model.tensor import Piece, TensorInfo
from ckptkit.saving.client import WriterProcess
from ckptkit.saving.code_version import git_commit
from ckptkit.saving.options import CheckpointerOptions, check_writable, open_tiers
from ckptkit.saving.running_save import RunningSave, no_change
from ckptkit.saving.staging import Arena, SaveTemplate, Staging
from ckptkit.tiers.pending import PendingCopies
from ckptkit.writer.commit import KILLED
from threefold.cli import log
from threefold.closing import Closing
from threefold.errors import StorageError, UserError

DEFAULTS = CheckpointerOptions()
GIVE_UP_WITHIN_S = 2.0  # a writer that does not give a save up within this is killed
MAX_SAVES = 10**9  # whose attempts have names of their own


class Checkpointer(Closing):
    """Saves one rank's state in the background to a run's URL; use it in a `with`, or close it.

    `attempt` is one start's name, on all ranks. No pruning takes the steps `needed`. One thread at a time calls it.
    """

    def __init__(
        self, url: str, *, rank: int = 0, world_size: int = 1, attempt: str,
        options: CheckpointerOptions = DEFAULTS,
    ) -> None:  # fmt: skip
        check_rank(rank, world_size)
        storage = open_run(url)
        check_writable(storage)
        self.url = storage.url
        node = options.node
        first_writer, num_writers = (node.first_writer, node.num_local) if node else (0, world_size)
        self._seat = Seat(storage.address, 0, attempt, rank, num_writers, first_writer)  # of all saves, but the try
        if self._seat.leads and not storage.supports_if_absent:
            log(f"warning: {self.url} cannot commit exclusively: let no second job save there")
        check_attempt(f"{attempt}-{MAX_SAVES}")
        self._options, self.counts = options, SaveCounts()
        self._code = options.code or git_commit()
        self._closed, self._process_id, self._give_up_within_s = False, os.getpid(), GIVE_UP_WITHIN_S
        self._share = Share(node.first_writer, node.num_local, world_size) if node else None
        tiers = open_tiers(storage, options.tiers)
        self._num_saves, self._num_failed, self._last_error = 0, 0, ""
        self._arena = Arena()
        self._writer = WriterProcess(self._arena)
        self._running: RunningSave | None = None
        self._abandoned: list[Seat] = []
        self._reports, self.needed = list[SaveReport](), tuple[int, ...]()
        self._template: SaveTemplate | None = None
        self.copies = PendingCopies(tiers, world_size)
        self._last_saved: SaveOrder | None = None

    def prepare(self, pieces: Sequence[Piece], tensors: Sequence[TensorInfo]) -> None:
        """Plan, and touch the memory that saves of such pieces take, so that the first stalls no longer than others.

        Call it once before training, or leave it out. Raise StorageError if there is not so much memory.
        """
        self._check_usable()
        self._await_running()
        template = self._template_of(pieces, tensors)
        check_memory(pieces, template.sizes, template.dtypes)
        try:
            _, _, ring = self._arena.hold(template, self._options.window_bytes)
        except OSError as error:
            num_bytes = sum(file.size_bytes for file in template.plan.files)
            text = f"rank {self._seat.writer}: no memory to stage saves of {num_bytes:,} bytes: {error.strerror}"
            raise StorageError(text, hint="checkpoint.window_mib = 512, or window_bytes, takes less") from error
        if not all(is_on_host(piece.data) for piece in pieces):
            sources = [*(piece.data for piece in pieces), *template.headers]
            Staging(self._arena, template.block_layout, ring, sources).warm_up()

    def save(
        self, step: int, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo], layout: ParallelLayout,
        num_layers: int, metadata: Mapping[str, Any], overlap: bool = False,
        change: Callable[[], str] = no_change,
    ) -> float:  # fmt: skip
        """Save this rank's pieces as part of a step; return the seconds until they were copied.

        With `overlap` the copy has only begun: the pieces' values may not change before `join` returned. `change` is
        asked at its end, on another thread, what did change; unless that is "" the save fails of it. `tensors` is the
        whole checkpoint's table, the same on all ranks. Raise UserError if pieces do not fit it, StorageError after
        max_failed_saves failures in a row; a failure of this save is in the reports of `poll` or `wait`.
        """
        started = time.monotonic()
        self._check_usable()
        self._num_saves += 1
        # Every save has a folder of its own, so that a repeated step never meets the files of a failed try.
        seat = replace(self._seat, step=step, attempt=f"{self._seat.attempt}-{self._num_saves:04d}")
        # What is wrong with this save is raised before one that still runs is given up for it.
        Root(step, seat.attempt, layout, num_layers, {}, (), metadata).check()
        template = self._template_of(pieces, tensors)
        check_memory(pieces, template.sizes, template.dtypes)
        if not self._make_way(seat):
            return time.monotonic() - started
        if self._num_failed >= self._options.max_failed_saves:
            raise StorageError(f"{self._num_failed} saves in a row failed, the last: {self._last_error}")
        num_bytes = sum(file.size_bytes for file in template.plan.files)
        running = RunningSave(seat, num_bytes, self._running_writer(), self._arena.signals, self._options.timeout_s)
        try:
            files, draft, ring = self._arena.hold(template, self._options.window_bytes)
        except OSError as error:
            running.stall_s = time.monotonic() - started
            self.copies.skipped(step)
            self._finish(running, f"rank {self._seat.writer}: no memory to stage step {step}: {error.strerror}")
            return running.stall_s
        options = self._options
        order = SaveOrder(
            seat=seat, share=self._share, files=tuple(files), ring=ring, draft=draft, layout=layout.sizes,
            num_layers=num_layers, metadata=plain_json(metadata), arena_bytes=self._arena.size,
            deadline_s=options.deadline_s, retry_s=options.retry_s, retention=options.retention, code=self._code,
            stripe_count=options.stripe_count, stripe_size_bytes=options.stripe_size_bytes,
            num_threads=options.num_threads, abandoned=tuple(self._abandoned), needed=self.needed,
        )  # fmt: skip
        staging = Staging(self._arena, template.block_layout, ring, [*(p.data for p in pieces), *template.headers])
        self._last_saved = order
        line = self.copies.with_tiers(order, is_window=options.window_bytes > 0).to_line()
        self._running = running  # from here on there is somebody to wait for
        running.order(line)
        if overlap:
            running.stage_beside(staging, change)
        else:
            running.stage(staging)
        running.stall_s = time.monotonic() - started
        return running.stall_s

    def join(self) -> float:
        """Wait until all that an overlapped save copies is copied, so that values may change; the seconds that took.

        Without such a save it does nothing. All other methods that wait, and the next save, call it themselves.
        """
        return self._running.join() if self._running is not None else 0.0

    def copy_last(self) -> None:
        """Order copies of the step that was saved last to all tiers, also to those that were not due.

        Waits for its save, and not for the copies.
        """
        self._check_usable()
        self._await_running()
        if self._last_saved is not None and self._options.tiers:
            writer = self._running_writer()  # first: its successor is ordered what a dead one left
            writer.send(CopyOrder(self.copies.all(self._last_saved)).to_line(), self._options.timeout_s)

    def copy_next(self) -> None:
        """Let the next step be copied to the tiers that the last one was due at, as it failed on some rank.

        All ranks call it, a rank alone need not. Where nodes have a disk each it goes to the next tier in any case.
        """
        self.copies.make_up(goes_to_whole=self._share is not None)

    @property
    def is_busy(self) -> bool:
        """Whether a save runs; does not wait."""
        self._collect(0.0)
        return self._running is not None

    def poll(self) -> list[SaveReport]:
        """Return reports of the saves that ended since the last call; does not block."""
        self._collect(0.0)
        self._collect_copies(0.0)
        reports, self._reports = self._reports, []
        return reports

    def wait(self) -> list[SaveReport]:
        """Block until no save runs; return all reports that were not returned yet."""
        self._await_running()
        return self.poll()

    def close(self, *, copies_last: bool = False) -> list[SaveReport]:
        """Wait for the running save and for copies to other tiers, end the writer and free the arena.

        With `copies_last` the last step goes to all tiers first. Return all reports that were not returned yet. A
        second call does nothing, nor does one in a forked process.
        """
        if self._closed or os.getpid() != self._process_id:
            return []
        try:
            if copies_last:
                self.copy_last()
            self._await_running()
            deadline = time.monotonic() + self._options.timeout_s
            while self.copies or self.copies.has_left:
                if (left_s := deadline - time.monotonic()) <= 0:
                    break
                self._running_writer().end_orders()
                self._collect_copies(left_s)
            late = f"the writer was not done after {self._options.timeout_s:g} s"
            return [*self.poll(), *self.copies.lost(f"rank {self._seat.writer}: {late} while it copied step")]
        finally:
            self._closed = True
            self._writer.close()
            self._arena.close()

    @property
    def writer_pid(self) -> int:
        """Process id of the writer."""
        return self._writer.pid

    def _check_usable(self) -> None:
        """Refuse if closed or forked: numbers of closed files may be others' by now, and a fork shares the pipes."""
        if self._closed:
            raise UserError(f"the Checkpointer of {self.url} is closed", hint="save inside its `with`")
        if os.getpid() != self._process_id:
            raise UserError(f"the Checkpointer of {self.url} is another process's, {self._process_id}")

    def _template_of(self, pieces: Sequence[Piece], tensors: Sequence[TensorInfo]) -> SaveTemplate:
        """Return the plan and what follows from it, made again only when the structure of the state changed."""
        if self._template is None or not self._template.fits(pieces, tensors):
            self._template = SaveTemplate(pieces, tensors, commits=self._seat.leads)
        return self._template

    def _running_writer(self) -> WriterProcess:
        """Return the writer; a new one if the last one died."""
        if not self._writer.is_alive:
            self._writer.kill()  # dead already
            while self.copies:  # what it reported, and at its end what it left undone
                self._collect_copies(0.0)
            self._writer.close()
            self._writer = WriterProcess(self._arena)
            if self.copies.has_left:
                self._writer.send(CopyOrder(self.copies.take_up()).to_line(), self._options.timeout_s)
        return self._writer

    def _make_way(self, seat: Seat) -> bool:
        """Deal with a save that still runs; return False if the new one is left out for it."""
        running = self._running if self.is_busy else None
        if running is None or self._options.when_busy == "wait":
            self._await_running()
        elif self._options.when_busy == "abort":
            reason = f"step {running.seat.step} was given up when step {seat.step} was to be saved"
            self._give_up(running, f"rank {self._seat.writer}: {reason}")
        else:
            reason = f"skipped: still saving step {running.seat.step}"
            self.join()
            self._send_skip(seat, reason)
            self.copies.skipped(seat.step)
            error = f"rank {self._seat.writer}: {reason}"
            self._report(SaveReport(seat.step, False, error, 0, 0.0, 0.0, skipped=True, url=self.url))
            return False
        return True

    def _give_up(self, running: RunningSave, reason: str) -> None:
        """End a save, which leaves nothing behind; by a kill if the writer does not listen."""
        running.give_up(reason)
        deadline = time.monotonic() + self._give_up_within_s
        while self._running is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._abandon(running, reason)
                return
            self._collect(left_s)

    def _abandon(self, running: RunningSave, reason: str) -> None:
        """Kill the writer in the midst of a save; its successor cleans up."""
        self._writer.kill()
        running.join()
        self._finish_killed(running, reason)

    def _await_running(self) -> None:
        while (running := self._running) is not None:
            left_s = running.left_s
            if left_s <= 0:
                self._abandon(running, f"the writer was not done after {self._options.timeout_s:g} s and was killed")
                return
            self._collect(left_s)

    def _collect(self, timeout_s: float) -> None:
        """Take what the writer says within a time; its death ends the running save."""
        running = self._running
        outcome = running.outcome(timeout_s) if running is not None else None
        if running is None or outcome is None:
            return
        if isinstance(outcome, EOFError):
            self._finish_killed(running, f"rank {self._seat.writer}: {outcome} while it saved step {running.seat.step}")
        else:
            self._abandoned.clear()  # it knew of them, and lived
            error = outcome.error and (running.given_up or outcome.error)
            if outcome.overflowed_to and self._last_saved is not None:
                self._last_saved = self._last_saved.moved(outcome.overflowed_to)
            self._finish(running, error, outcome.write_s, outcome.num_attempts, outcome.warning)

    def _finish_killed(self, running: RunningSave, reason: str) -> None:
        """End a save whose writer is dead; its successor lets the other ranks know at once."""
        self._abandoned.append(running.seat)
        self._finish(running, reason)
        if running.seat.num_writers > 1:
            with suppress(OSError):  # no successor now: the one of the next save lets them know
                self._send_skip(running.seat, KILLED)

    def _send_skip(self, seat: Seat, reason: str) -> None:
        """Have the writer say that this rank has no part in a try, so that no other rank waits for it."""
        self._running_writer().send(SkipOrder(seat, reason).to_line(), self._options.timeout_s)

    def _finish(
        self, running: RunningSave, error: str, write_s: float | None = None, num_attempts: int = 1, warning: str = ""
    ) -> None:
        self._running = None
        self._num_failed = self._num_failed + 1 if error else 0
        self._last_error = error
        if error:  # nothing to copy
            self._last_saved = None
            self.copies.failed(running.seat.step)
        seconds = time.monotonic() - running.started if write_s is None else write_s
        self._report(
            SaveReport(running.seat.step, not error, error, running.data_bytes, seconds, running.stall_s, num_attempts,
                       warning=warning, url=self.url)
        )  # fmt: skip

    def _report(self, report: SaveReport) -> None:
        self.counts = self.counts.plus(report)
        self._reports.append(report)

    def _collect_copies(self, timeout_s: float) -> None:
        """Take what the writer says of copies to other tiers, waiting for it if no save runs; its death ends all."""
        death = ""
        if self.copies and self._running is None:
            try:
                self._writer.receive(timeout_s, until_copied=True)
            except EOFError as error:
                death = f"rank {self._seat.writer}: {error} while it copied step"
        self._reports += self.copies.ended(self._writer.take_copied())
        if death:
            self._reports += self.copies.lost(death)
