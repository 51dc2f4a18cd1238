"""Commit: one exclusive write of the root, last, after every writer's part indexes were seen by listing.

A writer puts the index of its first file after all else it wrote, so that one name tells that the writer is done; a
writer that fails puts a `.failed` object in its place, so that nobody waits for it in vain.
"""

import errno
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckptkit.chunk_table import Ints, TensorColumns
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import ROOT_KEY, Part, Root, part_keys, step_folder
from ckptkit.io.blocks import xxh3_64
from ckptkit.saving.retries import Retries
from ckptkit.tensor import TensorInfo
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import AlreadyExists, Storage

FIRST_PAUSE_S, PAUSE_SHARE, MAX_PAUSE_S = 0.02, 1 / 8, 10.0  # between listings: a share of what was waited so far
NUM_READS_AT_ONCE = 16
MAX_NAMED = 16
_INDEX = re.compile(r"part-([0-9]+)(\.[0-9]+)?\.index")
_FAILED = re.compile(r"part-([0-9]+)\.failed")


class NotCommitted(StorageError):
    """The root is surely not there and will not come: nothing needs the files of this attempt."""


def failed_key(attempt: str, writer: int) -> str:
    """The key, relative to the step's folder, under which a writer says why it failed."""
    return f"{attempt}/part-{writer:05d}.failed"


@dataclass(frozen=True, eq=False)
class Holding:
    """How many bytes of each tensor a part holds, names[T] and size_bytes[T]: all that the commit keeps of an index."""

    names: tuple[str, ...]
    size_bytes: Ints

    @classmethod
    def of(cls, index: PartIndex) -> "Holding":
        """What an index's chunks add up to."""
        chunks = index.chunks
        sums = np.bincount(chunks.tensor, weights=chunks.size_bytes, minlength=len(chunks.names))
        return cls(chunks.names, sums.astype(np.int64))


def wait_for_parts(
    storage: Storage, step: int, attempt: str, num_writers: int, patience_s: Callable[[], float],
    *, first_writer: int = 0, retries: Retries | None = None,
) -> list[tuple[Part, Holding]]:  # fmt: skip
    """All parts of a save and what they hold, in the order of their writers, once every writer is done.

    StorageError names the writers that failed, or those that are missing after patience_s() seconds and the first file
    that is not there; that is asked anew all the time, as reasons to wait may go away. Each listing is of names alone;
    they are as many as the logarithm of the wait, then one every MAX_PAUSE_S. Each request has retries of its own.
    """
    folder, retries = step_folder(step), retries or Retries()
    writers = range(first_writer, first_writer + num_writers)
    started = time.monotonic()
    while True:
        listed = retries.run(lambda: list(storage.list_keys(f"{folder}/{attempt}/")))
        names = {key.removeprefix(f"{folder}/") for key in listed}
        _refuse_failed(storage, folder, names)
        missing = [writer for writer in writers if part_keys(attempt, writer)[1] not in names]
        if not missing:
            return _parts(storage, folder, attempt, retries)
        waited_s, may_wait_s = time.monotonic() - started, patience_s()
        if waited_s >= may_wait_s:
            raise _too_late(f"{storage.url}/{folder}", attempt, names, missing, num_writers, waited_s)
        pause_s = min(max(waited_s * PAUSE_SHARE, FIRST_PAUSE_S), MAX_PAUSE_S)
        retries.pause(min(pause_s, may_wait_s - waited_s))


def check_complete(step: int, tensors: Sequence[TensorInfo], holdings: Iterable[Holding]) -> None:
    """CheckFailed where the parts of a save do not hold as many bytes of each tensor as its table says."""
    wanted = {info.name: info.size_bytes if info.placement.tied_to is None else 0 for info in tensors}
    names = list(wanted)
    number_of = {name: number for number, name in enumerate(names)}
    held = np.zeros(len(names), np.int64)
    numbers: dict[tuple[str, ...], Ints] = {}  # writers of the same tensors are many
    for holding in holdings:
        if holding.names not in numbers:
            for name in holding.names:
                if name not in number_of:
                    number_of[name] = len(names)
                    names.append(name)
            numbers[holding.names] = np.array([number_of[name] for name in holding.names], np.int64)
            held = np.append(held, np.zeros(len(names) - len(held), np.int64))
        held[numbers[holding.names]] += holding.size_bytes  # no name comes twice in an index
    found = zip(names, held.tolist(), strict=True)
    faults = [f"{name}: {size} of {wanted.get(name, 0)} bytes" for name, size in found if size != wanted.get(name, 0)]
    if faults:
        more = f"\n  and {len(faults) - MAX_NAMED} more" if faults[MAX_NAMED:] else ""
        listed = "\n  ".join(faults[:MAX_NAMED])
        raise CheckFailed(f"step {step}: the pieces of all writers do not make up the tensors:\n  {listed}{more}")


