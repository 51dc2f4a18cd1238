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
from dataclasses import replace

import numpy as np

from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import ROOT_KEY, Root, part_keys, step_folder
from ckptkit.io.blocks import Columns, checksums, write_file
from ckptkit.loading.reader import read_root
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.retention import expired, prune
from ckptkit.saving.commit import NotCommitted, check_complete, commit_root, failed_key, wait_for_parts
from ckptkit.saving.save_order import SaveOrder, SaveOutcome
from ckptkit.torch_tensors import Bytes
from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, Storage, open_storage
from threefold.storage.local import local_failure, make_folders

UPLOAD_BYTES = 16 << 20
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
    for line in _lines(arguments.trainer):
        order = SaveOrder.from_line(line)
        if order.arena_bytes != len(arena):
            memory = mmap.mmap(arguments.arena_fd, order.arena_bytes, prot=mmap.PROT_READ)
            arena = np.frombuffer(memory, np.uint8)
        outcome = _attempt(order, arena, arguments.trainer)
        with contextlib.suppress(BrokenPipeError):  # the trainer died meanwhile
            os.write(sys.stdout.fileno(), outcome.to_line())
    return 0


def run_save(order: SaveOrder, arena: Bytes, trainer: int) -> None:
    """Write the files and indexes of one writer; writer 0 then waits for all others and commits.

    On a failure this writer's files are removed, and a `.failed` object tells writer 0.
    """
    started = time.monotonic()
    storage = open_storage(order.url)
    try:
        if storage.info(f"{step_folder(order.step)}/{ROOT_KEY}") is not None:
            raise AlreadyExists(f"step {order.step} of {order.url} is committed already")
        # The first file's index goes last: it says that this writer is done.
        for number in reversed(range(len(order.files))):
            _write_part(storage, order, number, arena)
        patience = _Patience(order.deadline_s, time.monotonic() - started, trainer)
        root = _gather(storage, order, arena, patience) if order.writer == 0 else None
    except Exception as error:
        _clean_up(storage, order, error)
        raise
    if root is not None:
        try:
            commit_root(storage, root)
        except (AlreadyExists, NotCommitted) as error:  # on no other failure: the root may be there
            _clean_up(storage, order, error)
            raise
        if order.keep_last:
            read_root(storage, order.step)  # nothing older goes before the new one was seen whole
            prune(storage, expired(committed_steps(storage), order.keep_last))


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


def _attempt(order: SaveOrder, arena: Bytes, trainer: int) -> SaveOutcome:
    started = time.monotonic()
    error = ""
    try:
        run_save(order, arena, trainer)
    except (UserError, OSError) as failure:
        error = str(failure)
    except Exception as failure:  # a fault of ours, told like any other: the trainer goes on
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    data_bytes = sum(file.data.size for file in order.files)
    return SaveOutcome(order.step, error, data_bytes, time.monotonic() - started)


class _Patience:
    """How long to wait for the other writers: the deadline, cut short once this writer's trainer is dead.

    Then the job was probably killed: writers that were told to save are as far as this one, the others never begin.
    """

    def __init__(self, deadline_s: float, write_s: float, trainer: int) -> None:
        self._deadline_s, self._trainer = deadline_s, trainer
        self._grace_s = MIN_GRACE_S + GRACE_FACTOR * write_s
        self._started = time.monotonic()

    def in_all_s(self) -> float:
        """Seconds to wait in all, as things stand."""
        if os.getppid() != self._trainer:
            waited_s = time.monotonic() - self._started
            self._deadline_s, self._trainer = min(self._deadline_s, waited_s + self._grace_s), os.getppid()
        return self._deadline_s


def _write_part(storage: Storage, order: SaveOrder, number: int, arena: Bytes) -> None:
    staged = order.files[number]
    data_key, index_key = (f"{step_folder(order.step)}/{key}" for key in part_keys(order.attempt, order.writer, number))
    draft = PartIndex.from_bytes(staged.index.of(arena).tobytes(), index_key)
    found = _write_data(storage, data_key, staged.data.of(arena), order.num_threads)
    storage.write(index_key, replace(draft, checksums=found).to_bytes())


def _write_data(storage: Storage, key: str, data: Bytes, num_threads: int) -> Columns:
    """Write one data file durably; give its granules' checksums."""
    path = storage.local_path(key)
    if path is None:
        storage.write(key, (data[at : at + UPLOAD_BYTES].data for at in range(0, len(data), UPLOAD_BYTES)))
        return checksums(data)
    try:
        make_folders(path.parent)
        return write_file(path, [(data.ctypes.data, len(data))], num_threads=num_threads)
    except OSError as error:
        raise local_failure(error, "write", path) from error


def _gather(storage: Storage, order: SaveOrder, arena: Bytes, patience: "_Patience") -> Root:
    """The root, complete, once all writers are done."""
    draft = Root.from_bytes(order.root.of(arena).tobytes(), f"the order to save step {order.step}")
    parts = wait_for_parts(storage, order.step, order.attempt, order.num_writers, patience.in_all_s)
    check_complete(order.step, list(draft.tensors.values()), [index for _, index in parts])
    return replace(draft, parts=tuple(part for part, _ in parts))


def _clean_up(storage: Storage, order: SaveOrder, error: Exception) -> None:
    """Make room, and let writer 0 know; where the storage is gone neither works, and writer 0 has its deadline."""
    folder = step_folder(order.step)
    if order.writer == 0:  # without a root the others' files are of no use
        with contextlib.suppress(StorageError):
            storage.delete([item.key for item in storage.list(f"{folder}/{order.attempt}/")])
        return
    for number in range(len(order.files)):
        with contextlib.suppress(StorageError):
            storage.delete(f"{folder}/{key}" for key in part_keys(order.attempt, order.writer, number))
    with contextlib.suppress(StorageError):
        storage.write(f"{folder}/{failed_key(order.attempt, order.writer)}", str(error).encode())


if __name__ == "__main__":
    sys.exit(main())
