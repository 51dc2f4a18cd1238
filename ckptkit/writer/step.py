"""One writer's share of a step: its data files and their indexes, the commit where it leads, and what it wrote
removed where it fails.

Where the bytes come from is the caller's: an arena of staged files, or the tensors' own memory.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.format.saved import Saved
from ckptkit.format.seat import Seat
from ckptkit.handoff.block_layout import cut
from ckptkit.io.blocks import BlockWriter, Columns, checksums, copy_many
from ckptkit.io.striping import Striper
from ckptkit.io.torch_tensors import Bytes
from ckptkit.loading.roots import committed_attempt, root_info
from ckptkit.plan.cover import Cover
from ckptkit.writer.commit import NO_ANSWER, NotCommitted, await_commit, commit_root, wait_for_parts
from ckptkit.writer.retries import Retries
from threefold.errors import StorageError, UserError
from threefold.masking import masked
from threefold.storage import AlreadyExists, Buffer, Storage
from threefold.storage.folders import local_root
from threefold.storage.local import local_failure
from threefold.storage.new_file import NewFile

UPLOAD_BYTES = 8 << 20


class GivenUp(StorageError):
    """The save is no longer wanted."""


@dataclass(frozen=True, eq=False)
class PartSource:
    """A data file to be written: its index without checksums yet, and its bytes.

    `blocks` gives rows of (address, bytes), in file order; each block but the last is a whole number of granules.
    `is_reused` says that a block's memory gets other bytes once the next block is taken.
    """

    draft: PartIndex
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
    """Write one writer's files. The first writer, which has the root's draft, waits for all others and commits; the
    others wait until it has, unless they are told not to.

    patience_s is asked again and again how long to wait for the others, given the seconds that this writer's own files
    took; a writer that waits for the first one waits twice as long, for its files and for its commit. On a failure this
    writer's files are removed, unless the root may come and name them, and a `.failed` object tells the others. Returns
    the root where this writer committed it; it records the version of the `code` that saves.
    """
    started = time.monotonic()
    storage, seat, retries = target.storage, target.seat, retries or Retries()
    try:
        if retries.run(lambda: root_info(storage, seat.step)) is not None:
            hint = f"a committed step is never written again; choose another step or place: ckptkit ls {storage.url}"
            raise AlreadyExists(f"step {seat.step} of {storage.url} is committed already", hint=hint)
    except StorageError as error:
        report_failed(storage, seat, str(error))  # there are no files yet
        raise
    may_be_named = False  # whether the first writer may commit this writer's files
    try:
        largest = max((part.draft.size_bytes for part in parts), default=0)
        target.striper.prepare(storage, seat.keys(0)[0], largest, seat.num_writers)
        indexes = [write_data(target, number, part, retries) for number, part in enumerate(parts)]
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
        cover = Cover(list(draft.tensors.values()), is_share=draft.share is not None)
        parts_there = wait_for_parts(storage, seat, lambda: patience_s(write_s), retries=retries, cover=cover)
        commit_s = time.monotonic() - started - write_s
        saved = Saved.now(code=code, write_s=write_s, commit_s=commit_s)
        root = replace(draft, parts=parts_there, saved=saved)
    except BaseException as error:
        _clean_up(storage, seat, len(parts), error, may_be_named=may_be_named)
        raise
    try:
        retries.run(partial(commit_root, storage, root), checks=False)
    except (AlreadyExists, NotCommitted) as error:
        _clean_up(storage, seat, len(parts), error)
        raise
    except BaseException as error:
        report_failed(storage, seat, f"{NO_ANSWER}{error}")
        raise
    return root


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
        if committed_attempt(storage, seat.step) != seat.attempt:
            keys = storage.list_keys(f"{seat.folder}/{seat.attempt}/")
            storage.delete([key for key in keys if key != but])


def report_failed(storage: Storage, seat: Seat, reason: str) -> bool:
    """Leave word for those who wait for this writer, unless there is one or the root says it; False if it cannot."""
    if seat.num_writers == 1:
        return True
    try:
        committed = committed_attempt(storage, seat.step)
        is_known = committed is not None if seat.leads else committed == seat.attempt
        if not is_known and storage.info(seat.failed_key) is None:
            storage.write(seat.failed_key, masked(reason).encode())
    except UserError:
        return False
    return True


def write_data(target: StepTarget, number: int, part: PartSource, retries: Retries | None = None) -> PartIndex:
    """Write a writer's n-th data file, and give its index with the checksums of what was written.

    Blocks whose memory is reused are there for one try only.
    """
    tries = Retries() if part.is_reused or retries is None else retries
    return replace(part.draft, checksums=tries.run(partial(_write_blocks, target, target.seat.keys(number)[0], part)))


def _write_blocks(target: StepTarget, key: str, part: PartSource) -> Columns:
    """Write a data file from its blocks; gives the checksums of its granules."""
    root = local_root(target.storage)
    found: list[Columns] = []
    if root is None:
        target.storage.write(key, _buffers(part, found), size_bytes=part.draft.size_bytes)
    else:
        try:
            with BlockWriter(NewFile(root, key), part.draft.size_bytes) as writer:
                at = 0
                for rows in part.blocks:
                    found.append(writer.write(at, rows, num_threads=target.num_threads))
                    at += int(rows[:, 1].sum())
        except OSError as error:
            raise local_failure(error, "write", root / key) from error
    return np.concatenate(found)


def _buffers(part: PartSource, found: list[Columns]) -> Iterator[Buffer]:
    """A file's bytes as buffers for an upload, which may hold on to them; its granules' checksums go to `found`."""
    for rows in part.blocks:
        for buffer in _pieces_of_upload(rows):
            found.append(checksums(buffer))
            yield buffer.tobytes() if part.is_reused else buffer.data


def _pieces_of_upload(rows: Columns) -> Iterator[Bytes]:
    """The bytes of a block, in buffers of UPLOAD_BYTES."""
    if len(rows) == 1:
        whole = _memory_at(*rows[0].tolist())
        yield from (whole[start : start + UPLOAD_BYTES] for start in range(0, len(whole), UPLOAD_BYTES))
        return
    source, offset, block, at, size = cut(rows[:, 1].astype(np.int64), UPLOAD_BYTES)
    for number in range(int(block[-1]) + 1):
        part = block == number
        gathered = np.empty(int(size[part].sum()), np.uint8)
        address = rows[source[part], 0].astype(np.int64) + offset[part]
        copy_many(np.stack([address, gathered.ctypes.data + at[part], size[part]], axis=1))
        yield gathered


def _memory_at(address: int, size_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def _clean_up(
    storage: Storage, seat: Seat, num_files: int, error: BaseException, *, may_be_named: bool = False
) -> None:
    """Make room, and let the others know; neither works if the storage is gone, and that has its deadline."""
    is_over = isinstance(error, AlreadyExists | NotCommitted)
    reason = str(error) or type(error).__name__
    if seat.leads:
        if isinstance(error, AlreadyExists):
            clear(storage, seat)
        else:
            discard(storage, seat, reason)
        return
    if is_over or not may_be_named:
        for number in range(num_files):
            with contextlib.suppress(StorageError):
                storage.delete(seat.keys(number))
    if not is_over:
        report_failed(storage, seat, reason)