def commit_root(storage: Storage, root: Root) -> None:
    """Put the root, once and for all.

    AlreadyExists where another attempt committed the step first, NotCommitted where a full disk refused it or it is too
    large; after any other failure the root may be there although its answer was lost.
    """
    key = f"{step_folder(root.step)}/{ROOT_KEY}"
    try:
        data = root.to_bytes()
    except UserError as error:
        raise NotCommitted(error.message, hint=error.hint) from error
    try:
        storage.write(key, data, if_absent=True)
    except AlreadyExists as error:
        raise AlreadyExists(f"step {root.step} of {storage.url} was committed by another attempt first") from error
    except StorageError as error:
        cause = error.__cause__
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full and storage.info(key) is None:  # it may be there: its folder is synced after it was linked
            raise NotCommitted(error.message, hint=error.hint) from error
        raise


def _too_late(
    url: str, attempt: str, names: Set[str], missing: Sequence[int], num_writers: int, waited_s: float
) -> StorageError:
    """Who is missing, the first file that is, and how far its writer came: the data file comes first."""
    data_key, index_key = part_keys(attempt, missing[0])
    begun = ", its data file is begun" if data_key in names else ", nor is its data file"
    return StorageError(
        f"{url}: {_named(missing)} of {num_writers} {'were' if missing[1:] else 'was'} not done within"
        f" {waited_s:.1f} s: {index_key} is not there{begun}",
        hint=f"look at rank {missing[0]}; raise checkpoint.deadline_s if it is only slow",
    )


def _refuse_failed(storage: Storage, folder: str, names: Iterable[str]) -> None:
    failed = {key: int(match[1]) for key in names if (match := _FAILED.fullmatch(key.rpartition("/")[2]))}
    if failed:
        key = min(failed)
        reason = storage.read(f"{folder}/{key}").decode(errors="replace")
        raise StorageError(f"{_named(failed.values())} failed: {reason}")


def _parts(storage: Storage, folder: str, attempt: str, retries: Retries) -> list[tuple[Part, Holding]]:
    """Every index that is listed, with the data file beside it, whose size the listing confirms."""
    items = retries.run(lambda: list(storage.list(f"{folder}/{attempt}/")))
    listed = {item.key.removeprefix(f"{folder}/"): item for item in items}
    known: dict[bytes, TensorColumns] = {}  # writers of the same tensors are many
    indexes: dict[int, list[str]] = defaultdict(list)
    for key in listed:
        if match := _INDEX.fullmatch(key.rpartition("/")[2]):
            indexes[int(match[1])].append(key)
    keys = [key for writer in sorted(indexes) for key in sorted(indexes[writer])]

    def part(key: str) -> tuple[Part, Holding]:
        data = retries.run(lambda: storage.read(f"{folder}/{key}"))
        index = PartIndex.from_bytes(data, f"{storage.url}/{folder}/{key}", known)
        data_key = key.removesuffix(".index") + ".safetensors"
        found = listed[data_key].size_bytes if data_key in listed else 0
        if found != index.size_bytes:
            raise StorageError(
                f"{storage.url}/{folder}/{data_key} has {found} bytes, its index says {index.size_bytes}"
            )
        return Part(data_key, index.size_bytes, key, len(data), xxh3_64(data)), Holding.of(index)

    with ThreadPoolExecutor(NUM_READS_AT_ONCE) as pool:
        return list(pool.map(part, keys))


def _named(writers: Iterable[int]) -> str:
    numbers = sorted(writers)
    shown = ", ".join(map(str, numbers[:MAX_NAMED])) + (", ..." if numbers[MAX_NAMED:] else "")
    return f"writer{'s' if len(numbers) > 1 else ''} {shown}"
