"""Commit: one exclusive write of the root, last, after every writer's part indexes were seen by listing.

What is seen is not yet durable: its writer may be about to sync the folder, or was killed before. Names that others put
are synced before the root names them, and the root's before any writer returns.

A writer puts the index of its first file after all else it wrote, so that one name says that the writer is done; a
writer that fails puts a `.failed` object in its place, so that nobody waits for it in vain. The first writer commits;
the others poll for the root, or for its `.failed` object.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ckptkit.format.keys import ROOT_KEY, Seat, named_writers, part_keys, step_folder, writer_of
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Part, Root
from ckptkit.io.blocks import xxh3_64
from ckptkit.io.data_files import is_out_of_room
from ckptkit.loading.roots import committed_attempt, root_key
from ckptkit.model.chunk_table import TensorColumns
from ckptkit.plan.cover import Cover
from ckptkit.runs.temporaries import temporaries
from ckptkit.writer.retries import Retries
from threefold.backoff import Backoff
from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, Storage
from threefold.storage.local import sync_name
from threefold.storage.second_look import read_checked

FIRST_PAUSE_S, PAUSE_SHARE, MAX_PAUSE_S = 0.02, 1 / 8, 10.0  # between looks: a share of what was waited so far
LOOKS_PER_S = 200  # of all writers that wait for the first one, two requests each
# words of a first writer whose root may still come, so that files must stay
KILLED, NO_ANSWER = "its writer was killed", "it is not known whether the root was put: "
NO_ROOM = "no room: "  # begins the words of a writer that failed for that
NUM_READS_AT_ONCE = 16
_INDEX = re.compile(r"part-([0-9]+)(\.[0-9]+)?\.index")
_FAILED = re.compile(r"part-([0-9]+)\.failed")


class NotCommitted(StorageError):
    """The root is surely not there and will not come: nothing needs the files of this attempt."""


class NoRoom(NotCommitted):
    """The place is full: the same save may go elsewhere."""


def wait_for_parts(
    storage: Storage, seat: Seat, patience_s: Callable[[], float], *, retries: Retries | None = None,
    cover: Cover | None = None,
) -> tuple[Part, ...]:  # fmt: skip
    """Return all parts of a try, in the order of their writers, once every writer is done and their names are durable.

    `cover` is to hold them all. StorageError names the writers that failed, or those that are missing after
    patience_s() seconds and the first file that is not there. Poll by listing key names, pausing 0.02 s to 10 s;
    patience_s is called before each look, because it shrinks when the trainer dies. Each request has its own retries.
    """
    folder, attempt, retries = seat.folder, seat.attempt, retries or Retries()
    for waited_s, is_last in _looks(patience_s, retries):
        listed = retries.run(lambda: list(storage.list_keys(f"{folder}/{attempt}/")))
        names = {key.removeprefix(f"{folder}/") for key in listed}
        _refuse_failed(storage, folder, names)
        missing = [writer for writer in seat.writers if part_keys(attempt, writer)[1] not in names]
        if not missing:
            break
        if is_last:
            names |= {each.key for each in temporaries(storage, seat.step)}  # hidden on a local disk until whole
            raise _too_late(storage, seat, names, missing, waited_s)
    try:
        return _parts(storage, seat, retries, cover)
    except UserError as error:  # writers that found the step another attempt's remove their files
        if retries.run(lambda: committed_attempt(storage, seat.step, attempt)) not in (None, attempt):
            raise committed_by_another(storage, seat.step) from error
        raise


def await_commit(
    storage: Storage, seat: Seat, patience_s: Callable[[], float], *, retries: Retries | None = None
) -> None:
    """Return once the first writer has committed the attempt, and that is durable.

    Raise AlreadyExists if the step is another attempt's, NotCommitted with the first writer's reason if it failed.
    Raise StorageError if nobody knows: that writer was killed or got no answer to its commit, or nothing is heard of it
    within patience_s() seconds. The looks of all writers together are at most LOOKS_PER_S.
    """
    step, leader, retries = seat.step, seat.first_writer, retries or Retries()
    failed = replace(seat, writer=leader).failed_key
    for waited_s, is_last in _looks(patience_s, retries, least_s=seat.num_writers / LOOKS_PER_S):
        committed = retries.run(lambda: committed_attempt(storage, step, seat.attempt))
        if committed == seat.attempt:
            retries.run(lambda: sync_name(storage, root_key(step)))
            return
        if committed is not None:
            raise committed_by_another(storage, step)
        if retries.run(lambda: storage.info(failed)) is not None:
            reason = retries.run(lambda: storage.read(failed)).decode(errors="replace")
            kind = StorageError if reason == KILLED or reason.startswith(NO_ANSWER) else NotCommitted
            kind = NoRoom if reason.startswith(NO_ROOM) else kind
            raise kind(f"step {step} of {storage.url} is not committed: writer {leader} failed: {reason}")
        if is_last:
            raise StorageError(
                f"step {step} of {storage.url} is not committed: writer {leader} neither committed it nor said"
                f" why not within {waited_s:.1f} s",
                hint=f"look at rank {leader}; raise checkpoint.deadline_s if it is only slow",
            )


def commit_root(storage: Storage, root: Root) -> None:
    """Write the root, once and for all.

    Raise AlreadyExists if another attempt committed the step first, NotCommitted if a full disk refused it or it is too
    large. After any other failure the root may be there although its answer was lost.
    """
    key = f"{step_folder(root.step)}/{ROOT_KEY}"
    try:
        data = root.to_bytes()
    except UserError as error:
        raise NotCommitted(error.message, hint=error.hint) from error
    try:
        storage.write(key, data, if_absent=True)
    except AlreadyExists as error:
        raise committed_by_another(storage, root.step) from error
    except StorageError as error:
        if not is_out_of_room(error):
            raise
        if storage.info(key) is None:
            raise NotCommitted(error.message, hint=error.hint) from error
        # It has its name, and its folder could not be synced: such a step is saved nowhere else.
        raise StorageError(error.message, hint=error.hint) from None


def committed_by_another(storage: Storage, step: int) -> AlreadyExists:
    """Return the error of an attempt that was too late."""
    return AlreadyExists(f"step {step} of {storage.url} was committed by another attempt first")


def _looks(
    patience_s: Callable[[], float], retries: Retries, *, least_s: float = 0.0
) -> Iterator[tuple[float, bool]]:  # fmt: skip
    """Yield, before each look for what is waited for, the seconds waited so far and whether this look is the last.

    Pauses grow with the time waited, and no two writers look in step; only jitter makes one shorter than least_s.
    """
    backoff = Backoff(max(FIRST_PAUSE_S, least_s), max(MAX_PAUSE_S, least_s), growth=PAUSE_SHARE, jitter=0.5)
    started = time.monotonic()
    while True:
        waited_s, may_wait_s = time.monotonic() - started, patience_s()
        yield waited_s, waited_s >= may_wait_s
        retries.pause(max(min(backoff.after(waited_s), may_wait_s - waited_s), 0.0))


def _too_late(storage: Storage, seat: Seat, names: Set[str], missing: Sequence[int], waited_s: float) -> StorageError:
    """Return the error that names who is missing, the first file that is, and how far its writer came."""
    data_key, index_key = part_keys(seat.attempt, missing[0])
    begun = ", its data file is begun" if data_key in names else ", nor is its data file"
    return StorageError(
        f"{storage.url}/{seat.folder}: {named_writers(missing)} of {seat.num_writers}"
        f" {'were' if missing[1:] else 'was'} not done within {waited_s:.1f} s: {index_key} is not there{begun}",
        hint=f"look at rank {missing[0]}; raise checkpoint.deadline_s if it is only slow",
    )


def _refuse_failed(storage: Storage, folder: str, names: Iterable[str]) -> None:
    failed = {key: int(match[1]) for key in names if (match := _FAILED.fullmatch(key.rpartition("/")[2]))}
    if failed:
        reasons = (storage.read(f"{folder}/{key}").decode(errors="replace") for key in sorted(failed))
        first = next(reasons)
        kind = (
            NoRoom if first.startswith(NO_ROOM) and all(each.startswith(NO_ROOM) for each in reasons) else StorageError
        )
        raise kind(f"{named_writers(failed.values())} failed: {first}")


def _parts(storage: Storage, seat: Seat, retries: Retries, cover: Cover | None) -> tuple[Part, ...]:
    """Return every index that is listed, with the data file beside it, whose size the listing confirms."""
    folder = seat.folder
    items = retries.run(lambda: list(storage.list(f"{folder}/{seat.attempt}/")))
    listed = {item.key.removeprefix(f"{folder}/"): item for item in items}
    retries.run(lambda: sync_name(storage, seat.keys(0)[1]))
    if gone := [writer for writer in seat.writers if part_keys(seat.attempt, writer)[1] not in listed]:
        raise StorageError(f"{storage.url}/{folder}: {named_writers(gone)} removed what was written")
    keys = sorted((key for key in listed if _INDEX.fullmatch(key.rpartition("/")[2])), key=lambda k: (writer_of(k), k))
    known: dict[bytes, TensorColumns] = {}  # writers of the same tensors are many

    def read(key: str) -> tuple[bytes, PartIndex]:
        where = f"{storage.url}/{folder}/{key}"

        def parsed(storage: Storage) -> tuple[bytes, PartIndex]:
            data = storage.read(f"{folder}/{key}")
            return data, PartIndex.from_bytes(data, where, known)

        return retries.run(lambda: read_checked(storage, where, parsed))

    def part(key: str) -> Part:
        data, index = read(key)
        data_key = key.removesuffix(".index") + ".safetensors"
        found = listed[data_key].size_bytes if data_key in listed else 0
        if found != index.size_bytes:
            raise StorageError(
                f"{storage.url}/{folder}/{data_key} has {found} bytes, its index says {index.size_bytes}"
            )
        if cover is not None:
            cover.add(index, f"{storage.url}/{folder}/{key}")
        return Part(data_key, index.size_bytes, key, len(data), xxh3_64(data))

    with ThreadPoolExecutor(NUM_READS_AT_ONCE) as pool:

        def read_again() -> Iterator[tuple[int, PartIndex]]:
            for at in range(0, len(keys), NUM_READS_AT_ONCE):
                some = keys[at : at + NUM_READS_AT_ONCE]
                yield from ((writer_of(key), index) for key, (_, index) in zip(some, pool.map(read, some), strict=True))

        parts = tuple(pool.map(part, keys))
        if cover is not None:
            cover.check(f"{storage.url}/{folder}", read_again)
    return parts
