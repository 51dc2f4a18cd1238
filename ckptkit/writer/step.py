"""One writer's share of a step: its data files and their indexes, and the commit if it leads.

If it fails, what it wrote is removed.
Where the bytes come from is the caller's: an arena of staged files, or the tensors' own memory.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from shlex import quote

from ckptkit.format.keys import Seat
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.format.saved import Saved
from ckptkit.io.blocks import Columns
from ckptkit.io.data_files import is_out_of_room, write_blocks
from ckptkit.io.striping import Striper
from ckptkit.io.sums import ChunkSums
from ckptkit.loading.roots import committed_attempt, root_info
from ckptkit.plan.cover import Cover
from ckptkit.writer.commit import NO_ANSWER, NO_ROOM, NoRoom, NotCommitted, await_commit, commit_root, wait_for_parts
from ckptkit.writer.retries import Retries
from threefold.errors import StorageError, UserError
from threefold.masking import masked
from threefold.storage import AlreadyExists, Storage


class GivenUp(StorageError):
    """The save is no longer wanted."""


@dataclass(frozen=True, eq=False)
class PartSource:
    """A data file to be written: its index without checksums yet, and its bytes.

    `blocks` are rows of (address, bytes), in file order; each block but the last is a whole number of granules.
    `is_reused` says that a block's memory gets other bytes once the next block is taken.
    """

    index: PartIndex
    blocks: Iterable[Columns]
    is_reused: bool = False


@dataclass(frozen=True, slots=True)
class StepTarget:
    """Where a writer's files go: the storage of its seat's run, and how they are written there."""

    storage: Storage
    seat: Seat
    num_threads: int = 2
    striper: Striper = field(default_factory=Striper)


def write_step(
    target: StepTarget, parts: Sequence[PartSource], draft: Root | None, patience_s: Callable[[float], float],
    retries: Retries | None = None, code: str = "", *, awaits_commit: bool = True,
) -> Root | None:  # fmt: skip
    """Write one writer's files, and return the root if this writer committed it.

    The first writer, which has the root's draft, waits for all others and commits. The others wait until it has, unless
    awaits_commit is False. The root records the version of the `code` that saves.

    Before each look patience_s is called with the seconds that this writer's own files took; it returns how long to
    wait in all. A writer that waits for the first one waits twice as long, for its files and for its commit. After a
    failure this writer's files are removed, unless the root may come and name them, and a `.failed` object lets the
    others know.
    """
    started = time.monotonic()
    storage, seat, retries = target.storage, target.seat, retries or Retries()
    try:
        if retries.run(lambda: root_info(storage, seat.step)) is not None:
            hint = f"a step is never written again; choose another step or place: ckptkit ls {quote(storage.url)}"
            raise AlreadyExists(f"step {seat.step} of {storage.url} is committed already", hint=hint)
    except StorageError as error:
        report_failed(storage, seat, str(error))  # there are no files yet
        raise
    may_be_named = False  # whether the first writer may commit this writer's files
    try:
        largest = max((part.index.size_bytes for part in parts), default=0)
        target.striper.prepare(storage, seat.keys(0)[0], largest, seat.num_writers)
        indexes = [_write_data(target, number, part, retries) for number, part in enumerate(parts)]
        # The first file's index goes last: it says that this writer is done.
        for number in reversed(range(len(parts))):
            content = indexes[number].to_bytes()
            if number == 0:  # from its try on, whatever its answer
                may_be_named = True
            retries.run(partial(storage.write, seat.keys(number)[1], content))
        write_s = time.monotonic() - started
        if draft is None:
            if awaits_commit:
                await_commit(storage, seat, lambda: 2 * patience_s(write_s), retries=retries)
            return None
    except BaseException as error:
        _clean_up(storage, seat, len(parts), error, may_be_named=may_be_named)
        raise
    return commit_parts(target, draft, lambda: patience_s(write_s), retries, code=code, write_s=write_s)


def commit_parts(
    target: StepTarget, draft: Root, patience_s: Callable[[], float], retries: Retries | None = None, *,
    code: str = "", write_s: float = 0.0,
) -> Root:  # fmt: skip
    """Commit a step as its first writer, once the files of all writers are there; return the root.

    It records how long this writer wrote. If that fails, all files of the try are removed, unless the root may come.
    """
    storage, seat, retries, started = target.storage, target.seat, retries or Retries(), time.monotonic()
    try:
        cover = Cover(list(draft.tensors.values()), is_share=draft.share is not None)
        parts = wait_for_parts(storage, seat, patience_s, retries=retries, cover=cover)
        saved = Saved.now(code=code, write_s=write_s, commit_s=time.monotonic() - started)
        root = replace(draft, parts=parts, saved=saved, certificate=cover.certificate)
    except BaseException as error:
        _clean_up(storage, seat, 0, error)
        raise
    try:
        retries.run(partial(commit_root, storage, root), checks=False)
    except (AlreadyExists, NotCommitted) as error:
        _clean_up(storage, seat, 0, error)
        raise
    except BaseException as error:
        report_failed(storage, seat, f"{NO_ANSWER}{error}")
        raise
    return root


def is_full(error: BaseException) -> bool:
    """Return whether a save failed because this writer, or another, found no room."""
    return isinstance(error, NoRoom) or is_out_of_room(error)


def discard(storage: Storage, seat: Seat, reason: str) -> None:
    """Let nobody wait for a try that ended without this writer; if it leads, remove all files but that word."""
    is_reported = report_failed(storage, seat, reason)
    if seat.leads:  # without a root the others' files are of no use
        clear(storage, seat, but=seat.failed_key)
        if not is_reported:  # there is room now
            report_failed(storage, seat, reason)


def clear(storage: Storage, seat: Seat, *, but: str = "") -> None:
    """Remove all files of a try, but one; none if the try is committed or the storage does not answer."""
    with contextlib.suppress(UserError):
        if committed_attempt(storage, seat.step, seat.attempt) != seat.attempt:
            keys = storage.list_keys(f"{seat.folder}/{seat.attempt}/")
            storage.delete([key for key in keys if key != but])


def report_failed(storage: Storage, seat: Seat, reason: str) -> bool:
    """Leave word for those who wait for this writer, unless there is one or the root says it; False if it cannot."""
    if seat.num_writers == 1:
        return True
    try:
        committed = committed_attempt(storage, seat.step, seat.attempt)
        is_known = committed is not None if seat.leads else committed == seat.attempt
        if not is_known and storage.info(seat.failed_key) is None:
            storage.write(seat.failed_key, masked(reason).encode())
    except UserError:
        return False
    return True


def _write_data(target: StepTarget, number: int, part: PartSource, retries: Retries) -> PartIndex:
    """Write a writer's n-th data file, and return its index with the checksums of what was written.

    Blocks whose memory is reused are there for one try only.
    """
    tries = Retries() if part.is_reused else retries

    def write() -> PartIndex:
        sums = ChunkSums(part.index.chunks, part.index.data_offset)
        found = write_blocks(
            target.storage, target.seat.keys(number)[0], part.index.size_bytes, part.blocks,
            is_reused=part.is_reused, num_threads=target.num_threads, sums=sums,
        )  # fmt: skip
        return replace(part.index, checksums=found, sums=sums.values)

    return tries.run(write)


def _clean_up(
    storage: Storage, seat: Seat, num_files: int, error: BaseException, *, may_be_named: bool = False
) -> None:
    """Make room, and let the others know; neither works if the storage is gone, and that has its deadline."""
    reason = str(error) or type(error).__name__
    if is_full(error):
        reason = NO_ROOM + reason.replace(NO_ROOM, "")
    if seat.leads:
        if isinstance(error, AlreadyExists):
            clear(storage, seat)
        else:
            discard(storage, seat, reason)
        return
    # the first writer may still commit what lost to another attempt, once that is pruned; if it does not, it clears all
    if isinstance(error, NotCommitted) or not may_be_named:
        for number in range(num_files):
            with contextlib.suppress(StorageError):
                storage.delete(seat.keys(number))
    if not isinstance(error, AlreadyExists | NotCommitted):
        report_failed(storage, seat, reason)
