"""Commit: one exclusive write of the root, last, after every writer's part indexes were seen by listing.

A writer puts the index of its first file after all else it wrote, so that one name tells that the writer is done; a
writer that fails puts a `.failed` object in its place, so that nobody waits for it in vain.
"""

import errno
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import ROOT_KEY, Part, Root, part_keys, step_folder
from ckptkit.io.blocks import xxh3_64
from ckptkit.tensor import TensorInfo
from threefold.errors import CheckFailed, StorageError
from threefold.storage import AlreadyExists, ObjectInfo, Storage

FIRST_WAIT_S, MAX_WAIT_S = 0.02, 1.0
NUM_READS_AT_ONCE = 8
MAX_NAMED = 16
_INDEX = re.compile(r"part-([0-9]+)(\.[0-9]+)?\.index")
_FAILED = re.compile(r"part-([0-9]+)\.failed")


class NotCommitted(StorageError):
    """The root is surely not there and will not come: nothing needs the files of this attempt."""


def failed_key(attempt: str, writer: int) -> str:
    """The key, relative to the step's folder, under which a writer says why it failed."""
    return f"{attempt}/part-{writer:05d}.failed"


def wait_for_parts(
    storage: Storage, step: int, attempt: str, num_writers: int, patience_s: Callable[[], float]
) -> list[tuple[Part, PartIndex]]:
    """All parts of a save with their indexes, in the order of their writers, once every writer is done.

    StorageError names the writers that failed, or those that are missing after patience_s() seconds; that is asked
    anew all the time, as reasons to wait may go away.
    """
    folder = step_folder(step)
    started = time.monotonic()
    wait_s = FIRST_WAIT_S
    while True:
        listed = {item.key.removeprefix(f"{folder}/"): item for item in storage.list(f"{folder}/{attempt}/")}
        _refuse_failed(storage, folder, listed)
        missing = [writer for writer in range(num_writers) if part_keys(attempt, writer)[1] not in listed]
        if not missing:
            break
        waited_s, may_wait_s = time.monotonic() - started, patience_s()
        if waited_s >= may_wait_s:
            awaited = f"{folder}/{part_keys(attempt, missing[0])[1]}"
            raise StorageError(
                f"step {step}: nothing came within {waited_s:.1f} s from {_named(missing)} of {num_writers}; "
                f"{storage.url}/{awaited} is still to come",
                hint="raise checkpoint.deadline_s if they are only slow",
            )
        time.sleep(min(wait_s, may_wait_s - waited_s))
        wait_s = min(wait_s * 2, MAX_WAIT_S)
    return _parts(storage, folder, listed)


def check_complete(step: int, tensors: Sequence[TensorInfo], indexes: Iterable[PartIndex]) -> None:
    """CheckFailed where the parts of a save do not hold as many bytes of each tensor as its table says."""
    wanted = {info.name: info.size_bytes if info.placement.tied_to is None else 0 for info in tensors}
    held = dict.fromkeys(wanted, 0)
    for index in indexes:
        chunks = index.chunks
        sums = np.bincount(chunks.tensor, weights=chunks.size_bytes, minlength=len(chunks.names))
        for name, size in zip(chunks.names, sums.tolist(), strict=True):
            held[name] = held.get(name, 0) + int(size)
    faults = [
        f"{name}: {held[name]} of {wanted.get(name, 0)} bytes" for name in held if held[name] != wanted.get(name, 0)
    ]
    if faults:
        more = f"\n  and {len(faults) - MAX_NAMED} more" if faults[MAX_NAMED:] else ""
        listed = "\n  ".join(faults[:MAX_NAMED])
        raise CheckFailed(f"step {step}: the pieces of all writers do not make up the tensors:\n  {listed}{more}")


def commit_root(storage: Storage, root: Root) -> None:
    """Put the root, once and for all.

    AlreadyExists where another attempt committed the step first, NotCommitted where a full disk refused it; after any
    other failure the root may be there although its answer was lost.
    """
    key = f"{step_folder(root.step)}/{ROOT_KEY}"
    try:
        storage.write(key, root.to_bytes(), if_absent=True)
    except AlreadyExists as error:
        raise AlreadyExists(f"step {root.step} of {storage.url} was committed by another attempt first") from error
    except StorageError as error:
        cause = error.__cause__
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full and storage.info(key) is None:  # it may be there: its folder is synced after it was linked
            raise NotCommitted(error.message, hint=error.hint) from error
        raise


def _refuse_failed(storage: Storage, folder: str, listed: Mapping[str, ObjectInfo]) -> None:
    failed = {key: int(match[1]) for key in listed if (match := _FAILED.fullmatch(key.rpartition("/")[2]))}
    if failed:
        key = min(failed)
        reason = storage.read(f"{folder}/{key}").decode(errors="replace")
        raise StorageError(f"{_named(failed.values())} failed: {reason}")


def _parts(storage: Storage, folder: str, listed: Mapping[str, ObjectInfo]) -> list[tuple[Part, PartIndex]]:
    """Every index that is listed, with the data file beside it, whose size the listing confirms."""
    indexes: dict[int, list[str]] = defaultdict(list)
    for key in listed:
        if match := _INDEX.fullmatch(key.rpartition("/")[2]):
            indexes[int(match[1])].append(key)
    keys = [key for writer in sorted(indexes) for key in sorted(indexes[writer])]

    def part(key: str) -> tuple[Part, PartIndex]:
        data = storage.read(f"{folder}/{key}")
        index = PartIndex.from_bytes(data, f"{storage.url}/{folder}/{key}")
        data_key = key.removesuffix(".index") + ".safetensors"
        found = listed[data_key].size_bytes if data_key in listed else 0
        if found != index.size_bytes:
            raise StorageError(
                f"{storage.url}/{folder}/{data_key} has {found} bytes, its index says {index.size_bytes}"
            )
        return Part(data_key, index.size_bytes, key, len(data), xxh3_64(data)), index

    with ThreadPoolExecutor(NUM_READS_AT_ONCE) as pool:
        return list(pool.map(part, keys))


def _named(writers: Iterable[int]) -> str:
    numbers = sorted(writers)
    shown = ", ".join(map(str, numbers[:MAX_NAMED])) + (", ..." if numbers[MAX_NAMED:] else "")
    return f"writer{'s' if len(numbers) > 1 else ''} {shown}"
