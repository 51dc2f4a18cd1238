"""Trials of a storage: what commits rely on, each a function of a fresh place that raises CheckFailed if it is not so.

StorageConformance has them among its tests, and `ckptkit crash-test` runs them at a place of the user's. Each says at
its end what it looked at.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from threefold.errors import CheckFailed
from threefold.storage.contract import AlreadyExists, Storage

MIB = 1 << 20
BLOCK_BYTES = 4 * MIB
MAX_SKEW_S = 300.0  # between this machine's clock and the place's: ages of a day are compared with it
ONE_WRITER = "let one job at a time save to this place"
LATE = "choose a place whose listings show a write once it has returned"


def shows_each_write(storage: Storage) -> str:
    """Require that a write is read, looked up and listed once it has returned, and so is what replaces it."""
    for value in (b"a long first value", b"second", b""):
        storage.write("key", value)
        _require(storage.read("key") == value, "a read after a write returned something else", LATE)
        info = storage.info("key")
        _require(info is not None and info.size_bytes == len(value), f"after a write the size is {info}", LATE)
        _require_keys(storage, ["key"])
    return "3 writes of a key, each read, looked up and listed at once"


def lists_what_is_there(storage: Storage, num_objects: int = 20) -> str:
    """Require that a listing has what was written at once, by prefix and in order, and not what was deleted."""
    keys = [f"folder-{number % 3}/object-{number:04}" for number in range(num_objects)]
    for number, key in enumerate(keys):
        storage.write(key, b"x")
        _require_keys(storage, sorted(keys[: number + 1]))
    below = sorted(key for key in keys if key.startswith("folder-1/"))
    _require_keys(storage, below, "folder-1/")
    folders = sorted({key.partition("/")[0] for key in keys})
    _require(list(storage.list_folders()) == folders, "folders are missing in a listing", LATE)
    for number, key in enumerate(keys):
        storage.delete([key, f"{key}-missing"])
        _require_keys(storage, sorted(keys[number + 1 :]))
        _require(storage.info(key) is None, f"{key} is there after it was deleted", LATE)
    storage.write(keys[0], b"again")
    _require(storage.read(keys[0]) == b"again", "what was written after a deletion is not read", LATE)
    return f"{num_objects} writes and deletions, a listing after each"


def shows_no_part_of_a_write(storage: Storage, size_bytes: int = 20 * MIB) -> str:
    """Require that a key shows what was there before while a write is under way, to reads and to listings."""
    first, second = b"1" * 1000, b"2" * size_bytes
    seen: list[tuple[object, ...]] = []

    def source() -> Iterator[bytes]:
        for start in range(0, len(second), BLOCK_BYTES):
            if start in (0, len(second) // 2 // BLOCK_BYTES * BLOCK_BYTES):
                seen.append((storage.info("new"), storage.read("old"), _keys(storage), [*storage.list_keys()]))
            yield second[start : start + BLOCK_BYTES]

    storage.write("old", first)
    storage.write("new", source())
    storage.write("old", iter([second]))
    before = (None, first, ["old"], ["old"])
    _require(all(moment == before for moment in seen), "a write that was under way could be seen")
    _require(storage.read("new") == second, "an object of several blocks was not read as it was written")
    _require(storage.read("old") == second, "what was there is read after it was replaced", LATE)
    return f"{len(seen)} looks at a write of {size_bytes / MIB:.0f} MiB that was under way"


def shows_one_value_or_the_other(storage: Storage) -> str:
    """Require that readers beside a writer see one of the values that it writes, never a mixture."""
    values = [bytes([number]) * 300_000 for number in range(8)]
    storage.write("key", values[0])
    done = threading.Event()

    def read() -> list[bytes]:
        seen = []
        while not done.is_set():
            seen.append(storage.read("key"))
        return seen

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read) for _ in range(2)]
        try:
            for value in values:
                storage.write("key", value)
        finally:
            done.set()
        seen = [value for task in reading for value in task.result()]
    _require(set(seen) <= set(values), "a read beside a write returned a mixture of two values")
    return f"{len(values)} values of a key, {len(seen)} reads beside their writes"


def writes_once(storage: Storage) -> str:
    """Require that a write if absent is refused where the key is there, but for the same bytes, as of a repeat."""
    for key, value in (("root", b"first"), ("empty", b"")):
        for _ in range(2):
            storage.write(key, value, if_absent=True)
        storage.write(key, iter([value]), if_absent=True)
    storage.write("plain", b"1")
    for key, value in (("root", b"second"), ("empty", b"more"), ("plain", b"2")):
        try:
            storage.write(key, value, if_absent=True)
        except AlreadyExists:
            continue
        raise CheckFailed(f"a write if absent replaced {key}, which was there", hint=ONE_WRITER)
    contents = [storage.read(key) for key in ("root", "empty", "plain")]
    _require(contents == [b"first", b"", b"1"], "a write if absent that was refused changed what was there")
    _require_keys(storage, ["empty", "plain", "root"])
    return "3 keys that are there are refused, 2 repeats of the same bytes are not"


def shows_the_winner(storage: Storage, key: str, won: Sequence[bytes]) -> None:
    """Require that one of several writers of a key if absent was acknowledged, and that its bytes are there."""
    _require(len(won) == 1, f"{len(won)} writers were acknowledged for {key}, which one alone may write", ONE_WRITER)
    _require(storage.read(key) == won[0], f"{key} holds other bytes than its acknowledged writer's", ONE_WRITER)


def keeps_time(storage: Storage) -> str:
    """Require that the times of objects are of a clock that agrees with this machine's."""
    before = time.time()
    storage.write("now", b"x")
    after, info = time.time(), storage.info("now")
    if info is None or not info.modified_s:
        return "the place has no times of objects: what saves left is never old enough to be removed"
    skew_s = max(before - info.modified_s, info.modified_s - after, 0.0)
    text = f"its clock and this machine's are {skew_s:.0f} s apart"
    _require(skew_s <= MAX_SKEW_S, text, "set the clock of this machine: timedatectl set-ntp true")
    return text if skew_s >= 2 else "its clock agrees with this machine's"


def _require(holds: bool, what: str, hint: str | None = None) -> None:
    if not holds:
        raise CheckFailed(what, hint=hint)


def _require_keys(storage: Storage, expected: Sequence[str], prefix: str = "") -> None:
    for listed in (_keys(storage, prefix), sorted(storage.list_keys(prefix))):
        if listed != expected:
            missing, more = sorted({*expected} - {*listed}), sorted({*listed} - {*expected})
            what = f"lacks {missing[0]}" if missing else f"holds {more[0]}" if more else "is not in order"
            raise CheckFailed(f"a listing of {len(expected)} objects {what}", hint=LATE)


def _keys(storage: Storage, prefix: str = "") -> list[str]:
    return [item.key for item in storage.list(prefix)]
