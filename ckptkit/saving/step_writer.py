"""One writer's share of a step: its data files and their indexes, the commit where it is writer 0, and what it wrote
removed where it fails.

Where the bytes come from is the caller's: an arena of staged files, or the tensors' own memory.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import ROOT_KEY, Root, part_keys, step_folder
from ckptkit.io.blocks import BlockWriter, Columns, checksums, copy_many
from ckptkit.io.striping import Striper
from ckptkit.saving.commit import check_complete, commit_root, failed_key, wait_for_parts
from ckptkit.torch_tensors import Bytes
from threefold.errors import StorageError
from threefold.storage import AlreadyExists, Storage
from threefold.storage.local import local_failure, make_folders

UPLOAD_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class PartSource:
    """A data file to be written: its index without checksums yet, and its bytes.

    `blocks` gives rows of (address, bytes), in file order; each block but the last is a whole number of granules, and
    its memory is asked for no more once the next block is taken.
    """

    draft: PartIndex
    blocks: Iterable[Columns]


@dataclass(frozen=True, slots=True)
class StepTarget:
    """Which writer of how many writes to which attempt of a step, and where."""

    storage: Storage
    step: int
    attempt: str
    writer: int
    num_writers: int
    num_threads: int = 2
    striper: Striper = field(default_factory=Striper)

    @property
    def folder(self) -> str:
        return step_folder(self.step)

    def keys(self, number: int) -> tuple[str, str]:
        """Keys of the writer's n-th data file and of its index."""
        data, index = part_keys(self.attempt, self.writer, number)
        return f"{self.folder}/{data}", f"{self.folder}/{index}"


def write_step(
    target: StepTarget, parts: Sequence[PartSource], draft: Root | None, patience_s: Callable[[float], float]
) -> Root | None:
    """Write one writer's files; writer 0, which has the root's draft, waits for all others and commits.

    patience_s is asked again and again how long to wait for the others, given the seconds that this writer's own files
    took. On a failure this writer's files are removed, and a `.failed` object tells writer 0. Gives the root committed.
    """
    started = time.monotonic()
    if target.storage.info(f"{target.folder}/{ROOT_KEY}") is not None:
        raise AlreadyExists(f"step {target.step} of {target.storage.url} is committed already")
    try:
        largest = max((part.draft.size_bytes for part in parts), default=0)
        target.striper.prepare(target.storage, target.keys(0)[0], largest, target.num_writers)
        # The first file's index goes last: it says that this writer is done.
        for number in reversed(range(len(parts))):
            _write_part(target, number, parts[number])
        write_s = time.monotonic() - started
        root = draft and _complete(target, draft, lambda: patience_s(write_s))
    except BaseException as error:
        _clean_up(target, len(parts), error)
        raise
    if root is not None:
        try:
            commit_root(target.storage, root)
        except AlreadyExists as error:  # on no other failure: the root may be there although its answer was lost
            _clean_up(target, len(parts), error)
            raise
    return root


def _write_part(target: StepTarget, number: int, part: PartSource) -> None:
    data_key, index_key = target.keys(number)
    path = target.storage.local_path(data_key)
    found: list[Columns] = []
    if path is None:
        target.storage.write(data_key, _buffers(part.blocks, found), size_bytes=part.draft.size_bytes)
    else:
        try:
            make_folders(path.parent)
            with BlockWriter(path, part.draft.size_bytes) as writer:
                at = 0
                for rows in part.blocks:
                    found.append(writer.write(at, rows, num_threads=target.num_threads))
                    at += int(rows[:, 1].sum())
        except OSError as error:
            raise local_failure(error, "write", path) from error
    target.storage.write(index_key, replace(part.draft, checksums=np.concatenate(found)).to_bytes())


def _buffers(blocks: Iterable[Columns], found: list[Columns]) -> Iterator[memoryview]:
    """The blocks' bytes as buffers for an upload; the checksums of the granules that pass go to `found`."""
    for rows in blocks:
        if len(rows) > 1:
            gathered = np.empty(int(rows[:, 1].sum()), np.uint8)
            ends = np.cumsum(rows[:, 1])
            copy_many(np.stack([rows[:, 0], gathered.ctypes.data + ends - rows[:, 1], rows[:, 1]], axis=1))
        else:
            gathered = _memory_at(*rows[0].tolist())
        for start in range(0, len(gathered), UPLOAD_BYTES):
            buffer = gathered[start : start + UPLOAD_BYTES]
            found.append(checksums(buffer))
            yield buffer.data


def _memory_at(address: int, size_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def _complete(target: StepTarget, draft: Root, patience_s: Callable[[], float]) -> Root:
    """The root with all parts, once all writers are done."""
    parts = wait_for_parts(target.storage, target.step, target.attempt, target.num_writers, patience_s)
    check_complete(target.step, list(draft.tensors.values()), [holding for _, holding in parts])
    return replace(draft, parts=tuple(part for part, _ in parts))


def _clean_up(target: StepTarget, num_files: int, error: BaseException) -> None:
    """Make room, and let writer 0 know; where the storage is gone neither works, and writer 0 has its deadline."""
    if target.writer == 0:  # without a root the others' files are of no use
        with contextlib.suppress(StorageError):
            target.storage.delete([item.key for item in target.storage.list(f"{target.folder}/{target.attempt}/")])
        return
    for number in range(num_files):
        with contextlib.suppress(StorageError):
            target.storage.delete(target.keys(number))
    with contextlib.suppress(StorageError):
        target.storage.write(f"{target.folder}/{failed_key(target.attempt, target.writer)}", str(error).encode())
