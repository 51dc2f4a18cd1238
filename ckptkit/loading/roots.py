"""Roots as they lie on a storage: looked up newest first, read and checked, by one rank for all.

`newest_first` lists the run's folders (on object stores 1,000 names a request) and looks roots up until it is not asked
for more: for the newest step one.
"""

import errno
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ckptkit.format.keys import ROOT_KEY, parse_step_folder, step_folder
from ckptkit.format.root import MAX_ROOT_BYTES, ROOT_HEAD_BYTES, Root, attempt_of_head
from ckptkit.loading.exchange import Alone, Exchange, agreed
from threefold.errors import CheckFailed, StorageError, UserError, quoted
from threefold.storage import ObjectInfo, Storage
from threefold.storage.second_look import read_checked

NUM_AT_ONCE, NUM_NAMED = 32, 12
T = TypeVar("T")
R = TypeVar("R")


def step_folders(storage: Storage) -> list[int]:
    """Return the steps that have a folder, committed or not, ascending."""
    return steps_of(storage.list_folders())


def newest_first(storage: Storage) -> Iterator[int]:
    """Return the committed steps, newest first; 1, 2, 4, ... roots are looked up at once, as far as steps are taken."""
    steps, num = step_folders(storage), 1
    while steps:
        group, steps = steps[-num:][::-1], steps[:-num]
        infos = at_once(lambda step: root_info(storage, step), group)
        yield from (step for step, info in zip(group, infos, strict=True) if info)
        num = min(2 * num, NUM_AT_ONCE)


def latest_step(storage: Storage) -> int | None:
    """Return the newest committed step, None where there is none."""
    return next(newest_first(storage), None)


def at_once(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what `work` returns for each item, NUM_AT_ONCE at once."""
    pool = ThreadPoolExecutor(NUM_AT_ONCE)
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)


def steps_of(folders: Iterable[str]) -> list[int]:
    """Return the steps whose folders are among these, ascending."""
    return sorted(step for step in map(parse_step_folder, folders) if step is not None)


def root_key(step: int) -> str:
    """Return the key of a step's root."""
    return f"{step_folder(step)}/{ROOT_KEY}"


def root_info(storage: Storage, step: int) -> ObjectInfo | None:
    """Return the root of a step, None where it is not committed."""
    return storage.info(root_key(step))


def read_root(storage: Storage, step: int, exchange: Exchange | None = None, *, info: ObjectInfo | None = None) -> Root:
    """Return the root of a committed step; UserError where there is none. Of an exchange's ranks the first reads it.

    `info` is the root's object where the caller has looked it up.
    """
    exchange, roots = exchange or Alone(), list[Root]()

    def read() -> bytes:
        if exchange.rank:
            return b""
        data, root = stored_root(storage, step, info)
        roots.append(root)
        return data

    data = agreed(exchange, read)[0]
    return roots[0] if roots else _root_of(data, f"{storage.url}/{root_key(step)}", step)


def stored_root(storage: Storage, step: int, info: ObjectInfo | None = None) -> tuple[bytes, Root]:
    """Return the root of a committed step as it is stored, and parsed; errors as of `read_root`."""
    where = f"{storage.url}/{root_key(step)}"

    def read(storage: Storage) -> tuple[bytes, Root]:
        data = root_bytes(storage, step, info)
        return data, _root_of(data, where, step)

    return read_checked(storage, where, read)


def committed_attempt(storage: Storage, step: int, expected: str = "") -> str | None:
    """Return the attempt that a step's root names, None if it is not committed.

    Two small requests if it is the `expected` one. On a disk of this machine they always suffice; behind a network any
    other name is read with the checksum of the root, since its bits may have been changed on the way.
    """
    while (info := root_info(storage, step)) is not None:
        try:
            head = storage.read_ranges(root_key(step), [(0, min(info.size_bytes, ROOT_HEAD_BYTES))])[0]
            named = attempt_of_head(bytes(head))
            if named and (named == expected or storage.afresh() is None):
                return named
            return read_root(storage, step).attempt
        except UserError:
            if root_info(storage, step) == info:
                raise
            # It was pruned meanwhile, and perhaps another attempt committed.
    return None


def attempt_seen(storage: Storage, step: int) -> str:
    """Return the attempt in the first bytes of a step's root, whether these are sound or not.

    It is "" if they name none, cannot be read, or if the root is gone. Two small requests.
    """
    key = root_key(step)
    try:
        info = storage.info(key)
        head = storage.read_ranges(key, [(0, min(info.size_bytes, ROOT_HEAD_BYTES))])[0] if info else b""
    except StorageError as error:
        if is_medium_error(error) or root_info(storage, step) is None:
            return ""
        raise
    return attempt_of_head(bytes(head)) or ""


def _root_of(data: bytes, where: str, step: int) -> Root:
    root = Root.from_bytes(data, where)
    if root.step != step:
        raise CheckFailed(f"{where} is the root of step {root.step}")
    return root


def root_bytes(storage: Storage, step: int, info: ObjectInfo | None = None) -> bytes:
    """Return the root of a committed step as it is stored, not parsed yet; `info` as for `read_root`."""
    key = root_key(step)
    info = info or storage.info(key)
    if info is None:
        raise absent_step(storage, step)
    if info.size_bytes > MAX_ROOT_BYTES:
        raise CheckFailed(f"{storage.url}/{key} has {info.size_bytes} bytes, more than a checkpoint's root may have")
    try:
        return storage.read(key)
    except StorageError as error:
        if is_medium_error(error):
            raise CheckFailed(f"{storage.url}/{key} cannot be read (Input/output error)") from error
        raise


def absent_step(storage: Storage, step: int) -> UserError:
    """Return the error that a run does not hold a step, which names those that it holds, or the nearest of many."""
    near = sorted(sorted(step_folders(storage), key=lambda other: abs(other - step))[:NUM_AT_ONCE])
    infos = at_once(lambda other: root_info(storage, other), near)
    there = [other for other, info in zip(near, infos, strict=True) if info]
    what = f"{storage.url} holds no committed step {step}"
    few = sorted(sorted(there, key=lambda other: abs(other - step))[:NUM_NAMED])
    more = ", ..." if len(few) < len(there) else ""
    listed = f": there is {', '.join(map(str, few))}{more}" if few else ", nor any near it"
    return UserError(what + listed, hint=f"ckptkit ls {quoted(storage.url)}")


def is_medium_error(error: StorageError) -> bool:
    """Return whether a local disk could not give back what is on it."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO
