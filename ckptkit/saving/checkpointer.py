"""Checkpointer: the trainer's side of a save. It stages state into the arena and leaves the rest to the writer process.

`save` blocks for the copy alone (and, by default, for a save before it that still runs); with `overlap` the copy runs
beside the caller's next work until `join`. Nothing here is collective: each rank has a Checkpointer and a writer of its
own, and the first writer finds the others' files by listing. A save that fails is reported and training goes on. The
writer outlives a killed trainer for as long as it takes to finish the save it was handed, and its copies.
"""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

from ckptkit.address import open_run
from ckptkit.chunk import Piece
from ckptkit.format.root import Root, Share, check_attempt, plain_json
from ckptkit.io.striping import check_striping
from ckptkit.layout import ParallelLayout, check_rank
from ckptkit.runs.retention import Retention
from ckptkit.saving.code_version import git_commit
from ckptkit.saving.copies import Copies
from ckptkit.saving.save_order import PromoteOrder, SaveOrder, SaveOutcome, SkipOrder
from ckptkit.saving.save_report import SaveCounts, SaveReport
from ckptkit.saving.staging import Arena, Staging, check_memory
from ckptkit.saving.structure import Structure
from ckptkit.saving.tiers import Node, Tier, due
from ckptkit.saving.writer_process import WriterProcess
from ckptkit.tensor import TensorInfo
from ckptkit.torch_tensors import host_address
from threefold.errors import StorageError, UserError
from threefold.storage import Storage, is_same_place
from threefold.storage.local import local_failure, make_folders

WHEN_BUSY = ("wait", "skip", "abort")
GIVE_UP_WITHIN_S = 2.0  # a writer that does not give a save up within this is killed


