"""Copy: one committed step from any storage to any other, part by part, byte for byte, verified while it passes.

Each granule is checked against its checksum before it is written, files are copied side by side, and the root goes
last, by an exclusive write: a copy that was killed is not a checkpoint, and the same copy goes on with it. What it
keeps is made durable first, and then read past the page cache. Memory: two blocks of 8 MiB a file in work, and what
the uploads hold.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from shlex import quote

from ckptkit.check.verify import check_files, verify_checkpoint
from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.format.part_copy import BLOCK_BYTES, copy_part, loading
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.io.blocks import Columns
from ckptkit.io.data_files import refuse_full
from ckptkit.io.double_buffer import double_buffered
from ckptkit.loading.chunk_source import reading_threads
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import stored_root
from ckptkit.plan.certificate import is_readable
from ckptkit.runs.temporaries import remove_unless_written, temporaries
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import Storage
from threefold.storage.local import sync_name

FILES_AT_ONCE = 4
UPLOAD_MEMORY_BYTES = 256 << 20  # for all uploads at once, where the target is an object store
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CopyReport:
    """What a copy did; the bytes kept were there already, whole and right. Of a dry run: what it would do, by sizes.

    `certified`: all tensors were read and are equal to what was saved, by the certificate of the save.
    """

    source: str
    target: str
    step: int
    num_files: int
    bytes_copied: int
    bytes_kept: int
    seconds: float
    dry_run: bool = False
    certified: bool = False


def copy_step(
    source: CheckpointReader,
    target: Storage,
    *,
    verify: bool = False,
    progress: Progress = lambda done, total: None,
    dry_run: bool = False,
    files_at_once: int = FILES_AT_ONCE,
) -> CopyReport:
    """Copy the checkpoint of an open reader to the same step of another storage, and commit it there.

    Raise UserError if another checkpoint is committed there as that step, CheckFailed if the source or the copy is
    damaged, StorageError if the disk is short; nothing is written if files' sizes show it. The sizes of the copy's
    files are always looked up again, with `verify` every byte is read back. `progress` is called with the bytes done
    and the total. After any failure the same call continues. With `dry_run` nothing is written and no data read: the
    report is of what would be.
    """
    started = time.monotonic()
    step = source.root.step
    [text, _], key = stored_root(source.files.storage, step), f"{step_folder(step)}/{ROOT_KEY}"
    is_there = target.info(key) is not None
    if is_there and stored_root(target, step)[0] != text:
        raise UserError(
            f"{target.url} already holds another checkpoint as step {step}",
            hint=f"ckptkit inspect {quote(target.url)}/{step_folder(step)}",
        )
    num_files, there_url = 2 * len(source.root.parts) + 1, f"{target.url}/{step_folder(step)}"
    copied, num_kept = 0, 0
    if not is_there:
        check_files(source)
        copied, num_kept = _sizes(source, target, len(text))
        refuse_full(target, copied - _remove_leftovers(source.root, target, dry_run=dry_run))
    if dry_run:
        return CopyReport(source.url, there_url, step, num_files, copied, num_kept, time.monotonic() - started, dry_run)
    if is_there:
        _remove_leftovers(source.root, target, dry_run=False)
        sync_name(target, key)
    is_summed = False
    with CheckpointReader(target, step, root=source.root) as copy:
        if not is_there:
            copying = _Copying(source, target, progress)
            with reading_threads(files_at_once, source, copy) as pool:
                sizes = list(pool.map(copying.copy_part, range(len(source.root.parts))))
            copied, num_kept = sum(copied for copied, _ in sizes), sum(num_kept for _, num_kept in sizes)
            is_summed = copying.is_summed and is_readable(source.root.certificate)
        checked = verify_checkpoint(copy, share=1.0 if verify else 0.0)
    if checked.faults:
        raise CheckFailed(
            f"the copy in {target.url} is damaged: {checked.faults[0]}", hint=f"ckptkit verify {quote(copy.url)}"
        )
    if not is_there:
        target.write(key, text, if_absent=True)
        copied += len(text)
    return CopyReport(
        source.url, there_url, step, num_files, copied, num_kept, time.monotonic() - started,
        certified=is_summed or checked.num_certified > 0,
    )  # fmt: skip


def _remove_leftovers(root: Root, target: Storage, *, dry_run: bool) -> int:
    """Remove hidden files that killed copies of this checkpoint left; those that a living one writes are kept.

    With `dry_run` remove nothing, and return their bytes, which a copy would have the room of.
    """
    names = {name for part in root.parts for name in (part.data, part.index)}
    leftovers = [leftover for leftover in temporaries(target, root.step) if leftover.key in names]
    if dry_run:
        return sum(leftover.size_bytes for leftover in leftovers)
    for leftover in leftovers:
        with contextlib.suppress(StorageError):  # another process removed it
            remove_unless_written(target, leftover)
    return 0


def _sizes(source: CheckpointReader, target: Storage, root_bytes: int) -> tuple[int, int]:
    """Return the bytes to copy, and those of files that an earlier try left in their full size."""
    parts = [(part.data, part.data_bytes) for part in source.root.parts]
    parts += [(part.index, part.index_bytes) for part in source.root.parts]
    there = {info.key: info.size_bytes for info in target.list(f"{source.files.folder}/")}
    kept = sum(size for name, size in parts if there.get(f"{source.files.folder}/{name}") == size)
    return sum(size for _, size in parts) + root_bytes - kept, kept


class _Copying:
    """One copy under way."""

    def __init__(self, source: CheckpointReader, target: Storage, progress: Progress) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._total = sum(part.data_bytes for part in source.root.parts)
        self._done, self.is_summed = 0, True  # whether all values were compared with the sums in their index
        self._lock = threading.Lock()

    def copy_part(self, number: int) -> tuple[int, int]:
        """Copy a data file, then its index; return the bytes of both that were copied, and that were kept."""
        part = self._source.root.parts[number]
        text = self._source.files.index_file(part)
        index = PartIndex.from_bytes(text, f"{self._source.url}/{part.index}")
        self.is_summed &= index.sums is not None
        keys = (f"{self._source.files.folder}/{part.data}", f"{self._source.files.folder}/{part.index}")
        left = part.data_bytes

        def advance(num_bytes: int) -> None:
            nonlocal left
            left -= num_bytes
            self._advance(num_bytes)

        def blocks() -> Iterator[Columns]:
            with self._source.files.loss_as_damage(part.data, part.data_bytes, part):
                reader = self._source.files.open_part(number, index.checksums)
            with closing(reader):
                load = loading(partial(self._source.files.read_part, number, reader))
                yield from double_buffered(load, part.data_bytes, BLOCK_BYTES, advance)

        sizes = copy_part(blocks(), self._target, keys, index, text, num_threads=2)
        if left:  # the file was kept
            self._advance(left)
        return sizes

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._progress(self._done, self._total)
