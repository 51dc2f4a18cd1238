"""StepRecord: one committed step as `ls` shows it and as retention judges it; Records reads those of a run.

What was read once of a root is taken from memory while its object is the same, in size and time: what is committed does
not change. A prune after each save then reads the new step alone.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.format.dcp_state import METADATA as DCP
from ckptkit.format.keys import writer_of
from ckptkit.format.root import Root
from ckptkit.format.saved import Saved
from ckptkit.format.state_tree import METADATA as STATE
from ckptkit.loading.chunk_source import reading_threads
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import at_once, read_root, root_info
from ckptkit.plan.cover import Cover
from ckptkit.runs.catalogue import ListedStep, pin_note
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import ObjectInfo, Storage


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known of a committed step.

    `root` is the root's object. `problem` says what is wrong with the step; `attempt` is empty where even the root
    cannot be read. `saved_at` is in seconds since the epoch: the root's own record, else the time of the root's object,
    0 where a storage has none.
    """

    step: int
    root: ObjectInfo | None = None
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
        """Return every finite number in the metadata by its dotted name: `loss`, `config.optim.lr`.

        Those of the record of a PyTorch program's state, which saves and imports make, are left out.
        """
        numbers: dict[str, float] = {}
        waiting: list[tuple[str, object]] = [("", self.metadata)]
        while waiting:
            name, value = waiting.pop()
            if isinstance(value, Mapping) and name in (STATE, DCP):
                continue
            if isinstance(value, Mapping):
                waiting += [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
            elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
                numbers[name] = value
        return numbers


class Records:
    """The committed steps of a run, as far as they were read: roots by `of`, all that a step needs by `checked`."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._read: dict[ObjectInfo, StepRecord] = {}
        self._sound: set[ObjectInfo] = set()

    def of(self, listed: Sequence[ListedStep]) -> list[StepRecord]:
        """Return the records of those listed steps that are committed, in their order."""
        committed = [each for each in listed if each.root]
        found = [record for record in at_once(self._record, committed) if record is not None]
        roots = {each.root for each in committed}
        self._read = {root: record for root, record in self._read.items() if root in roots}
        self._sound &= roots
        return found

    def checked(self, record: StepRecord) -> StepRecord:
        """Return the record with what a look at all that its root names finds wrong, if anything; reads no data."""
        if record.root is None or record.problem or record.root in self._sound:
            return record
        problem = what_is_wrong(self.storage, record.step, record.root)
        if not problem:
            self._sound.add(record.root)
        return replace(record, problem=problem)

    def _record(self, listed: ListedStep) -> StepRecord | None:
        """Return one record; None where the step was deleted since it was listed."""
        assert listed.root is not None, "a committed step"
        record = self._read.get(listed.root)
        if record is None:
            try:
                record = self._parsed(listed.step, listed.root)
            except StorageError:
                if root_info(self.storage, listed.step) is None:
                    return None
                raise
            if record.problem and root_info(self.storage, listed.step) is None:
                return None
            if not record.problem:
                self._read[listed.root] = record
        return replace(record, pin=pin_note(self.storage, listed.step) if listed.is_pinned else None)

    def _parsed(self, step: int, info: ObjectInfo) -> StepRecord:
        try:
            root = read_root(self.storage, step, info=info)
        except StorageError:
            raise
        except UserError as error:  # damaged, or of a newer format
            return StepRecord(step, info, info.modified_s, problem=error.message)
        return StepRecord(
            step,
            info,
            saved_at=root.saved.saved_at if root.saved else info.modified_s,
            attempt=root.attempt,
            layout=str(root.layout),
            file_bytes=sum(part.data_bytes + part.index_bytes for part in root.parts),
            num_files=len(root.parts),
            metadata=root.metadata,
            saved=root.saved,
        )


def what_is_wrong(storage: Storage, step: int, info: ObjectInfo | None, *, aside: bytes = b"") -> str:
    """Return what is wrong with a step, as `check_step` finds it, empty where nothing is; StorageError stays one."""
    try:
        check_step(storage, step, info, aside=aside)
    except StorageError:
        raise
    except UserError as error:  # damaged, of a newer format, or gone by now
        return " ".join(error.message.split())
    return ""


def check_step(storage: Storage, step: int, info: ObjectInfo | None, *, aside: bytes = b"") -> None:
    """Raise CheckFailed if a step whose root was found is damaged, UserError if it is of a newer format or gone by now.

    `aside` is the root of a step that is set aside, as it is stored. That is as far as it shows without reading data:
    each file that the root names is there with its size, in one listing; each part index has the digest that the root
    records; their chunks cover each tensor exactly once.
    """
    root = Root.from_bytes(aside, f"step {step}") if aside else read_root(storage, step, info=info)
    with CheckpointReader(storage, step, root=root) as reader:
        if faults := [f"{key} {fault}" for key, fault in reader.files.size_faults().items()]:
            raise CheckFailed(faults[0] + (f", and {len(faults) - 1} more files" if faults[1:] else ""))
        _check_cover(reader)


def _check_cover(reader: CheckpointReader) -> None:
    root = reader.root
    cover = Cover(list(root.tensors.values()), is_share=root.share is not None)
    with reading_threads(reader.num_threads, reader) as pool:
        for _ in pool.map(
            lambda part: cover.add(reader.files.read_index(part), f"{reader.url}/{part.index}"), root.parts
        ):
            pass
    cover.check(reader.url, lambda: ((writer_of(part.index), reader.files.read_index(part)) for part in root.parts))