@dataclass(frozen=True, slots=True)
class CheckpointerOptions:
    """How to save.

    deadline_s bounds the wait for the other ranks' files; a writer that is not done after timeout_s is killed; what
    fails for a cause that may pass is tried again for retry_s; after max_failed_saves failures in a row `save` raises;
    after each commit, once the new step was read back, steps that `retention` does not keep are deleted. `code` is the
    version of the code that saves, for the root; left empty it is the commit of the git tree that the program was
    started in, if any.

    The arena has room for the rank's whole state, or, with window_bytes > 0, for so much of it: then a save takes as
    long as the storage. when_busy says what a save does that meets one before it still running: "wait" for it, "skip"
    (the new save is not made) or "abort" (the older is not).

    `tiers` are the slower places that steps are copied to in the background, each at its own interval; `node` says
    which of the run's writers save to this URL, where it is not one place for all nodes. Where the program `lfs` is
    there, files on Lustre get stripe_count stripes of stripe_size_bytes each (0: by their size and the number of ranks;
    -1 stripes: one on every target).
    """

    deadline_s: float = 600.0
    timeout_s: float = 3600.0
    retry_s: float = 60.0
    max_failed_saves: int = 3
    retention: Retention = field(default_factory=Retention)
    code: str = ""
    num_threads: int = 2
    window_bytes: int = 0
    when_busy: Literal["wait", "skip", "abort"] = "wait"
    tiers: tuple[Tier, ...] = ()
    node: Node | None = None
    stripe_count: int = 0
    stripe_size_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("deadline_s", "timeout_s", "retry_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise UserError(f"{name} {value!r} is not a number of seconds from 0")
        for name, least in (("max_failed_saves", 1), ("num_threads", 1), ("window_bytes", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f"{name} {value!r} is not a whole number from {least}")
        if self.when_busy not in WHEN_BUSY:
            raise UserError(f"when_busy {self.when_busy!r} is none of {', '.join(WHEN_BUSY)}")
        if not isinstance(self.retention, Retention):
            raise UserError(f"retention {self.retention!r} is not a Retention", hint="Retention(keep_last=3)")
        check_striping(self.stripe_count, self.stripe_size_bytes)


@dataclass
class _Running:
    """The save that the writer works on."""

    step: int
    attempt: str
    data_bytes: int
    stall_s: float = 0.0
    started: float = field(default_factory=time.monotonic)
    given_up: str = ""  # why, where it was


class Checkpointer:
    """Saves one rank's state in the background to a run's URL; use it in a `with`, or close it.

    `attempt` is a name that all ranks of one start of the job share and no other start uses. One thread at a time calls
    its methods, in the process that made it.
    """

    def __init__(
        self, url: str, *, rank: int = 0, world_size: int = 1, attempt: str,
        options: CheckpointerOptions = CheckpointerOptions(),
    ) -> None:  # fmt: skip
        check_rank(rank, world_size)
        storage = open_run(url)
        _check_writable(storage)
        self.url = storage.url
        node = options.node
        self._first_writer, self._num_writers = (node.first_writer, node.num_local) if node else (0, world_size)
        if rank == self._first_writer and not storage.supports_if_absent:
            print(f"warning: {url} cannot commit exclusively: let no second job save there", file=sys.stderr)
        self._rank, self._attempt, self._options = rank, check_attempt(attempt), options
        self.counts = SaveCounts()
        self._code = options.code or git_commit()
        self._closed, self._process_id = False, os.getpid()
        self._share = Share(node.first_writer, node.num_local, world_size) if node else None
        # opened once, before the first save: a URL that is none is told now, and no save pays for a client's import
        places = [open_run(tier.url) for tier in options.tiers]
        _check_places([storage, *places])
        self._tiers = [replace(tier, url=place.url) for tier, place in zip(options.tiers, places, strict=True)]
        self._num_saves = 0
        self._num_failed, self._last_error = 0, ""
        self._arena = Arena()
        self._writer = WriterProcess(self._arena)
        self._running: _Running | None = None
        self._staging: Staging | None = None
        self._told: SaveOutcome | EOFError | None = None  # of the running save, heard while it was staged
        self._abandoned: list[tuple[int, str]] = []
        self._reports: list[SaveReport] = []
        self._structure: Structure | None = None
        self._copies = Copies(world_size)
        self._last_saved: SaveOrder | None = None

    def prepare(self, pieces: Sequence[Piece], tensors: Sequence[TensorInfo]) -> None:
        """Plan, and touch the memory that saves of such pieces take, so that the first stalls no longer than others.

        Call it once before training, or leave it out.
        """
        self._check_usable()
        self._await_running()
        structure = self._structure_of(pieces, tensors)
        _, _, ring = self._arena.hold(structure, self._options.window_bytes)
        if any(host_address(piece.data) is None for piece in pieces):
            sources = [*(piece.data for piece in pieces), *structure.headers]
            Staging(self._arena, structure.stream, ring, sources).warm_up()

    def save(
        self, step: int, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo], layout: ParallelLayout,
        num_layers: int, metadata: Mapping[str, Any], overlap: bool = False,
    ) -> float:  # fmt: skip
        """Save this rank's pieces as part of a step; returns after they are copied, with the seconds that took.

        With `overlap` the copy has only begun: the pieces' values may not change before `join` returned. `tensors` is
        the whole checkpoint's table, the same on all ranks. Raises UserError where pieces do not fit it, StorageError
        after max_failed_saves failures in a row; a failure of this save is told by `poll` or `wait`.
        """
        started = time.monotonic()
        self._check_usable()
        self._num_saves += 1
        # Every save has a folder of its own, so that a repeated step never meets the files of a failed try.
        attempt = f"{self._attempt}-{self._num_saves:04d}"
        # What is wrong with this save is told before one that still runs is given up for it.
        Root(step, attempt, layout, num_layers, {}, (), metadata).check()
        structure = self._structure_of(pieces, tensors)
        check_memory(pieces, structure.sizes, structure.dtypes)
        if not self._make_way(step, attempt):
            return time.monotonic() - started
        if self._num_failed >= self._options.max_failed_saves:
            raise StorageError(f"{self._num_failed} saves in a row failed, the last: {self._last_error}")
        self._running = _Running(step, attempt, sum(file.size_bytes for file in structure.plan.files))
        try:
            files, draft, ring = self._arena.hold(structure, self._options.window_bytes)
        except OSError as error:
            self._running.stall_s = time.monotonic() - started
            self._finish(f"rank {self._rank}: no memory to stage step {step}: {error.strerror}")
            return self._reports[-1].stall_s
        order = SaveOrder(
            url=self.url, step=step, attempt=attempt, writer=self._rank, num_writers=self._num_writers,
            first_writer=self._first_writer, share=self._share, files=tuple(files), ring=ring, draft=draft,
            layout=asdict(layout), num_layers=num_layers,
            metadata=plain_json(metadata), arena_bytes=self._arena.size, deadline_s=self._options.deadline_s,
            retry_s=self._options.retry_s, retention=self._options.retention, code=self._code,
            stripe_count=self._options.stripe_count, stripe_size_bytes=self._options.stripe_size_bytes,
            num_threads=self._options.num_threads, abandoned=tuple(self._abandoned),
        )  # fmt: skip
        writer = self._running_writer()
        self._last_saved = order
        order = replace(order, promotions=self._copies.to(due(self._tiers, step), order))
        self._abandoned.clear()
        self._arena.handover.reset()
        self._told = None
        writer.send(order.to_line())
        sources = [*(piece.data for piece in pieces), *structure.headers]
        try:
            self._staging = Staging(self._arena, structure.stream, ring, sources)
            if overlap:
                self._staging.start(self._room)
            else:
                self._staging.run(self._room)
                self._staging = None
        except BaseException:
            self._staging = None
            self._arena.handover.stop.add()
            raise
        stall_s = time.monotonic() - started
        self._running.stall_s = stall_s
        return stall_s

    def join(self) -> float:
        """Wait until all that an overlapped save copies is copied, so that values may change; the seconds that took.

        Without such a save it does nothing. All other methods that wait, and the next save, call it themselves.
        """
        started = time.monotonic()
        staging, self._staging = self._staging, None
        if staging is None:
            return 0.0
        try:
            staging.join()
        except BaseException:
            self._arena.handover.stop.add()
            raise
        assert self._running is not None, "what is staged runs"
        seconds = time.monotonic() - started
        self._running.stall_s += seconds
        return seconds

    def copy_last(self) -> None:
        """Have the step that was saved last copied to all tiers, also to those that were not due; does not block."""
        self._check_usable()
        self._await_running()
        if self._last_saved is not None:
            writer = self._running_writer()
            writer.send(PromoteOrder(self._copies.to(self._tiers, self._last_saved)).to_line())

    @property
    def is_busy(self) -> bool:
        """Whether a save runs; does not wait."""
        self._collect(0.0)
        return self._running is not None

    def poll(self) -> list[SaveReport]:
        """Reports of the saves that ended since the last call; does not block."""
        self._collect(0.0)
        self._collect_copies(0.0)
        reports, self._reports = self._reports, []
        return reports

    def wait(self) -> list[SaveReport]:
        """Block until no save runs; gives all reports not told yet."""
        self._await_running()
        return self.poll()

    def close(self) -> list[SaveReport]:
        """Wait for the running save and for copies to other tiers, end the writer, free the arena; gives all reports
        not told yet. Closing it again does nothing, nor does closing it in a process that was forked off."""
        if self._closed or os.getpid() != self._process_id:
            return []
        self._closed = True
        self._await_running()
        self._writer.end_orders()
        deadline = time.monotonic() + self._options.timeout_s
        while self._copies and (left_s := deadline - time.monotonic()) > 0:
            self._collect_copies(left_s)
        reports = self.poll()
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

    def _check_usable(self) -> None:
        """The numbers of closed files may be those of others by now, and a forked process shares the pipes."""
        if self._closed:
            raise UserError(f"the Checkpointer of {self.url} is closed", hint="save inside its `with`")
        if os.getpid() != self._process_id:
            raise UserError(f"the Checkpointer of {self.url} is another process's, {self._process_id}")

    def _structure_of(self, pieces: Sequence[Piece], tensors: Sequence[TensorInfo]) -> Structure:
        """The plan and what follows from it, made anew only when the structure of the state changed."""
        if self._structure is None or not self._structure.fits(pieces, tensors):
            self._structure = Structure(pieces, tensors, commits=self._rank == self._first_writer)
        return self._structure

    def _running_writer(self) -> WriterProcess:
        """The writer; a new one where the last one died."""
        if not self._writer.is_alive:
            self._collect_copies(0.0)  # what it told, and what it left undone
            self._writer.close()
            self._writer = WriterProcess(self._arena)
        return self._writer

    def _make_way(self, step: int, attempt: str) -> bool:
        """Deal with a save that still runs; False where the new one is left out for it."""
        running = self._running if self.is_busy else None
        if running is None or self._options.when_busy == "wait":
            self._await_running()
        elif self._options.when_busy == "abort":
            self._give_up(f"rank {self._rank}: step {running.step} was given up when step {step} was to be saved")
        else:
            reason = f"skipped: still saving step {running.step}"
            self.join()
            self._writer.send(SkipOrder(self.url, step, attempt, self._rank, reason, self._first_writer).to_line())
            self._report(SaveReport(step, False, f"rank {self._rank}: {reason}", 0, 0.0, 0.0, skipped=True))
            return False
        return True

    def _give_up(self, reason: str) -> None:
        """End the running save, which leaves nothing behind; by a kill where the writer does not listen."""
        assert self._running is not None, "a save runs"
        self._running.given_up = reason
        self._arena.handover.stop.add()
        deadline = time.monotonic() + GIVE_UP_WITHIN_S
        while self._running is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._abandon(reason)
                return
            self._collect(left_s)

    def _abandon(self, reason: str) -> None:
        """Kill the writer in the midst of a save; its successor cleans up."""
        assert self._running is not None, "a save runs"
        self._writer.kill()
        with contextlib.suppress(EOFError):
            self.join()
        self._abandoned.append((self._running.step, self._running.attempt))
        self._finish(reason)

    def _await_running(self) -> None:
        while self._running is not None:
            left_s = self._running.started + self._options.timeout_s - time.monotonic()
            if left_s <= 0:
                self._abandon(f"the writer was not done after {self._options.timeout_s:g} s and was killed")
                return
            self._collect(left_s)

    def _room(self) -> int:
        """Wait until the writer released blocks, and give their number; 0 where it ended the save."""
        assert self._running is not None, "what is staged runs"
        released = self._arena.handover.released
        while self._told is None:
            if count := released.take():
                return count
            left_s = self._running.started + self._options.timeout_s - time.monotonic()
            if left_s <= 0:
                self._writer.kill()
            try:
                self._told = self._writer.receive(max(left_s, 0.0), unless=released)
            except EOFError as death:
                self._told = death
        return 0

    def _collect(self, timeout_s: float) -> None:
        """Take what the writer says within a time; its death ends the running save."""
        deadline = time.monotonic() + timeout_s
        if self._staging is not None:
            if timeout_s == 0 and self._staging.is_running:
                return  # it hears the writer itself
            self._staging.wait(timeout_s)
            if self._staging.is_running:
                return
            self.join()
        if self._running is None:
            return
        told = self._told
        if told is None:
            try:
                told = self._writer.receive(max(deadline - time.monotonic(), 0.0))
            except EOFError as death:
                told = death
        if isinstance(told, EOFError):
            self._abandoned.append((self._running.step, self._running.attempt))
            self._finish(f"rank {self._rank}: {told} while it saved step {self._running.step}")
        elif told is not None:
            error = told.error and (self._running.given_up or told.error)
            self._finish(error, told.write_s, told.num_attempts, told.warning)

    def _finish(self, error: str, write_s: float | None = None, num_attempts: int = 1, warning: str = "") -> None:
        running = self._running
        assert running is not None, "a save runs"
        self._running = None
        self._num_failed = self._num_failed + 1 if error else 0
        self._last_error = error
        if error:  # nothing to copy
            self._last_saved = None
            self._copies.forget(running.step)
        seconds = time.monotonic() - running.started if write_s is None else write_s
        self._report(
            SaveReport(running.step, not error, error, running.data_bytes, seconds, running.stall_s, num_attempts,
                       warning=warning, url=self.url)
        )  # fmt: skip

    def _report(self, report: SaveReport) -> None:
        self.counts = self.counts.plus(report)
        self._reports.append(report)

    def _collect_copies(self, timeout_s: float) -> None:
        """Take what the writer says of copies to other tiers, waiting for it where no save runs; its death ends all."""
        death = ""
        if self._copies and self._running is None:
            try:
                self._writer.receive(timeout_s, until_copied=True)
            except EOFError as error:
                death = f"rank {self._rank}: {error} while it copied step"
        self._reports += self._copies.ended(self._writer.take_copied())
        if death:
            self._reports += self._copies.lost(death)


def _check_writable(storage: Storage) -> None:
    """StorageError where a run's folder cannot be: told at the start, and not after the steps up to the first save."""
    path = storage.local_path("any")
    if path is None:
        return
    try:
        make_folders(path.parent)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise local_failure(error, "write", path.parent) from error


def _check_places(places: Sequence[Storage]) -> None:
    """UserError where two tiers are one place: a file would be copied onto itself, and lost; or where one is fsspec's
    memory, which a writer process fills with what nobody else sees."""
    for number, place in enumerate(places):
        if place.url.startswith("memory:"):
            raise UserError(
                f"{place.url} is lost with the process that writes it", hint="/dev/shm/run is memory that stays"
            )
        if any(is_same_place(place, other) for other in places[:number]):
            raise UserError(f"{place.url} is named twice as a tier", hint="name each tier once, the fastest first")
