"""StepRecord: one committed step as `ls` shows it and as retention judges it; Records reads those of a run.

A step that was read once is taken from memory the next time, since what is committed does not change: a prune after
every save then costs three look-ups a step, and no root but the new one is read.
"""

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.format.root import ROOT_KEY, Root, step_folder
from ckptkit.format.saved import Saved
from ckptkit.loading.reader import read_root
from ckptkit.runs.catalogue import NUM_LOOKUPS_AT_ONCE, step_folders
from ckptkit.runs.pins import pin_note
from threefold.errors import StorageError, UserError
from threefold.storage import ObjectInfo, Storage


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known of a committed step.

    `problem` says what is wrong with it; `attempt` is empty where even the root cannot be read. `saved_at` is in
    seconds since the epoch: the root's own record, else the time of the root's object, 0 where a storage tells none.
    """

    step: int
    saved_at: float = 0.0
    pin: str | None = None
    problem: str = ""
    attempt: str = ""
    layout: str = ""
    file_bytes: int = 0
    num_files: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    saved: Saved | None = None

    @property
    def is_readable(self) -> bool:
        """Whether the root was read."""
        return bool(self.attempt)

    @property
    def is_good(self) -> bool:
        """Whether the root was read and nothing is known to be wrong with the files that it names."""
        return self.is_readable and not self.problem

    def metrics(self) -> dict[str, float]:
        """Every finite number in the metadata by its dotted name: `loss`, `config.optim.lr`."""
        found: dict[str, float] = {}
        waiting: list[tuple[str, object]] = [("", self.metadata)]
        while waiting:
            name, value = waiting.pop()
            if isinstance(value, Mapping):
                waiting += [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
            elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
                found[name] = value
        return found


class Records:
    """The committed steps of a run; with check_parts each file that a root names is looked for, with its size."""

    def __init__(self, storage: Storage, *, check_parts: bool) -> None:
        self.storage = storage
        self._check_parts = check_parts
        self._known: dict[int, tuple[ObjectInfo, StepRecord]] = {}

    def read(self) -> list[StepRecord]:
        """The records of all committed steps, ascending; the newest is always read anew."""
        steps = step_folders(self.storage)
        with ThreadPoolExecutor(NUM_LOOKUPS_AT_ONCE) as pool:
            infos = list(pool.map(self._root_info, steps))
            committed = [(step, info) for step, info in zip(steps, infos, strict=True) if info is not None]
            if committed:
                self._known.pop(committed[-1][0], None)
            found = [record for record in pool.map(self._record, *zip(*committed, strict=True)) if record is not None]
        for step in self._known.keys() - dict(committed).keys():
            del self._known[step]
        return found

    def _root_info(self, step: int) -> ObjectInfo | None:
        return self.storage.info(f"{step_folder(step)}/{ROOT_KEY}")

    def _record(self, step: int, info: ObjectInfo) -> StepRecord | None:
        """One record; None where the step was deleted since it was listed."""
        known, record = self._known.get(step, (None, None))
        if record is None or known != info:
            try:
                record = self._read(step, info)
            except StorageError:
                if self._root_info(step) is None:
                    return None
                raise
            if record.problem and self._root_info(step) is None:
                return None
            if not record.problem:
                self._known[step] = (info, record)
        return replace(record, pin=pin_note(self.storage, step))

    def _read(self, step: int, info: ObjectInfo) -> StepRecord:
        try:
            root = read_root(self.storage, step)
        except StorageError:
            raise
        except UserError as error:  # damaged, or of a newer format
            return StepRecord(step, info.modified_s, problem=error.message)
        return StepRecord(
            step,
            saved_at=root.saved.saved_at if root.saved else info.modified_s,
            problem=missing_files(self.storage, root) if self._check_parts else "",
            attempt=root.attempt,
            layout=str(root.layout),
            file_bytes=sum(part.data_bytes + part.index_bytes for part in root.parts),
            num_files=len(root.parts),
            metadata=root.metadata,
            saved=root.saved,
        )


def missing_files(storage: Storage, root: Root) -> str:
    """Which file that a root names is not there with its size, and of how many; empty where all are."""
    folder = step_folder(root.step)
    sizes = {item.key: item.size_bytes for item in storage.list(f"{folder}/{root.attempt}/")}
    named = [pair for part in root.parts for pair in ((part.data, part.data_bytes), (part.index, part.index_bytes))]
    wrong = [(key, size) for key, size in named if sizes.get(f"{folder}/{key}") != size]
    if not wrong:
        return ""
    key, size = wrong[0]
    found = sizes.get(f"{folder}/{key}")
    what = "is missing" if found is None else f"has {found:,} bytes, its root says {size:,}"
    return f"{key} {what}" + (f", and {len(wrong) - 1} more files" if wrong[1:] else "")
